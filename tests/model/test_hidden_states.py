"""Extraction against transformers' own hidden states, the shard format, and the canary."""

import json

import pyarrow as pa
import pytest
import torch

import tinymodels
from breakeven import artefacts, hidden_states, target
from breakeven.cli import UserError
from tinymodels import DISTINCT


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


@pytest.mark.parametrize("outlier", [1, 100, 300])
def test_how_far_int8_moves_is_known_from_what_it_keeps(outlier):
    torch.manual_seed(0)
    states = torch.randn(400, 4, 200)
    states[..., 7] *= outlier  # a channel that stands out; the others of its row are rounded by its scale
    states[:, 3] = torch.randn(400, 200)
    states = states.bfloat16()
    stored = hidden_states.encode_shard({"hidden": states[:, :3], "last": states[:, 3]}, "int8")
    found = hidden_states.rounding(stored)
    rest = [i for i in range(200) if i != 7]
    moved = (hidden_states.decode(*hidden_states.encode(states)).float() - states.float())[..., rest]
    true = (moved.norm(dim=-1) / states[..., rest].float().norm(dim=-1)).median(dim=0).values.tolist()
    assert len(found) == 4 and max(found) == pytest.approx(max(true), rel=0.3)
    assert (max(found[:3]) > hidden_states.ROUNDING_KNOWN) == (outlier > 1) and found[3] < 0.02
    assert hidden_states.rounding({"hidden": states[:, :3], "last": states[:, 3]}) is None


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


def table_of(temperatures, prompt_ids, held_out):
    rows = [{"prompt_id": p, "sampling": json.dumps({"temperature": t}), "held_out": h}
            for p, t, h in zip(prompt_ids, temperatures, held_out, strict=True)]  # fmt: skip
    return pa.Table.from_pylist(rows)


def test_the_canary_looks_at_greedy_rows_alone(target_folder):
    prompts, responses = tinymodels.sequences(target_folder, count=4)
    responses[1] = [(t + 1) % 100 + 3 for t in responses[1]]
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    tensors = hidden_states.extract(capture, prompts, responses, 64, "cpu")
    greedy = torch.tensor([True, False, True, True])
    assert hidden_states.canary(tensors, greedy) > 0.95
    assert hidden_states.canary(tensors, ~greedy) < 0.5
    assert hidden_states.canary(tensors) < 0.9


def test_shards_tell_temperature_and_conversation():
    about = hidden_states.about_sequences(
        table_of([0, 0.7, 0, 0], ["ab-00", "ab-01", "cd-00", "alone"], [True, False, True, False])
    )
    assert (
        about["temperature"].tolist() == pytest.approx([0, 0.7, 0, 0]) and about["temperature"].dtype == torch.float32
    )
    first, second, third, fourth = about["conversation"].tolist()
    assert first == second and len({first, third, fourth}) == 3
    assert about["held_out"].tolist() == [True, False, True, False]


def test_samples_are_nested_in_rank_order_across_shards(target_folder, states, tmp_path):
    other = tinymodels.write_shard(target_folder, tmp_path / "shard-000012.safetensors", count=6)
    sequences = hidden_states.Sequences([states, other])
    everything = sequences.training()
    assert everything == [i for i in range(18) if not sequences.held_out[i]] and len(everything) == 13
    for n in (1, 9, 11, 13):
        assert sequences.training(n) == everything[:n]
    with pytest.raises(UserError, match="14 training samples are asked for, but there are 13 outside"):
        sequences.training(14)
    lengths = [int(sequences.load(i, "loss_mask")["loss_mask"].sum()) for i in everything[:9]]
    assert len(sequences.tokens(everything[:9])) == sum(lengths)


def test_acceptance_is_judged_on_greedy_held_out_sequences_where_there_are_any(states):
    sequences = hidden_states.Sequences([states])
    assert sequences.judged() == [0, 4, 8]
    sequences.temperature = [0.7, 0, 0, 0, 0, 0, 0, 0, 0.7, 0, 0, 0]
    assert sequences.judged() == [4]
    sequences.temperature = [0.7] * 12
    assert sequences.judged() == [0, 4, 8]


def test_int8_rounds_within_half_a_step_of_each_rows_scale():
    torch.manual_seed(0)
    x = torch.randn(50, 3, 64).bfloat16() * torch.logspace(-3, 3, 50)[:, None, None].bfloat16()
    x[7] = 0
    stored, scale = hidden_states.encode(x)
    assert stored.dtype == torch.int8 and scale.shape == (50, 3)
    decoded = hidden_states.decode(stored, scale)
    assert decoded.dtype == torch.bfloat16 and (decoded[7] == 0).all()
    error = (decoded.float() - x.float()).abs()
    assert (error <= 0.5 * scale[..., None] + x.float().abs() / 128 + 1e-9).all() and error.max() > 0


def test_an_int8_shard_is_read_as_bf16_within_its_rounding_and_takes_about_half(target_folder, states, tmp_path):
    path = tinymodels.write_shard(target_folder, tmp_path / "shard-000000.safetensors", codec="int8")
    rough, exact = hidden_states.Sequences([path]), hidden_states.Sequences([states])
    for i in range(len(exact)):
        names = ("token_ids", "loss_mask", "argmax", "hidden", "last")
        mine, reference = rough.load(i, *names), exact.load(i, *names)
        assert all(torch.equal(mine[name], reference[name]) for name in names[:3])
        for name in ("hidden", "last"):
            assert mine[name].dtype == torch.bfloat16
            step = reference[name].float().abs().amax(-1, keepdim=True) / 127
            assert ((mine[name].float() - reference[name].float()).abs() <= 1.1 * step).all()
    assert rough.files[0]["hidden"].nbytes * 2 == exact.files[0]["hidden"].nbytes
    with pytest.raises(UserError, match="holds codec bfloat16, the shards before it int8"):
        hidden_states.Sequences([path, states])


def test_an_unknown_codec_is_refused_by_name(states, tmp_path):
    path = tmp_path / "shard-000000.safetensors"
    path.write_bytes(states.read_bytes())
    parameters = {"layers": DISTINCT, "codec": "float4"}
    artefacts.write_manifest(artefacts.manifest_path(path), "hidden_states", parameters=parameters)
    with pytest.raises(UserError, match="codec 'float4' is unknown, known are bfloat16, int8"):
        hidden_states.Sequences([path])


def test_responses_give_the_sequences_of_the_store(target_folder, states, responses):
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    online, stored = hidden_states.Responses([responses], capture), hidden_states.Sequences([states])
    assert len(online) == len(stored) and online.held_out == stored.held_out
    for flag in (True, False):
        chosen = [i for i, held_out in enumerate(stored.held_out) if held_out == flag]
        assert torch.equal(online.tokens(chosen), stored.tokens(chosen))
    for i in (0, 5):
        assert online.length(i) == stored.length(i) and online.response_length(i) == stored.response_length(i)
        mine, reference = (s.load(i, "token_ids", "loss_mask", "argmax", "hidden", "last") for s in (online, stored))
        assert torch.equal(mine["token_ids"], reference["token_ids"])
        assert torch.equal(mine["loss_mask"], reference["loss_mask"])
        assert (mine["argmax"] == reference["argmax"]).float().mean() > 0.9  # bf16: batches round differently
        for name in ("hidden", "last"):
            torch.testing.assert_close(mine[name].float(), reference[name].float(), atol=0.06, rtol=0.06)


def test_packed_states_are_those_of_each_sequence_alone(target_folder, responses):
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    online = hidden_states.Responses([responses], capture)
    chosen, spare = [4, 1, 2], 7
    tokens = torch.cat([online.stored(i)["token_ids"].long() for i in chosen] + [torch.zeros(spare).long()])
    lengths = [online.length(i) for i in chosen]
    for budget in (10_000, 1):
        features, last = hidden_states.captured_states(capture, tokens, lengths, budget)
        alone = [online.load(i, "hidden", "last") for i in chosen]
        together = torch.cat([own["hidden"] for own in alone])
        torch.testing.assert_close(features[:-spare].float(), together.float(), atol=0.06, rtol=0.06)
        torch.testing.assert_close(
            last[:-spare].float(), torch.cat([own["last"] for own in alone]).float(), atol=0.06, rtol=0.06
        )
        assert (features[-spare:] == 0).all() and not features.is_inference()


def test_one_packed_pass_gives_the_states_of_each_sequence_alone(target_folder, responses):
    """The way of CUDA, here with flex attention as it is defined, not compiled."""
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu", "float32"), DISTINCT)
    online = hidden_states.Responses([responses], capture)
    chosen = [4, 1, 2, 0, 3]
    lengths = [online.length(i) for i in chosen]
    spare = -sum(lengths) % 128
    tokens = torch.cat([online.stored(i)["token_ids"].long() for i in chosen] + [torch.zeros(spare).long()])
    positions = torch.cat([*map(torch.arange, lengths), torch.zeros(spare).long()])
    with torch.compiler.set_stance("force_eager"):
        captured = capture.packed(tokens, positions)
    alone = [online.load(i, "hidden", "last") for i in chosen]  # by SDPA again
    for mine, name in ((captured.features, "hidden"), (captured.last, "last")):
        together = torch.cat([own[name] for own in alone]).float()
        torch.testing.assert_close(mine[: sum(lengths)], together, atol=1e-3, rtol=1e-4)
    assert not captured.features.is_inference()
