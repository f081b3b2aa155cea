"""MLA drafters against a slow reference in the engines' form (a cache of latents, complex rotation, yarn by hand)."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import tinymodels
from breakeven import artefacts, checkpoint, hidden_states, preflight, speed, target, vocabulary, walk, whatif
from breakeven.cli import UserError
from breakeven.drafter import DrafterConfig, initialise_from_drafter

SCRIPTS = Path(preflight.__file__).parents[1]
IDS = torch.arange(0, 120, 2)


@pytest.fixture
def drafter(mla_target):
    return tinymodels.make_drafter(mla_target, IDS).eval()


def yarn_frequencies(dim: int, rope: dict) -> torch.Tensor:
    """Inverse frequencies [dim / 2] of yarn, pair by pair, as DeepSeek's own inference code has them."""
    theta, factor, length = rope["rope_theta"], rope["factor"], rope["original_max_position_embeddings"]

    def correction(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = math.floor(correction(rope["beta_fast"])), math.ceil(correction(rope["beta_slow"]))
    low, high = max(low, 0), min(high, dim - 1)
    found = []
    for pair in range(dim // 2):
        plain = theta ** (-2 * pair / dim)
        interpolated = min(max((pair - low) / max(high - low, 0.001), 0), 1)
        found.append(plain / factor * interpolated + plain * (1 - interpolated))
    return torch.tensor(found)


def rotate(x: torch.Tensor, position: int, frequencies: torch.Tensor) -> torch.Tensor:
    """x [..., dim], whose pairs (0, 1), (2, 3) ... are complex numbers, turned by position * frequency."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(()), position * frequencies)).flatten(-2)


def reference_chain(drafter, tokens, features, row, steps):
    """One row's chain with a growing cache of latents and shared rotated keys, kv_b folded into query and output.

    tokens: x[0] ... x[row + steps]; features [T, H] fused. Returns the layer outputs of each step.
    """
    layer, shape = drafter.midlayer, drafter.config.mla
    attention, heads = layer.self_attn, drafter.config.num_attention_heads
    frequencies = yarn_frequencies(shape.qk_rope_head_dim, tinymodels.YARN)
    mscale = 0.1 * tinymodels.YARN["mscale_all_dim"] * math.log(tinymodels.YARN["factor"]) + 1
    up = attention.kv_b_proj.weight.view(heads, shape.qk_nope_head_dim + shape.v_head_dim, shape.kv_lora_rank)
    up_key, up_value = up[:, : shape.qk_nope_head_dim], up[:, shape.qk_nope_head_dim :]
    latents, rotated, outputs, hidden = [], [], [], None
    for position in range(row + steps):
        fed = features[position] if position <= row else hidden
        embedded = drafter.embed_tokens[tokens[position + 1]].float()
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(fed)])
        a = attention.kv_a_proj_with_mqa.weight @ x
        latents.append(attention.kv_a_layernorm(a[: shape.kv_lora_rank]))
        rotated.append(rotate(a[shape.kv_lora_rank :], position, frequencies))
        q = attention.q_b_proj.weight @ attention.q_a_layernorm(attention.q_a_proj.weight @ x)
        outs = []
        for head, query in enumerate(q.view(heads, -1)):
            plain, turning = query[: shape.qk_nope_head_dim], query[shape.qk_nope_head_dim :]
            absorbed, turned = plain @ up_key[head], rotate(turning, position, frequencies)
            scores = torch.stack([absorbed @ c + turned @ k for c, k in zip(latents, rotated, strict=True)])
            weights = (scores * shape.qk_head_dim**-0.5 * mscale**2).softmax(0)
            outs.append(up_value[head] @ (weights @ torch.stack(latents)))
        hidden = fed + attention.o_proj.weight @ torch.cat(outs)
        normed, mlp = layer.post_attention_layernorm(hidden), layer.mlp
        gated = F.silu(mlp.gate_proj.weight @ normed) * (mlp.up_proj.weight @ normed)
        hidden = hidden + mlp.down_proj.weight @ gated
        if position >= row:
            outputs.append(hidden)
    return outputs


@pytest.mark.parametrize("first_row", [0, 4])
def test_steps_equal_a_literal_chain_with_a_latent_cache(drafter, first_row):
    tinymodels.check_steps(drafter, reference_chain, first_row)


def test_attention_is_the_targets_last_layers_at_the_start(mla_target, drafter):
    """Against transformers: with the embedding half at zero, the drafter's attention is the target's own."""
    model = target.load_model(mla_target, "cpu", "float32")
    attention, ours = model.model.layers[-1].self_attn, drafter.midlayer.self_attn
    x, positions = torch.randn(1, 9, 32), torch.arange(9)
    with torch.no_grad():
        for projection in (ours.q_a_proj, ours.kv_a_proj_with_mqa):
            projection.weight[:, :32] = 0
        q, k, v = ours.project(torch.cat([torch.randn(1, 9, 32), x], -1), drafter.rotary, positions)
        found = ours.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
        expected, _ = attention(x, model.model.rotary_emb(x, positions[None]), mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_shared_expert_starts_the_mlp(mla_target, drafter):
    model = target.load_model(mla_target, "cpu", "float32")
    x = torch.randn(5, 32)
    with torch.no_grad():
        shared = model.model.layers[-1].mlp.shared_experts(x)
        torch.testing.assert_close(drafter.midlayer.mlp(x), shared, atol=1e-5, rtol=1e-4)
    assert drafter.midlayer.mlp.gate_proj.weight.shape == (64, 32)  # the dense layers' width, not the expert's 16
    assert drafter.midlayer.mlp.gate_proj.weight[16:].abs().min() > 0


@pytest.fixture
def mla_states(mla_target, tmp_path):
    return tinymodels.write_shard(mla_target, tmp_path / "shard-000000.safetensors")


def script(name, *arguments, fails=False):
    command = [sys.executable, SCRIPTS / f"{name}.py", *arguments]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr


def test_from_hidden_states_to_a_checked_checkpoint_and_on_from_it(mla_target, mla_states, tmp_path):
    """Training lowers the loss, the walk and the what-if run, engines' preflight is clean, fine-tuning starts from it."""
    ids, maps = IDS.numpy(), tmp_path / "vocabulary.safetensors"
    save_file(dict(zip(("d2t", "t2d"), map(torch.from_numpy, vocabulary.maps(ids, 120)), strict=True)), maps)
    artefacts.write_manifest(artefacts.manifest_path(maps), "vocabulary", parameters={})
    out = tmp_path / "checkpoint"
    given = ["--target", mla_target, "--hidden-states", mla_states]
    settings = {"epochs": 20, "learning_rate": 0.003, "batch_tokens": 128}
    trainer = [*given, "--vocabulary", maps, "--settings", json.dumps(settings)]
    script("train_drafter", *trainer, "--out", out)
    rows = artefacts.read_table(out / "training.parquet").to_pylist()
    losses = [row["loss"] for row in rows if row["split"] == "train"]
    assert losses[-1] < 0.8 * losses[0]
    script("evaluate_drafter", *given, "--checkpoint", out, "--max-k", "3", "--out", tmp_path / "offline.parquet")
    for engine, version in (("vllm", "0.25.1"), ("vllm", "0.32.0"), ("sglang", "0.5.13"), ("sglang", "0.5.23")):
        case = preflight.Case(out, mla_target, engine, version, k=3)
        assert [f.id for f in preflight.examine(case) if f.level != "INFO"] == [], (engine, version)

    other = tmp_path / "tuned"
    said = script("train_drafter", *trainer, "--initialise-from", out, "--out", other)
    assert "head: 60 of 60 rows" in said
    assert artefacts.read_table(other / "training.parquet").to_pylist()[0]["loss"] < 0.8 * losses[0]

    drafter, loaded = checkpoint.load(out, mla_target, "cpu")
    capture = hidden_states.Capture(target.load_model(mla_target, "cpu"), whatif.neighbours([1, 3, 5], 6))
    tensors = hidden_states.extract(capture, *tinymodels.sequences(mla_target, count=2), 128, "cpu")
    found = whatif.evaluate(drafter, loaded, capture, hidden_states.InMemory(tensors), [0, 1], 3, "cpu")
    assert {"as-built", "theta-10000", "layers-plus-1", "norm-output"} <= set(found)
    built = walk.evaluate(drafter, loaded, hidden_states.Sequences([mla_states]), [0], 3, "cpu")
    assert len(built[0].matched) == 1 + 30  # the first row is the last position of the prompt


def test_layers_that_cannot_be_saved_are_refused_before_training(mla_target, tmp_path):
    states = tinymodels.write_shard(mla_target, tmp_path / "shard-000000.safetensors", layers=(0, 1, 3))
    given = ["--target", mla_target, "--hidden-states", states, "--vocabulary", tmp_path / "not-read-yet"]
    said = script("train_drafter", *given, "--out", tmp_path / "checkpoint", fails=True)
    assert "layers [0, 1, 3]: write ascending, distinct numbers between 1 and 6" in said


@pytest.fixture
def saved(mla_target, drafter, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    checkpoint.save(folder, drafter, *vocabulary.maps(IDS.numpy(), 120), target.text_config(mla_target))
    return folder


def test_what_the_engines_read(saved, mla_target, drafter):
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and "head_dim" not in config
    assert config["rope_parameters"] == config["rope_parameters"] | tinymodels.YARN
    # Layers 1, 3, 5 in the conventions of DeepSeek: vLLM's inputs, SGLang's ids as written unless the first is 1.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 5, 1]
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(saved / "model.safetensors").items()}
    assert shapes["midlayer.self_attn.q_a_proj.weight"] == (24, 64)
    assert shapes["midlayer.self_attn.kv_a_proj_with_mqa.weight"] == (28, 64)
    assert shapes["midlayer.self_attn.kv_b_proj.weight"] == (4 * 22, 20)
    loaded, ids = checkpoint.load(saved, mla_target, "cpu")
    assert loaded.config.mla == drafter.config.mla and ids.tolist() == IDS.tolist()
    for name, tensor in drafter.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, atol=0.02, rtol=0.01)


def test_plain_attention_under_an_mla_target_is_loaded_too(mla_target, tmp_path):
    """Published Kimi drafters are of both kinds; the attention is what the drafter's own config says."""
    shape = DrafterConfig(32, 64, 4, 2, 8, 120, 60, [1, 3, 5], 1e-6, 5000.0, None, 512)
    plain = tinymodels.random_drafter(shape)
    checkpoint.save(tmp_path, plain, *vocabulary.maps(IDS.numpy(), 120), target.text_config(mla_target))
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("head_dim", "rope_parameters", "rope_scaling"):  # as older checkpoints have it
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, _ = checkpoint.load(tmp_path, mla_target, "cpu")
    assert loaded.config == shape
    mine = tinymodels.random_drafter(DrafterConfig(**vars(shape) | {"draft_vocab_size": 90}))
    assert initialise_from_drafter(mine, torch.arange(90), loaded, IDS) == 45


def test_norms_of_each_hidden_state_before_fc(mla_target, tmp_path):
    """fc_norm and norm_output, the flags of drafters called EAGLE-3.1, are kept from load to save."""
    shape = replace(tinymodels.make_drafter(mla_target, IDS).config, fc_norm=True, norm_output=True)
    drafter = tinymodels.random_drafter(shape)
    with torch.no_grad():
        for norm in drafter.fc_norm:
            norm.weight.copy_(torch.rand(32).bfloat16() + 0.5)
    features = torch.randn(1, 5, 3, 32)
    normed = [F.rms_norm(features[:, :, i], (32,), drafter.fc_norm[i].weight, 1e-6) for i in range(3)]
    torch.testing.assert_close(drafter.fuse(features), torch.cat(normed, -1) @ drafter.fc.weight.T)
    checkpoint.save(tmp_path, drafter, *vocabulary.maps(IDS.numpy(), 120), target.text_config(mla_target))
    loaded, _ = checkpoint.load(tmp_path, mla_target, "cpu")
    assert loaded.config == shape and torch.equal(loaded.fc_norm[2].weight, drafter.fc_norm[2].weight)
    case = preflight.Case(tmp_path, mla_target, "vllm", "0.32.0", layers=[1, 3, 5])
    assert [f.id for f in preflight.examine(case) if f.level == "ERROR"] == []


def test_flops_count_the_latents(mla_target):
    config = tinymodels.make_drafter(mla_target, IDS).config
    attention = tinymodels.make_drafter(mla_target, IDS).midlayer.self_attn
    weights = sum(p.numel() for p in attention.parameters() if p.dim() == 2)
    none, one = (speed.training_flops(config, 1, 1, rows, 0, 0) for rows in (0, 1))
    mlp, fc, head = 3 * 32 * 64, 3 * 32 * 32, 60 * 32
    assert none + one - (none + 6 * mlp + 2 * head) == pytest.approx(6 * weights + 4 * fc)


def test_targets_whose_shape_no_engine_serves(tmp_path, mla_target):
    config = target.text_config(mla_target)
    for key, value, said in (("q_lora_rank", None, "q_lora_rank"), ("rope_interleave", False, "interleaved pairs")):
        with pytest.raises(UserError, match=said):
            DrafterConfig.from_target(config | {key: value}, 60, [1, 3, 5])


def test_target_tensors_under_a_prefix_and_packed_ones(mla_target, tmp_path):
    """Kimi-K2.5 puts its language model under `language_model.`."""
    tensors = {f"language_model.{k}": v for k, v in load_file(mla_target / "model.safetensors").items()}
    tensors["model.packed"] = torch.zeros(2, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    name = "model.layers.5.self_attn.kv_b_proj.weight"
    assert torch.equal(target.load_tensors(tmp_path, [name])[name], tensors[f"language_model.{name}"])
    with pytest.raises(UserError, match="torch.int8, quantized"):
        target.load_tensors(tmp_path, ["model.packed"])
