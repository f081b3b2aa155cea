"""The network against slow, independent references: attention by hand, a literal chain, vLLM's arithmetic."""

import pytest
import torch
import torch.nn.functional as F

import tinymodels
from breakeven.configs import rope
from breakeven.drafter import (
    DrafterConfig,
    chain_mask,
    initialise_from_drafter,
    inverse_frequencies,
    repeat_heads,
)


@pytest.fixture
def drafter(target_folder):
    return tinymodels.make_drafter(target_folder, torch.arange(0, 120, 2)).eval()


def reference_chain(drafter, tokens, features, row, steps):
    """One row's chain, computed the way an engine does: a growing key cache, one query at a time.

    tokens: list, x[0] ... x[row + steps]; features [T, H] fused. Returns the layer outputs of each step.
    """
    layer, rotary = drafter.midlayer, drafter.rotary
    keys, values, outputs = [], [], []
    hidden = None
    for position in range(row + steps):
        step = max(0, position - row)
        fed = features[position] if position <= row else hidden
        x = torch.cat(
            [layer.input_layernorm(F.embedding(torch.tensor(tokens[position + 1]), drafter.embed_tokens).float()),
             layer.hidden_norm(fed)]
        )[None, None]  # fmt: skip
        q, k, v = layer.self_attn.project(x, rotary, torch.tensor([position]))
        keys.append(repeat_heads(k, q.shape[1])[0, :, 0])
        values.append(repeat_heads(v, q.shape[1])[0, :, 0])
        scores = torch.einsum("hd,thd->ht", q[0, :, 0], torch.stack(keys)) / q.shape[-1] ** 0.5
        attended = torch.einsum("ht,thd->hd", scores.softmax(-1), torch.stack(values)).flatten()
        hidden = fed + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        if position >= row:
            outputs.append(hidden)
        assert step >= 0
    return outputs


@pytest.mark.parametrize("first_row", [0, 4])
def test_steps_equal_a_literal_chain_with_a_key_cache(drafter, first_row):
    tinymodels.check_steps(drafter, reference_chain, first_row)


def test_mask_sees_the_past_of_step_zero_and_its_own_later_keys():
    mask = chain_mask(torch.tensor([2, 3]), width=5, steps=2).int().tolist()
    assert mask == [[1, 1, 1, 0, 0] + [1, 0] + [1, 0], [1, 1, 1, 1, 0] + [0, 1] + [0, 1]]


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}, {"type": "linear", "factor": 2.0}],
)  # fmt: skip
def test_rotary_frequencies_are_the_targets(scaling):
    """Against the rotary module of a transformers Llama with the same settings."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 7000.0, **(scaling or {})}
    parameters["rope_type"] = parameters.pop("type", parameters.get("rope_type", "default"))
    llama = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=256, rope_parameters=parameters
    )
    theta, found = rope({"rope_parameters": parameters} if scaling else {"rope_theta": 7000.0})
    config = DrafterConfig(32, 64, 4, 2, 8, 120, 60, [1, 2, 3], 1e-6, theta, found, 256)
    torch.testing.assert_close(inverse_frequencies(config)[0], LlamaRotaryEmbedding(llama).inv_freq)


def test_rope_is_read_in_both_spellings():
    new = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}}
    old = {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert rope(new) == (1e6, {"rope_type": "yarn", "factor": 4.0})
    assert rope(old) == rope(new)
    assert rope(old | {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}) == rope(old)
    assert rope(new | {"rope_scaling": old["rope_scaling"]}) == (10000.0, rope(old)[1])  # as transformers 5 reads it
    assert rope({"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}) == (5.0, None)


def test_initialised_drafter_knows_the_targets_head(target_folder):
    ids = torch.tensor([3, 7, 50])
    drafter = tinymodels.make_drafter(target_folder, ids)
    assert torch.equal(drafter.lm_head.weight, drafter.embed_tokens[ids].float())
    hidden = drafter.config.hidden_size
    assert (drafter.fc.weight[:, -hidden:].diagonal() > 0.8).all()
    assert drafter.fc.weight[:, :-hidden].abs().max() < 0.2


def test_another_drafters_weights_are_taken_over_head_rows_by_target_id(target_folder):
    other_ids, ids = torch.arange(0, 60, 2), torch.arange(0, 90, 3)
    other = tinymodels.make_drafter(target_folder, other_ids, seed=1)
    mine = tinymodels.make_drafter(target_folder, ids, seed=2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter))
    before = mine.lm_head.weight.clone()
    kept = initialise_from_drafter(mine, ids, other, other_ids)
    shared = [i for i, target_id in enumerate(ids.tolist()) if target_id in set(other_ids.tolist())]
    assert kept == len(shared) == 10
    for row, target_id in enumerate(ids.tolist()):
        expected = other.lm_head.weight[target_id // 2] if row in shared else before[row]
        assert torch.equal(mine.lm_head.weight[row], expected)
    for name, parameter in mine.named_parameters():
        assert name == "lm_head.weight" or torch.equal(parameter, other.get_parameter(name))
    # The order in which the other's rows stand does not matter.
    shuffled, mine.lm_head.weight.data = torch.randperm(len(other_ids)), before.clone()
    expected, other.lm_head.weight.data = other.lm_head.weight.clone(), other.lm_head.weight[shuffled].clone()
    assert initialise_from_drafter(mine, ids, other, other_ids[shuffled]) == 10
    assert all(torch.equal(mine.lm_head.weight[row], expected[ids[row] // 2]) for row in shared)
    other.config.rope_theta = 7.0
    with pytest.raises(ValueError, match="rope_theta is 7.0"):
        initialise_from_drafter(mine, ids, other, other_ids)
