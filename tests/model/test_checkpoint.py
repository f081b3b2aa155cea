"""Checkpoints: written for the engines, read back the same; broken ones are named."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tinymodels
from breakeven import artefacts, checkpoint, target, vocabulary
from breakeven.cli import UserError

IDS = np.arange(1, 120, 2)


@pytest.fixture
def saved(target_folder, tmp_path):
    drafter = tinymodels.make_drafter(target_folder, torch.from_numpy(IDS))
    d2t, t2d = vocabulary.maps(IDS, tinymodels.VOCABULARY)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.save(folder, drafter, d2t, t2d, target.text_config(target_folder))
    return folder, drafter


def test_others_may_read_what_they_may_read_of_any_new_file(saved):
    folder, _ = saved
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_round_trip(saved, target_folder):
    folder, drafter = saved
    loaded, ids = checkpoint.load(folder, target_folder, "cpu")
    assert ids.tolist() == IDS.tolist() and loaded.config.layers == drafter.config.layers
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=0.02, rtol=0.01)


def test_what_the_engines_read(saved):
    folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["tie_word_embeddings"] is False
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5000.0
    assert config["draft_vocab_size"] == 60 and config["vocab_size"] == tinymodels.VOCABULARY
    # Layers 1, 3, 5 are not the default of six layers: both engines' conventions are written.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    with safe_open(folder / "model.safetensors", "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor("d2t").dtype == torch.int64 and file.get_tensor("t2d").dtype == torch.bool
        assert file.get_tensor("fc.weight").dtype == torch.bfloat16
    assert shapes["fc.weight"] == (32, 96) and shapes["midlayer.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["lm_head.weight"] == (60, 32) and "embed_tokens.weight" not in shapes


def test_the_preflight_finds_nothing(saved, target_folder):
    from breakeven import preflight

    folder, _ = saved
    for engine, version in (("vllm", "0.20.2"), ("vllm", "0.32.0"), ("sglang", "0.5.23")):
        findings = preflight_errors(preflight, folder, target_folder, engine, version)
        assert findings == [], (engine, version, findings)


def preflight_errors(preflight, folder, target_folder, engine, version):
    import subprocess
    import sys
    from pathlib import Path

    script = Path(preflight.__file__).parents[1] / "check_drafter.py"
    out = folder.parent / f"{engine}-{version}.json"
    command = [sys.executable, script, "--checkpoint", folder, "--target", target_folder, "--engine", engine]
    command += ["--engine-version", version, "--layers", "1,3,5", "--json", out]
    subprocess.run([str(word) for word in command], capture_output=True, text=True)
    return [f["id"] for f in json.loads(out.read_text())["findings"] if f["level"] == "ERROR"]


def test_the_manifests_layers_go_before_the_configs(saved, target_folder):
    folder, _ = saved
    artefacts.write_manifest(folder / "manifest.json", "drafter", parameters={"layers": [2, 3, 4]})
    assert checkpoint.load(folder, target_folder, "cpu")[0].config.layers == [2, 3, 4]


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, [1, 3, 4]),  # vLLM's: inputs
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, [2, 4, 5]),  # SGLang's: outputs
        ({"eagle_config": {"layer_ids": [1, 3, 4]}}, [1, 3, 4]),  # vLLM's V2 runner
        ({}, [2, 3, 3]),
    ],
)
def test_layer_ids_are_read_as_the_engine_reads_them(saved, target_folder, ids, expected):
    folder, _ = saved
    edit(folder, **{"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None} | ids)
    assert checkpoint.read_config(folder, target_folder).layers == expected


def test_the_speculators_format_is_read_as_vllm_reads_it(saved, target_folder):
    folder, drafter = saved
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(folder, rope_theta=5e5, rope_scaling=scaling, rope_parameters=None, intermediate_size=40)
    layer = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config"):
        layer.pop(key)
    raw = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 60,
           "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "transformer_layer_config": layer}  # fmt: skip
    artefacts.write_json(folder / "config.json", raw)
    shape = checkpoint.read_config(folder, target_folder)
    assert (shape.rope_theta, shape.rope_scaling) == (5e5, scaling)
    assert (shape.intermediate_size, shape.draft_vocab_size, shape.layers) == (40, 60, [1, 3, 5])
    assert shape.norm_before_residual and not shape.norm_before_fc
    edit(folder, speculators_model_type="peagle")
    with pytest.raises(UserError, match="speculators_model_type peagle cannot be evaluated offline"):
        checkpoint.read_config(folder, target_folder)


def test_broken_checkpoints_are_named(saved, target_folder):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "d2t"}, folder / "model.safetensors")
    with pytest.raises(UserError, match="60 of 120 tokens but there is no d2t"):
        checkpoint.load(folder, target_folder, "cpu")
    save_file(tensors | {"d2t": torch.from_numpy(IDS)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="must hold offsets"):
        checkpoint.load(folder, target_folder, "cpu")
    save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"fc\.weight.*check_drafter"):
        checkpoint.load(folder, target_folder, "cpu")
    edit(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(UserError, match="cannot be evaluated offline"):
        checkpoint.load(folder, target_folder, "cpu")


def test_a_missing_target_tensor_is_named(target_folder):
    with pytest.raises(UserError, match=r"no tensor model\.layers\.9"):
        target.load_tensors(target_folder, ["model.layers.9.mlp.up_proj.weight"])


def test_weights_that_are_cut_off_are_named(target_folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((target_folder / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(UserError, match="model.safetensors: not a readable safetensors file"):
        target.load_tensors(tmp_path, ["model.norm.weight"])


def test_a_vocabulary_in_any_order_is_cropped_with_its_heads_rows(target_folder, states, tmp_path, monkeypatch):
    """Some publish d2t in order of frequency."""
    ids = torch.from_numpy(IDS)[torch.randperm(len(IDS), generator=torch.Generator().manual_seed(0))]
    whole, folder, out = tinymodels.make_drafter(target_folder, ids), tmp_path / "whole", tmp_path / "cropped"
    folder.mkdir()
    _, t2d = vocabulary.maps(IDS, tinymodels.VOCABULARY)
    checkpoint.save(folder, whole, ids.numpy() - np.arange(len(ids)), t2d, target.text_config(target_folder))
    monkeypatch.setattr(target, "special_token_ids", lambda _: [])  # this target has no tokenizer
    given = ["--target", target_folder, "--checkpoint", folder, "--hidden-states", states]
    tinymodels.run_script("crop_vocabulary", *given, "--size", 20, "--out", out)
    cropped, kept = checkpoint.load(out, target_folder, "cpu")
    assert len(kept) == 20 and (kept.diff() > 0).all()
    rows = [ids.tolist().index(token) for token in kept.tolist()]
    torch.testing.assert_close(cropped.lm_head.weight, whole.lm_head.weight[rows], atol=0.02, rtol=0.01)
    empty = tinymodels.write_shard(target_folder, tmp_path / "shard-000000.safetensors", count=1)  # which is held out
    given[-1] = empty
    with pytest.raises(UserError, match="no training response"):
        tinymodels.run_script("crop_vocabulary", *given, "--size", 20, "--out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
