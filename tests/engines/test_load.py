"""Four requests at once against a real vLLM: each has its own acceptance, and together they are what the server counted."""

import json
import subprocess
import sys

import pytest
import yaml

from breakeven import artefacts, load, tables
from places import DRAFTER, ENGINE_PYTHON, ROOT

pytestmark = pytest.mark.engines
ENGINE = yaml.safe_load((ROOT / "config.yaml").read_text())["engines"]["vllm"]
SETTINGS = {part: ENGINE[part]["cpu"] for part in ("flags", "environment")}
PLAIN = pytest.param({}, id="plain", marks=pytest.mark.nightly)  # the counts of the other, less those of drafts


@pytest.mark.parametrize("arm", [pytest.param({"drafter": "shipped", "k": 3}, id="shipped-k3"), PLAIN])
def test_four_at_once(arm, finished, tmp_path):
    out = tmp_path / "pass-1.parquet"
    protocol = {
        "name": "load-4",
        "max_tokens": 24,
        "temperature": 0,
        "ignore_eos": True,
        "concurrency": 4,
        "requests": 8,
    }
    subprocess.run(
        [sys.executable, ROOT / "scripts/benchmark.py", "--arm", json.dumps({"name": "load", "engine": "vllm"} | arm)]
        + ["--pass", "1", "--engine-settings", json.dumps(SETTINGS), "--protocol", json.dumps(protocol)]
        + ["--prompts", ROOT / "resources/reference-prompts.jsonl", "--engine-python", ENGINE_PYTHON]
        + ["--target", finished / "results/target", "--out", out]
        + (["--checkpoint", DRAFTER] if arm else []),
        check=True,
    )
    rows = artefacts.read_table(out, tables.BENCHMARK).to_pylist()
    prompts = [row["prompt_id"] for row in rows]
    assert len(rows) == 8 and len(set(prompts)) == 5 and prompts[5:] == prompts[:3]
    assert {row["completion_tokens"] for row in rows} == {24}
    ends = [row["sent_at"] + row["e2e_s"] for row in rows]
    assert load.in_flight([row["sent_at"] for row in rows], ends, 4)[1] > 0
    assert load.in_flight([row["sent_at"] for row in rows], ends, 5)[1] == 0
    manifest = artefacts.read_manifest(artefacts.manifest_path(out), "benchmark")
    counters = manifest["server"]["counters"]
    assert counters["completion_tokens"] == 8 * 24 and manifest["counts"]["requests"] == 8
    assert set(manifest["sanity"]) == set(prompts)
    if not arm:
        assert {row["steps"] for row in rows} == {None} and counters["steps"] == 0
        return
    for name in ("steps", "drafted", "accepted"):
        assert sum(row[name] for row in rows) == counters[name] > 0
    summed = [sum(values) for values in zip(*(row["accepted_per_position"] for row in rows), strict=True)]
    assert summed == counters["accepted_per_position"]
    for row in rows:
        assert 0 <= 1 + row["steps"] + row["accepted"] - 24 <= 3
