"""The stages without Snakemake: a killed or repeated run goes on, drafters are walked and served, as the rules would."""

import json
import os
import subprocess

import pytest

from breakeven import artefacts, tables
from breakeven.arms import read_arm
from places import ENGINE_PYTHON, MODEL_PYTHON, ROOT

pytestmark = pytest.mark.engines
FLAGS = {"dtype": "bfloat16", "max-model-len": 1024, "max-num-seqs": 4, "enforce-eager": True}
FLAGS |= {"no-enable-prefix-caching": True}
VARIABLES = {
    "ENGINE_PYTHON": ENGINE_PYTHON,
    "MODEL_PYTHON": MODEL_PYTHON,
    "HARDWARE": "cpu",
    "THREADS": "2",
    "SIZE": "16",
    "SHARD_SIZE": "16",
    "SAMPLES_PER_PROMPT": "2",
    "SAMPLING": '{"max_tokens": 24, "temperature": 0.7, "seed": 0}',
    "SETTINGS": '{"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 16, "enforce_eager": true}',
    "ENVIRONMENT": '{"VLLM_CPU_KVCACHE_SPACE": "1"}',
    "EXTRACT_OPTIONS": "",
    "POINTS": "4 8",
    "VOCABULARY": "2048",
    "ARMS": "plain own-8-k2",
    "PASSES": "1",
    "PROMPTS": str(ROOT / "resources/reference-prompts.jsonl"),
    "PROTOCOL": '{"name": "short", "max_tokens": 8, "temperature": 0, "seed": 0}',
    "SERVER": json.dumps({"flags": FLAGS, "environment": {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}}),
    "TRAINING": '{"ttt_steps": 2, "epochs": 1, "batch_tokens": 512}',
}


def box(folder, *stages, **changes):
    command = ["bash", ROOT / "scripts/gpu_box.sh", folder, *stages]
    return subprocess.run(command, env=os.environ | VARIABLES | changes, capture_output=True, text=True)


@pytest.fixture
def folder(finished, tmp_path):
    folder = tmp_path / "a box"
    folder.mkdir()
    for name in ("target", "prompts"):
        (folder / name).symlink_to(finished / "results" / name)
    return folder


def test_the_stages_of_a_box(folder):
    done = box(folder, "generate")
    assert done.returncode == 0 and done.stdout.count("generate 000000") == 1, done.stdout + done.stderr
    failed = box(folder, "train")
    assert failed.returncode != 0 and f"error: train 8 failed; see {folder}/logs/train-own-8.log" in failed.stderr
    done = box(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert said == ["extract 000000"] + [
        f"{stage} {n}" for stage in ("vocabulary", "train", "evaluate") for n in (8, 4)
    ]
    for n in (4, 8):
        point = folder / f"drafters/own-{n}"
        manifest = artefacts.read_manifest(point / "checkpoint/manifest.json", "drafter")
        assert manifest["counts"]["training_sequences"] == n == manifest["parameters"]["samples"]
        assert artefacts.read_table(point / "offline_by_sequence.parquet", tables.OFFLINE_BY_SEQUENCE).num_rows > 0
    assert box(folder).stdout == ""


@pytest.mark.nightly  # two servers; what they are started by has its own tests
def test_a_box_serves_its_arms_and_replays_them(finished, folder):
    (folder / "drafters").mkdir()
    (folder / "drafters/own-8").symlink_to(finished / "results/drafters/own")
    served = ["plain/pass-1", "own-8-k2/pass-1"]
    done = box(folder, "serve", "replay")
    assert done.returncode == 0, done.stdout + done.stderr + (folder / "logs/serve-vllm-plain-pass-1.log").read_text()
    said = [line.split(" ", 1)[1] for line in done.stdout.splitlines()]
    assert said == [f"serve {item}" for item in served] + ["replay own-8-k2"]
    arms = [read_arm(folder / "benchmarks", f"vllm-{item.split('/')[0]}") for item in served]
    assert [(arm.k, len(arm.first_pass)) for arm in arms] == [(0, 5), (2, 5)]
    offline = artefacts.read_table(folder / "benchmarks/vllm-own-8-k2/offline.parquet", tables.OFFLINE)
    assert offline.num_rows == 2
    assert box(folder, "serve", "replay").stdout == ""


def test_an_unknown_stage_is_named(tmp_path):
    done = box(tmp_path, "trian")
    assert done.returncode == 1 and "there is no stage trian; stages are generate, extract" in done.stderr
