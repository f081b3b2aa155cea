"""Generation with a real engine: killed and resumed, and with a greedy first response that extraction knows again."""

import json
import signal
import subprocess
import time

import pytest

from breakeven import artefacts, tables
from places import ENGINE_PYTHON, MODEL_PYTHON, ROOT

pytestmark = pytest.mark.engines
SETTINGS = {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 2, "enforce_eager": True}
SAMPLING = {"max_tokens": 32, "temperature": 0.7, "top_p": 1, "seed": 0}
PROMPTS, SAMPLES = 4, 3


def test_a_killed_generation_goes_on_and_its_first_responses_are_greedy(finished, tmp_path):
    out, states = tmp_path / "responses/shard-000000.parquet", tmp_path / "states/shard-000000.safetensors"
    command = [ENGINE_PYTHON, ROOT / "scripts/generate_responses.py", "--target", finished / "results/target"]
    command += ["--pool", finished / "results/prompts/pool.parquet", "--start", "0", "--count", str(PROMPTS)]
    command += ["--sampling", json.dumps(SAMPLING), "--samples-per-prompt", str(SAMPLES), "--greedy-first"]
    command += ["--settings", json.dumps(SETTINGS), "--out", out]
    command += ["--environment", json.dumps({"VLLM_CPU_KVCACHE_SPACE": "1"})]
    partial = out.with_name(out.name + ".partial")
    with subprocess.Popen(command) as process:
        while process.poll() is None and (not partial.is_file() or partial.read_text().count("\n") < 3):
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    kept = partial.read_text().splitlines()[1:3]
    assert not out.exists() and len(kept) == 2
    subprocess.run(command, check=True)
    rows = artefacts.read_table(out, tables.RESPONSES).to_pylist()
    assert [row["sample"] for row in rows] == [*range(SAMPLES)] * PROMPTS and not partial.exists()
    for line in kept:
        index, tokens, reason = json.loads(line)
        assert (rows[index]["response_token_ids"], rows[index]["finish_reason"]) == (tokens, reason)
    for row in rows:
        assert json.loads(row["sampling"]) == SAMPLING | ({"temperature": 0} if row["sample"] == 0 else {})
    assert any(rows[i]["response_token_ids"] != rows[i + 1]["response_token_ids"] for i in range(1, len(rows), SAMPLES))

    subprocess.run(
        [MODEL_PYTHON, ROOT / "scripts/extract_hidden_states.py", "--target", finished / "results/target"]
        + ["--responses", out, "--out", states],
        check=True,
    )
    manifest = artefacts.read_manifest(artefacts.manifest_path(states), "hidden_states")
    assert manifest["counts"]["greedy_sequences"] == PROMPTS
    assert manifest["canary"]["greedy_share"] >= manifest["canary"]["required"] == 0.95
