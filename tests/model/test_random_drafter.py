"""The random drafter of the step cost: made from the config alone, and good enough for the engines' own checks."""

import subprocess
import sys
from pathlib import Path

import pytest

import tinymodels
from breakeven import artefacts, checkpoint

# Eight layers: with six, two of the three default layers would be the same.
LAYERS = 8
SCRIPT = Path(checkpoint.__file__).parents[1] / "random_drafter.py"


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    return tinymodels.write_target(tmp_path_factory.mktemp("target"), num_hidden_layers=LAYERS)


def write(target_folder, out, *options):
    command = [sys.executable, SCRIPT, "--target", target_folder, "--out", out, *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("options, size", [(["--vocabulary-size", "50"], 50), ([], tinymodels.VOCABULARY)])
def test_its_shape_is_the_targets(target_folder, tmp_path, options, size):
    assert write(target_folder, tmp_path, *options).returncode == 0
    drafter, ids = checkpoint.load(tmp_path, target_folder, "cpu")
    assert len(ids) == size and len(set(ids.tolist())) == size and int(ids.max()) < tinymodels.VOCABULARY
    assert drafter.config.layers == [2, 4, 5] and drafter.config.hidden_size == 32
    manifest = artefacts.read_manifest(tmp_path / "manifest.json", "drafter")
    assert manifest["files"]["model.safetensors"] == artefacts.sha256(tmp_path / "model.safetensors")


def test_the_same_seed_gives_the_same_weights(target_folder, tmp_path):
    for name in "ab":
        assert write(target_folder, tmp_path / name, "--vocabulary-size", "50").returncode == 0
    a, b = (artefacts.sha256(tmp_path / name / "model.safetensors") for name in "ab")
    assert a == b


def test_a_vocabulary_larger_than_the_targets_is_refused(target_folder, tmp_path):
    done = write(target_folder, tmp_path / "out", "--vocabulary-size", "121")
    assert done.returncode == 1 and "not between 1 and the target's vocabulary of 120" in done.stderr
    assert not (tmp_path / "out").exists()
