"""Extraction against transformers' own hidden states, the shard format, and the canary."""

import pytest
import tinymodels
import torch
from tinymodels import DISTINCT

from breakeven import hidden_states, target
from breakeven.cli import UserError


def test_features_are_the_inputs_of_the_layers_and_last_is_pre_norm(target_folder, states):
    model = target.load_model(target_folder, "cpu")
    sequences = hidden_states.Sequences([states])
    for i in (0, 5):
        loaded = sequences.load(i, "token_ids", "hidden", "last")
        own = model(loaded["token_ids"][None].long(), output_hidden_states=True)
        for slot, k in enumerate(DISTINCT):
            # hidden_states[k] of transformers is the input of layer k; the neighbours must be farther away.
            distance = [
                (own.hidden_states[j][0].float() - loaded["hidden"][:, slot].float()).norm() for j in (k - 1, k, k + 1)
            ]
            assert distance[1] < 0.02 * min(distance[0], distance[2])
        normed = model.model.norm(loaded["last"])
        torch.testing.assert_close(normed.float(), own.hidden_states[-1][0].float(), atol=0.05, rtol=0.05)
        assert (loaded["last"].float() - own.hidden_states[-1][0].float()).abs().max() > 0.1


def test_padding_and_order_do_not_matter(target_folder):
    """Swapped or mixed-up sequences of a batch would show against single-sequence extraction."""
    prompts, responses = tinymodels.sequences(target_folder, count=5)
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    together = hidden_states.extract(capture, prompts, responses, 10_000, "cpu")
    starts = together["cu_seqlens"].tolist()
    for i in range(5):
        alone = hidden_states.extract(capture, [prompts[i]], [responses[i]], 1, "cpu")
        span = slice(starts[i], starts[i + 1])
        assert torch.equal(together["token_ids"][span], alone["token_ids"])
        assert torch.equal(together["loss_mask"][span], alone["loss_mask"])
        torch.testing.assert_close(together["hidden"][span].float(), alone["hidden"].float(), atol=0.06, rtol=0.06)
    swapped = together["hidden"][starts[0] : starts[1]].float(), together["hidden"][starts[3] : starts[4]].float()
    assert (swapped[0] - swapped[1]).abs().max() > 0.5


def test_mask_is_true_for_response_tokens_alone(target_folder):
    prompts, responses = tinymodels.sequences(target_folder, count=3)
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    tensors = hidden_states.extract(capture, prompts, responses, 64, "cpu")
    assert tensors["token_ids"][tensors["loss_mask"]].tolist() == sum(responses, [])
    assert 0 < tensors["loss_mask"].float().mean() < 1


@pytest.mark.parametrize("prompt, response", [([], [5]), ([5], [])])
def test_a_mask_of_all_or_nothing_is_refused(target_folder, prompt, response):
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    with pytest.raises(UserError, match="both are needed"):
        hidden_states.extract(capture, [prompt], [response], 64, "cpu")


def test_canary_knows_greedy_responses_from_others(target_folder):
    prompts, responses = tinymodels.sequences(target_folder, count=6)
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    assert hidden_states.canary(hidden_states.extract(capture, prompts, responses, 64, "cpu")) > 0.95
    others = [[(t + 1) % 100 + 3 for t in response] for response in responses]
    assert hidden_states.canary(hidden_states.extract(capture, prompts, others, 64, "cpu")) < 0.5


def test_a_layer_that_does_not_exist_is_named(target_folder):
    with pytest.raises(UserError, match="7 is no layer"):
        hidden_states.Capture(target.load_model(target_folder, "cpu"), [1, 7])


def test_the_last_layers_output_can_be_captured(target_folder):
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), [6])
    captured = capture(torch.tensor([[5, 6, 7]]), torch.tensor([3]))
    assert torch.equal(captured.features[:, :, 0], captured.last)


def test_batches_hold_the_budget_and_every_sequence_once():
    lengths = [5, 100, 7, 30, 30, 2]
    found = list(hidden_states.batches(lengths, 64))
    assert sorted(sum(found, [])) == list(range(6))
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 64 for b in found)
