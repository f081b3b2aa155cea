"""The small experiment from nothing to a report: what came out, and that it is consistent from stage to stage."""

import json
import os
import shutil
import zipfile

import numpy as np
import psutil
import pytest
import yaml
from safetensors import safe_open

from breakeven import acceptance, artefacts, tables
from project import SMALL, linked_copy, planned, snakemake

pytestmark = [pytest.mark.workflow, pytest.mark.engines]


def read(work, path, schema=None):
    return artefacts.read_table(work / "results" / path, schema)


def test_every_step_of_a_walk_has_a_place_in_its_output(finished):
    drafter = artefacts.read_manifest(finished / "results/drafters/own/checkpoint/manifest.json", "drafter")
    longest = drafter["counts"]["longest_response"]
    assert 1 < longest <= 48
    for folder in ("drafters/own", "benchmarks/vllm-own-k3"):
        walk = read(finished, f"{folder}/offline.parquet", tables.OFFLINE).to_pandas()
        rows = artefacts.read_manifest(finished / f"results/{folder}/offline.manifest.json", "offline")[
            "by_output_position"
        ]
        for k, of_k in walk.groupby("k"):
            assert sum(row["steps"] for row in rows if row["k"] == k) == of_k["steps"].iloc[0]
        assert {row["trained"] for row in rows} == {longest}


def test_the_report_is_there_and_stands_alone(finished):
    page = (finished / "results/report/index.html").read_text()
    assert "<table" in page and "<svg" in page or "data:image" in page
    assert 'src="http' not in page and 'href="http' not in page
    assert "vllm-own-k3" in page or "drafter own, K = 3" in page


def test_a_second_run_does_nothing_and_nothing_is_left_running(finished):
    assert planned(finished) == {}
    mine = [p for p in psutil.process_iter(["cmdline"]) if str(finished) in " ".join(p.info["cmdline"] or [])]
    servers = [
        p for p in psutil.process_iter(["cwd", "pid"]) if p.info["cwd"] == str(finished) and p.pid != os.getpid()
    ]
    assert mine == [] and servers == []


def test_prompts_are_nested_counted_and_apart_from_the_benchmark(finished):
    pool = read(finished, "prompts/pool.parquet", tables.PROMPTS)
    assert pool["rank"].to_pylist() == list(range(pool.num_rows))
    counts = artefacts.read_manifest(finished / "results/prompts/pool.manifest.json", "prompts")["counts"]
    assert counts["in"] == counts["kept"] + sum(counts["rejected"].values()) and counts["kept"] == pool.num_rows
    assert counts["rejected"]["truncated"] == 1
    responses = [read(finished, f"responses/shard-{start}.parquet", tables.RESPONSES) for start in ("000000", "000024")]
    asked = [prompt for shard in responses for prompt in shard["prompt_id"].to_pylist()]
    assert asked == pool["prompt_id"].to_pylist()[:48]


def test_token_ids_are_the_same_in_every_stage(finished):
    responses = read(finished, "responses/shard-000024.parquet", tables.RESPONSES)
    with safe_open(finished / "results/hidden_states/shard-000024.safetensors", "np") as file:
        token_ids, starts = file.get_tensor("token_ids"), file.get_tensor("cu_seqlens")
        mask, held_out = file.get_tensor("loss_mask"), file.get_tensor("held_out")
        assert file.get_slice("hidden").get_shape() == [starts[-1], 3, 576]
        assert file.get_slice("last").get_shape() == [starts[-1], 576]
    for i, row in enumerate(responses.to_pylist()):
        span = slice(starts[i], starts[i + 1])
        assert token_ids[span].tolist() == row["prompt_token_ids"] + row["response_token_ids"]
        assert mask[span].sum() == len(row["response_token_ids"]) <= 48
        assert bool(held_out[i]) == row["held_out"]
    manifest = artefacts.read_manifest(finished / "results/hidden_states/shard-000024.manifest.json", "hidden_states")
    assert manifest["parameters"]["layers"] == [2, 15, 27] and manifest["canary"]["greedy_share"] >= 0.95


def test_the_draft_vocabulary_is_complete(finished):
    with safe_open(finished / "results/drafters/own/checkpoint/model.safetensors", "np") as file:
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    ids = np.arange(len(d2t)) + d2t
    assert len(ids) == 2048 and (np.diff(ids) > 0).all() and np.flatnonzero(t2d).tolist() == ids.tolist() and 2 in ids


def test_served_requests_add_up(finished):
    plain = read(finished, "benchmarks/vllm-plain/pass-1.parquet", tables.BENCHMARK).to_pylist()
    served = read(finished, "benchmarks/vllm-own-k3/pass-1.parquet", tables.BENCHMARK).to_pylist()
    assert [row["prompt_id"] for row in plain] == [row["prompt_id"] for row in served] and len(plain) == 5
    for row in served:
        assert row["completion_tokens"] == len(row["output_token_ids"]) <= 48
        assert 0 <= 1 + row["steps"] + row["accepted"] - row["completion_tokens"] <= 3
        assert sum(row["accepted_per_position"]) == row["accepted"] and row["drafted"] == 3 * row["steps"]
        assert 0 < row["ttft_s"] < row["e2e_s"]
    assert all(row["steps"] is None for row in plain)
    manifest = artefacts.read_manifest(finished / "results/benchmarks/vllm-own-k3/pass-1.manifest.json", "benchmark")
    assert manifest["versions"]["vllm"] and "--speculative-config" in manifest["server"]["command"]
    assert all(found["problem"] is None for found in manifest["sanity"].values())


def test_offline_and_served_acceptance_agree(finished):
    served = read(finished, "benchmarks/vllm-own-k3/pass-1.parquet").to_pylist()
    offline = read(finished, "benchmarks/vllm-own-k3/offline.parquet", tables.OFFLINE).to_pylist()
    steps = sum(row["steps"] for row in served)
    counts = np.sum([row["accepted_per_position"] for row in served], axis=0)
    agreement = acceptance.agreement((steps, counts), (offline[0]["steps"], [row["accepted"] for row in offline]))
    assert agreement.agree, agreement


def test_the_summary_is_complete(finished):
    rows = {row["arm"]: row for row in read(finished, "comparison/summary.parquet", tables.SUMMARY).to_pylist()}
    plain, own = rows["vllm-plain"], rows["vllm-own-k3"]
    assert plain["verdict"] == "baseline" and own["baseline"] == "vllm-plain" and own["k"] == 3
    # One pass says nothing about noise between passes, so no verdict is given.
    assert own["verdict"] == "undecided" and own["speedup"] > 0 and own["acceptance_length"] >= 1
    assert own["rho"] == pytest.approx(own["acceptance_length"] / own["speedup"])
    assert own["offline_acceptance_length"] >= 1


def test_a_drafter_that_the_preflight_refuses_is_a_row_of_the_report(finished, tmp_path):
    work = linked_copy(finished, tmp_path / "work")
    shutil.copytree(work / "results/drafters/own/checkpoint", work / "drafters/broken")
    config = artefacts.read_json(work / "drafters/broken/config.json")
    artefacts.write_json(
        work / "drafters/broken/config.json", config | {"tie_word_embeddings": True, "draft_vocab_size": 7}
    )
    small = yaml.safe_load((work / SMALL).read_text())
    small["drafters"]["broken"] = {"checkpoint": "drafters/broken"}
    small["arms"] = {"vllm-broken-k3": {"engine": "vllm", "protocol": "quick", "drafter": "broken", "k": 3}}
    (work / SMALL).write_text(yaml.safe_dump(small))
    done = snakemake(work)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    rows = {row["arm"]: row for row in read(work, "comparison/summary.parquet", tables.SUMMARY).to_pylist()}
    broken = rows.pop("vllm-broken-k3")
    assert (broken["verdict"], broken["cause"]) == ("refused", "integration") and "lm-head-rows" in broken["fault"]
    assert rows == {row["arm"]: row for row in read(finished, "comparison/summary.parquet").to_pylist()}
    # Snakemake makes log files that a job leaves out; no server wrote into this one.
    assert not any(path.read_text() for path in (work / "logs/benchmark/vllm-broken-k3").glob("*.server.log"))
    assert "Refused: preflight: lm-head-rows" in (work / "results/report/index.html").read_text()


def test_snakemakes_own_report_holds_the_page_and_the_figures(finished):
    done = snakemake(finished, "--report", "report.zip")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(finished / "report.zip") as archive:
        names = " ".join(archive.namelist())
    figures = ("speedups", "acceptance", "lengths", "prompts", "step_cost", "training")
    csvs = ("summary", "what_would_pay", "acceptance", "requests")
    for name in ("index.html", *(f"{name}.svg" for name in figures), *(f"{name}.csv" for name in csvs)):
        assert f"/{name}" in names


def test_a_run_ends_with_its_verdicts_and_the_pages_path(finished, tmp_path):
    work = linked_copy(finished, tmp_path / "work")
    done = snakemake(work, "--forcerun", "report")
    assert done.returncode == 0, done.stderr
    assert "verdict" in done.stdout and "The page: results/report/index.html" in done.stdout
    assert "The page:" not in snakemake(work, "-n", "--forcerun", "report").stdout


def test_manifests_hold_no_paths_of_this_machine(finished):
    for path in (finished / "results").rglob("*manifest.json"):
        if "benchmarks" not in path.parts:
            assert str(finished) not in json.dumps(json.loads(path.read_text())), path
