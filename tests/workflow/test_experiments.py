"""Every experiment plans its jobs and its budget here, without weights, data or a hub."""

import pytest

from project import ROOT, copy_project, planned, snakemake

pytestmark = pytest.mark.workflow

KIMI = "experiments/kimi-k2.5.yaml"
EXPERIMENTS = [
    # An overlay named after another goes on top of it.
    ([KIMI] if path.name.startswith("kimi-k2.5-") else []) + [f"experiments/{path.name}"]
    for path in sorted((ROOT / "experiments").glob("*.yaml"))
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("a path with spaces") / "break even")


@pytest.mark.parametrize("overlays", EXPERIMENTS, ids=lambda overlays: overlays[-1])
def test_an_experiment_is_planned_without_its_weights(work, overlays):
    jobs = planned(work, config=overlays)
    assert jobs["report"] == 1 and jobs["benchmark"] >= 3 and "plan" not in jobs
    done = snakemake(work, "--quiet", "all", "--", "plan", config=overlays)
    rows = {line.split("|")[1].strip(): line.split("|") for line in done.stdout.splitlines() if line.startswith("|")}
    jobs.pop("environment", None)
    assert {name: int(rows[name][3]) for name in jobs} == jobs
    assert "unknown" not in rows["extract_hidden_states"][5]
    # Whether it fits depends on the disk of this machine; where it does not, the refusal is the last word.
    refused = "the stages to do write" in done.stdout
    assert (done.returncode != 0) == refused, done.stdout + done.stderr


def test_the_reference_cases_disk_is_known_before_it_is_full(work):
    done = snakemake(work, "--quiet", "all", "--", "plan", config=KIMI)
    assert "825.9 GB" in done.stdout and "57,353 bytes a token" in done.stdout
    assert "published facts, no download" in done.stdout
