"""Every experiment plans its jobs and its budget here, without weights, data or a hub."""

import re

import pytest
import yaml

from breakeven import artefacts
from project import ROOT, SMALL, copy_project, planned, snakemake

pytestmark = pytest.mark.workflow

KIMI = "experiments/kimi-k2.5.yaml"
TRAINS_NOTHING = ["experiments/both-engines.yaml"]
EXPERIMENTS = [
    # An overlay named after another goes on top of it.
    ([KIMI] if path.name.startswith("kimi-k2.5-") else []) + [f"experiments/{path.name}"]
    for path in sorted((ROOT / "experiments").glob("*.yaml"))
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    # Without a space, where SGLang cannot compile its n-gram corpus.
    return copy_project(tmp_path_factory.mktemp("experiments") / "project")


@pytest.mark.parametrize("overlays", EXPERIMENTS, ids=lambda overlays: overlays[-1])
def test_an_experiment_is_planned_without_its_weights(work, overlays):
    jobs = planned(work, config=overlays)
    assert jobs["report"] == 1 and jobs["benchmark"] >= 3 and "plan" not in jobs
    done = snakemake(work, "--quiet", "all", "--", "plan", config=overlays)
    rows = {line.split("|")[1].strip(): line.split("|") for line in done.stdout.splitlines() if line.startswith("|")}
    jobs.pop("environment", None)
    assert {name: int(rows[name][3]) for name in jobs} == jobs
    if overlays == TRAINS_NOTHING:
        assert not {"generate_responses", "extract_hidden_states", "train_drafter"} & set(jobs)
    else:
        assert "unknown" not in rows["extract_hidden_states"][5]
    # Whether it fits depends on the disk of this machine; where it does not, the refusal is the last word.
    refused = "the stages to do write" in done.stdout
    assert (done.returncode != 0) == refused, done.stdout + done.stderr


def test_the_reference_cases_disk_is_known_before_it_is_full(work):
    done = snakemake(work, "--quiet", "all", "--", "plan", config=KIMI)
    assert "825.9 GB" in done.stdout and "57,353 bytes a token" in done.stdout
    assert "published facts, no download" in done.stdout


def test_nothing_runs_beside_a_measurement_whatever_resources_are_given(work):
    """--resources replaces the profile's list, and a resource that is not given has no limit."""
    done = snakemake(work, "--resources", "gpu=2", "--", "plan", config=SMALL)
    assert re.search(r"^Provided resources: .*\bmachine\W.*\b100\b", done.stdout + done.stderr, re.M)


def test_a_published_drafter_is_fetched_by_its_rule(work):
    """From a local folder in the hub's layout; an arm and a start of training wait for the same manifest."""
    folder = work / "mirror/drafter"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (folder / "model.safetensors").write_bytes(b"weights")
    overlay = {
        "drafters": {
            "published": {"checkpoint": {"repo": "mirror/drafter", "revision": "0123abc"}},
            "own": {"initialise_from": "published"},
        },
        "arms": {"vllm-published-k3": {"engine": "vllm", "protocol": "quick", "drafter": "published", "k": 3}},
    }
    (work / "published.yaml").write_text(yaml.safe_dump(overlay))
    manifest = "results/published/published/manifest.json"
    done = snakemake(work, "--", manifest, config=[SMALL, "published.yaml"])
    assert done.returncode == 0, done.stdout + done.stderr
    fetched = artefacts.read_manifest(work / manifest, "published_drafter")
    assert fetched["parameters"] == {"repo": "mirror/drafter", "revision": "0123abc"}
    assert (work / "results/published/published/checkpoint/model.safetensors").read_bytes() == b"weights"
    jobs = planned(work, config=[SMALL, "published.yaml"])
    assert "fetch_drafter" not in jobs and jobs["check_drafter"] == 2 and jobs["train_drafter"] == 1
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"other weights")
    assert planned(work, config=[SMALL, "published.yaml"])["fetch_drafter"] == 1
