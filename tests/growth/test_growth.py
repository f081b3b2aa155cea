"""Nested growth, run rather than planned: 48 prompts, then 72, then 48 again, every stage on real parts.

    python -m pytest tests/growth

Minutes on two cores, so not among the default tests; tests/workflow/test_reruns.py plans the same in seconds.
"""

import re
import shutil
from collections import Counter

import pytest

from breakeven import artefacts
from project import SMALL, planned, snakemake

pytestmark = [pytest.mark.workflow, pytest.mark.engines]

RETRAINED = {
    "select_prompts": 1, "build_vocabulary": 1, "train_drafter": 1, "evaluate_drafter": 1, "check_drafter": 1, "benchmark": 1,
    "replay_served": 1, "compare": 1, "report": 1,
}  # fmt: skip
GROWN = {"generate_responses": 1, "extract_hidden_states": 1} | RETRAINED


def hashes(work) -> dict[str, str]:
    return {str(p.relative_to(work)): artefacts.sha256(p) for p in work.glob("results/**/*") if p.is_file()}


def ran(work, *config: str) -> dict[str, int]:
    done = snakemake(work, config=[SMALL, *config])
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    jobs = Counter(re.findall(r"^Finished jobid: \d+ \(Rule: (\w+)\)", done.stdout + done.stderr, re.M))
    jobs.pop("all", None)
    return dict(jobs)


def of(files: dict[str, str], *folders: str) -> dict[str, str]:
    return {
        path: digest for path, digest in files.items() if path.startswith(tuple(f"results/{name}/" for name in folders))
    }


def test_growing_runs_new_shards_and_their_consequences_and_shrinking_re_trains(finished, tmp_path):
    work = shutil.copytree(finished, tmp_path / "work", symlinks=True)
    (work / "grown.yaml").write_text("prompts: {size: 72}\n")
    small = hashes(work)

    assert ran(work, "grown.yaml") == GROWN
    grown = hashes(work)
    new = {path for path in of(grown, "responses", "hidden_states") if path not in small}
    assert new == {
        f"results/{name}"
        for name in (
            "responses/shard-000048.parquet",
            "responses/shard-000048.manifest.json",
            "hidden_states/shard-000048.safetensors",
            "hidden_states/shard-000048.manifest.json",
        )
    }
    # The smaller set lies inside the larger one, and the arm without a drafter was not measured again.
    kept = of(small, "target", "responses", "hidden_states", "benchmarks/vllm-plain") | {
        name: small[name] for name in ("results/prompts/pool.parquet", "results/prompts/rejected.parquet")
    }
    assert {path: grown[path] for path in kept} == kept
    weights = "results/drafters/own/checkpoint/model.safetensors"
    assert grown[weights] != small[weights]

    assert ran(work) == RETRAINED
    shrunk = hashes(work)
    # Back to the same drafter, bit for bit; the larger set's shards stay for the next growth.
    assert shrunk[weights] == small[weights]
    assert {path: shrunk[path] for path in kept} == kept and {path: shrunk[path] for path in new} == {
        p: grown[p] for p in new
    }
    assert planned(work, config=[SMALL, "grown.yaml"]) == RETRAINED
