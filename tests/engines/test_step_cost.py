"""The step cost against a real server: everything is there, a random drafter accepts nothing, and no process is left."""

import json
import subprocess
import sys

import psutil
import pytest

from breakeven import artefacts, tables
from places import ENGINE_PYTHON, MODEL_PYTHON, ROOT

pytestmark = pytest.mark.engines
FLAGS = {"dtype": "bfloat16", "max-model-len": 256, "max-num-seqs": 2, "enforce-eager": True}


def test_step_cost_of_a_real_server(finished, tmp_path):
    target, drafter, out = finished / "results/target", tmp_path / "drafter", tmp_path / "vllm.parquet"
    subprocess.run(
        [MODEL_PYTHON, ROOT / "scripts/random_drafter.py", "--target", target, "--vocabulary-size", "1024"]
        + ["--out", drafter],
        check=True,
    )
    before = set(psutil.pids())
    subprocess.run(
        [sys.executable, ROOT / "scripts/step_cost.py", "--engine", "vllm", "--engine-python", ENGINE_PYTHON]
        + ["--engine-settings", json.dumps({"flags": FLAGS, "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"}})]
        + ["--settings", json.dumps({"ks": [2], "concurrency": [1, 2], "passes": 1, "max_tokens": 8})]
        + ["--target", target, "--checkpoint", drafter, "--out", out],
        check=True,
    )
    rows = artefacts.read_table(out, tables.STEP_COST).to_pylist()
    assert [(row["k"], row["concurrency"], row["requests"]) for row in rows] == [(2, 1, 5), (2, 2, 10)]
    for row in rows:
        assert 1 <= row["acceptance_length"] < 1.1
        assert row["rho_low"] <= row["rho"] <= row["rho_high"] and row["step_low"] <= row["step_s"] <= row["step_high"]
        # AL near 1: each step gives about one token, the first token comes from the prompt.
        assert 6 * row["requests"] <= row["steps"] <= 7 * row["requests"]
    assert "break-even AL" in out.with_suffix(".txt").read_text()
    manifest = artefacts.read_manifest(artefacts.manifest_path(out), "stepcost")
    assert manifest["parameters"]["draft_vocab_size"] == 1024
    assert manifest["versions"]["vllm"] and set(manifest["drift"]) == {"1", "2"}
    left = [
        p
        for p in psutil.process_iter(["pid", "cmdline"])
        if p.pid not in before and str(drafter) in " ".join(p.info["cmdline"] or [])
    ]
    assert not left
