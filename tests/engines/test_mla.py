"""The Kimi experiment's shape, small: the rehearsal runs whole, and vLLM's MLA is the transformers' and ours.

On a GPU where there is one (BREAKEVEN_ENGINE_PYTHON and BREAKEVEN_MODEL_PYTHON name the environments for it), else on the CPU.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

import project
from breakeven import artefacts, benchmark, engines, servers, tables
from breakeven.acceptance import agreement
from breakeven.engines import Speculation
from places import ENGINE_PYTHON, GPUS, HARDWARE, MODEL_PYTHON, ROOT

pytestmark = [
    pytest.mark.engines,
    pytest.mark.nightly,  # the rehearsal takes eight to fourteen minutes
]
REHEARSAL = "experiments/kimi-rehearsal.yaml"
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
K = 3


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A copy of the project in which the rehearsal has run; BREAKEVEN_REHEARSED names one made before."""
    if os.environ.get("BREAKEVEN_REHEARSED"):
        return Path(os.environ["BREAKEVEN_REHEARSED"])
    work = project.copy_project(tmp_path_factory.mktemp("rehearsal") / "break even", every_arm=True)
    done = project.snakemake(work, "--config", f"hardware={HARDWARE}", config=REHEARSAL)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return work


def test_the_rehearsal_serves_its_arms(rehearsed):
    results = rehearsed / "results"
    arms = {row["arm"]: row for row in artefacts.read_table(results / "comparison/summary.parquet").to_pylist()}
    assert set(arms) == {"vllm-plain", "vllm-own-k3", "vllm-tuned-k3", "vllm-shipped-k5"}
    for name in arms:
        rows = artefacts.read_table(results / "benchmarks" / name / "pass-1.parquet").to_pylist()
        assert len(rows) == 12 and (name == "vllm-plain" or all(row["steps"] for row in rows))
    architectures = {
        name: artefacts.read_json(results / folder / "config.json")["architectures"]
        for name, folder in (("own", "drafters/own/checkpoint"), ("random", "stepcost/drafter"))
    }
    assert set(map(tuple, architectures.values())) == {("Eagle3DeepseekV2ForCausalLM",)}
    assert (results / "report/index.html").is_file()


def test_captured_hidden_states_are_those_of_transformers(rehearsed):
    """Layer by layer: of all inputs of the target's layers in transformers, the claimed one is the nearest."""
    assert_each_layer_is_its_own(rehearsed / "results/parity/vllm.json")


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_captured_hidden_states_of_two_gpus_are_those_of_transformers(rehearsed, tmp_path):
    """Tensor parallel: our connector writes the first rank's, in a process of its own."""
    results, settings = rehearsed / "results", CONFIG["responses"]["settings"]["vllm"]["cuda"]
    (responses, *_) = sorted((results / "responses").glob("*.parquet"))
    subprocess.run(
        [ENGINE_PYTHON, ROOT / "scripts/check_parity.py", "--target", results / "target", "--responses", responses]
        + ["--hidden-states", results / "hidden_states" / f"{responses.stem}.safetensors", "--engine", "vllm"]
        + ["--settings", json.dumps(settings | {"tensor_parallel_size": 2}), "--device", "cuda"]
        + ["--out", tmp_path / "vllm.json"],
        check=True,
    )
    assert_each_layer_is_its_own(tmp_path / "vllm.json")


def assert_each_layer_is_its_own(path):
    rows = artefacts.read_json(path)["layers"]
    assert [row["layer"] for row in rows] == [2, 4, 5]
    for row in rows:
        assert row["nearest"] == row["layer"] and row["difference"] < row["next_layer"] / 4


def test_served_acceptance_is_that_of_the_walk(rehearsed, tmp_path):
    """A drafter that has learnt a shard by heart is served on its prompts: vLLM's MLA drafter computes what ours does."""
    results, checkpoint = rehearsed / "results", tmp_path / "checkpoint"
    (shard, *_) = sorted((results / "responses").glob("*.parquet"))
    settings = {"ttt_steps": 3, "epochs": 40, "learning_rate": 0.003, "batch_tokens": 512, "seed": 0}
    subprocess.run(
        [MODEL_PYTHON, ROOT / "scripts/train_drafter.py", "--target", results / "target", "--out", checkpoint]
        + ["--vocabulary", results / "drafters/own/vocabulary.safetensors", "--settings", json.dumps(settings)]
        + ["--hidden-states", results / "hidden_states" / f"{shard.stem}.safetensors", "--device", HARDWARE],
        check=True,
    )
    responses = artefacts.read_table(shard, tables.RESPONSES).to_pylist()
    prompts = [
        {"prompt_id": row["prompt_id"], "token_ids": row["prompt_token_ids"]}
        for row in responses
        if not row["held_out"]
    ][:12]
    served = {part: CONFIG["engines"]["vllm"][part][HARDWARE] for part in ("flags", "environment")}
    protocol = benchmark.Protocol("learnt", max_tokens=48, temperature=0, ignore_eos=True)
    speculation = Speculation("eagle3", K, str(checkpoint))
    vllm = engines.engine("vllm")
    with servers.speculating(
        vllm, ENGINE_PYTHON, results / "target", speculation, served, set(), HARDWARE, tmp_path / "server.log"
    ) as server:
        rows, _ = benchmark.measure(
            benchmark.Client(vllm, server.url, server.name, server.key), protocol, prompts, speculation
        )
    rows = [dict.fromkeys(tables.BENCHMARK.names) | row for row in rows]
    artefacts.write_table(tmp_path / "pass-1.parquet", rows, tables.BENCHMARK)
    subprocess.run(
        [MODEL_PYTHON, ROOT / "scripts/replay_served.py", "--target", results / "target", "--checkpoint", checkpoint]
        + ["--k", str(K), "--served", tmp_path / "pass-1.parquet", "--out", tmp_path / "offline.parquet"]
        + ["--device", HARDWARE],
        check=True,
    )
    curve = sum(row["steps"] for row in rows), [sum(row["accepted_per_position"][i] for row in rows) for i in range(K)]
    walked = artefacts.read_table(tmp_path / "offline.parquet", tables.OFFLINE).to_pylist()
    print("served", curve, "walk", walked)
    assert curve[1][0] > 0.5 * curve[0]  # else the comparison would say nothing
    assert agreement(curve, (walked[0]["steps"], [row["accepted"] for row in walked])).agree
