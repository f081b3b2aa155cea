"""Published drafters whose weights are pickled: tensors are taken over, code is not run."""

import os

import pytest
import torch
from safetensors.torch import load_file

from breakeven import fetching
from breakeven.cli import UserError


def test_pickled_tensors_become_safetensors(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out/checkpoint"
    source.mkdir()
    (source / "config.json").write_text("{}")
    weight = torch.randn(3, 4, dtype=torch.bfloat16)
    torch.save({"fc.weight": weight, "shared": weight, "column": weight.t()}, source / "pytorch_model.bin")
    manifest = fetching.fetch_drafter(str(source), "abc", out, tmp_path / "out/manifest.json")
    tensors = load_file(out / "model.safetensors")
    assert sorted(manifest["files"]) == ["config.json", "model.safetensors"]
    assert torch.equal(tensors["fc.weight"], weight) and torch.equal(tensors["column"], weight.t())
    assert (source / "pytorch_model.bin").is_file()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    torch.save({"fc.weight": Evil()}, source / "pytorch_model.bin")
    with pytest.raises(UserError, match="pytorch_model.bin holds more than tensors"):
        fetching.fetch_drafter(str(source), "abc", tmp_path / "out/checkpoint", tmp_path / "out/manifest.json")
    assert not (tmp_path / "evil").exists() and list((tmp_path / "out").iterdir()) == []
