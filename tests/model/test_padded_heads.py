"""The padded copies that are served with tensor parallelism compute what their originals compute."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import tinymodels
from breakeven import checkpoint, target, vocabulary
from breakeven.drafter import Rows

SCRIPT = Path(__file__).parents[2] / "benchmarks/padded_heads.py"
IDS = np.arange(1, 120, 2)


def padded(source: Path, out: Path) -> Path:
    command = [sys.executable, SCRIPT, source, out, "--key-value-heads", "4"]
    subprocess.run(command, check=True, capture_output=True)
    config = json.loads((out / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (8, 4, 8)
    return out


def test_target_and_drafter(target_folder, tmp_path):
    tokens = torch.arange(1, 40)[None]
    folders = target_folder, padded(target_folder, tmp_path / "target")
    original, copy = (target.load_model(folder, "cpu", "float32") for folder in folders)
    with torch.no_grad():
        torch.testing.assert_close(copy(tokens).logits, original(tokens).logits, rtol=1e-4, atol=1e-4)

    drafter = tinymodels.make_drafter(target_folder, torch.from_numpy(IDS))
    (tmp_path / "drafter").mkdir()
    maps = vocabulary.maps(IDS, tinymodels.VOCABULARY)
    checkpoint.save(tmp_path / "drafter", drafter, *maps, target.text_config(target_folder))
    copy, ids = checkpoint.load(padded(tmp_path / "drafter", tmp_path / "copy"), target_folder, "cpu")
    original, _ = checkpoint.load(tmp_path / "drafter", target_folder, "cpu")
    assert ids.tolist() == IDS.tolist()
    features = torch.randn(1, 20, 3, 32)
    rows = Rows.suffix(20, 0)
    outputs = [drafter.step(tokens[:, :20], drafter.fuse(features), None, rows)[0] for drafter in (original, copy)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)


def test_fewer_heads_are_refused(target_folder, tmp_path):
    command = [sys.executable, SCRIPT, target_folder, tmp_path / "out", "--key-value-heads", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "has 2 already" in done.stderr and not (tmp_path / "out").exists()
