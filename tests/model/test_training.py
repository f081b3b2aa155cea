"""Labels, masks and loss against a literal reference; order of the data; interrupted and resumed runs."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import tinymodels
from breakeven import drafter as drafter_module
from breakeven import target, training
from breakeven.cli import UserError
from breakeven.drafter import DrafterConfig, Rows
from breakeven.hidden_states import Capture, Responses, Sequences
from breakeven.speed import training_flops

ROOT = Path(__file__).parents[2]
IDS = torch.arange(0, 120, 2)
SETTINGS = training.Settings(ttt_steps=3, epochs=2, learning_rate=2e-3, batch_tokens=80)


def head_of(folder, ids=IDS):
    tensors = target.load_tensors(folder, ["model.norm.weight", "model.embed_tokens.weight"])
    inside = torch.zeros(tinymodels.VOCABULARY, dtype=torch.bool)
    inside[ids] = True
    # float32, since bf16 products depend on how many rows are computed at once.
    rows = tensors["model.embed_tokens.weight"][ids].float()
    return training.TargetHead(tensors["model.norm.weight"], rows, inside, 1e-6)


def make_run(target_folder, states, settings=SETTINGS):
    drafter = tinymodels.make_drafter(target_folder, IDS)
    return training.Run(drafter, head_of(target_folder), Sequences([states]), settings, "cpu")


class Toys:
    """Sequences given as loss masks and greedy successors; hidden states are zero."""

    def __init__(self, *sequences):
        self.sequences = sequences

    def stored(self, i, *names):
        mask, argmax = self.sequences[i]
        length = len(mask)
        return {
            "token_ids": torch.arange(length, dtype=torch.int32) % 100 + 10,
            "loss_mask": torch.tensor(mask, dtype=torch.bool),
            "hidden": torch.zeros(length, 1, 4),
            "last": torch.zeros(length, 4),
            "argmax": torch.tensor(argmax, dtype=torch.int32),
        }


def test_rows_are_those_from_which_a_response_token_is_drafted_first():
    """Prompt of three tokens, response of three: x[3], x[4], x[5]. Row p of step t predicts x[p+2+t]."""
    sequence = ([0, 0, 0, 1, 1, 1], [-1, -1, 4, 4, 4, 4])
    batch = training.collate(Toys(sequence, sequence), [0, 1], 3)
    assert batch.index.tolist() == [1, 2, 3, 7, 8, 9] and batch.starts.tolist() == [0] * 3 + [6] * 3
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5] * 2 and batch.spans == [(0, 6, 0, 3), (6, 12, 3, 6)]
    # Labels 2, 3, 4 of each sequence; step 1 predicts labels 3 and 4 from rows 1 and 2, step 2 label 4 from row 1.
    assert batch.counted.int().tolist() == [[1, 1, 1] * 2, [0, 1, 1] * 2, [0, 0, 1] * 2]
    predicted = [batch.index[batch.source[t]][batch.counted[t]].tolist() for t in range(3)]
    assert predicted == [[1, 2, 3, 7, 8, 9], [1, 2, 7, 8], [1, 7]]


def test_a_gap_in_the_mask_starts_no_chain_and_ends_none():
    """Two turns: x[2] and x[5], x[6] are responses. The chain of row 0 would predict x[3], x[4]: prompt tokens."""
    batch = training.collate(Toys(([0, 0, 1, 0, 0, 1, 1], [4] * 7)), [0], 4)
    assert batch.index.tolist() == [0, 3, 4]
    pairs = [(t, int(batch.index[batch.source[t, i]]), int(batch.index[i]) + 1) for t, i in batch.counted.nonzero()]
    # (step, row, label): label p+1+t, and x[p+2+t] is a response token.
    assert sorted(pairs) == [(0, 0, 1), (0, 3, 4), (0, 4, 5), (1, 3, 5), (3, 0, 4)]


@pytest.mark.parametrize("kind, length", [("target_folder", 384), ("target_folder", 512), ("mla_target", 384)])
def test_a_padded_batch_with_attention_by_blocks_has_the_same_loss(kind, request, monkeypatch, length):
    """What runs on CUDA, with flex attention's dense reference in place of its kernels. Backward: test_cuda.py."""
    target_folder = request.getfixturevalue(kind)
    monkeypatch.setattr(drafter_module, "compiled_flex_attention", lambda: flex_attention)
    torch.manual_seed(0)
    drafter, head = tinymodels.make_drafter(target_folder, IDS), head_of(target_folder)
    sequences = Toys(
        *(([0] * prompt + [1] * answer, [4] * (prompt + answer)) for prompt, answer in [(90, 60), (104, 130)])
    )
    plain, padded = training.collate(sequences, [0, 1], 3), training.collate(sequences, [0, 1], 3, (length, 256))
    assert len(plain.index) == 190 and padded.counted.sum() == plain.counted.sum()
    assert len(padded.tokens) == length and len(padded.index) == 256
    features, last = torch.randn(384, 3, 32), torch.randn(384, 32)
    plain.features, plain.last = features, last
    padded.features, padded.last = (F.pad(x.T, (0, length - 384)).T for x in (features.flatten(1), last))
    padded.features = padded.features.view(length, 3, 32)
    with torch.no_grad():
        expected = training.chain_loss(drafter, head, plain, SETTINGS)
        found = training.chain_loss(drafter, head, padded, SETTINGS)
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def test_unknown_and_out_of_vocabulary_labels_are_not_trained(target_folder):
    drafter = tinymodels.make_drafter(target_folder, IDS)
    head = head_of(target_folder)
    sequences = Toys(([0, 1, 1, 1, 1], [-1, -1, 4, 7, 4]))  # even ids are in the draft vocabulary
    batch = training.collate(sequences, [0], 1)
    batch.features, batch.last = torch.zeros(5, 3, 32), torch.randn(5, 32)
    _, _, counted = training.chain_loss(drafter, head, batch, dataclasses.replace(SETTINGS, ttt_steps=1))
    assert counted.tolist() == [2]  # labels 1 (unknown), 2, 3 of rows 0, 1, 2
    loss, _, _ = training.chain_loss(drafter, head, batch, dataclasses.replace(SETTINGS, ttt_steps=1))
    row = drafter.logits(training.unroll(drafter, batch.tokens, batch.features, batch.rows(), 1)[0, 1])
    goal = head.logits(batch.last[2]).float().softmax(-1)
    torch.testing.assert_close(loss, -(goal * row.log_softmax(-1)).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_heads_products_have_the_dtype_that_was_asked_for(target_folder, states, monkeypatch, dtype):
    run, seen = make_run(target_folder, states), []

    def noted(hidden, head, *rest):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype)
        return soft_cross_entropy(hidden, head, *rest)

    soft_cross_entropy = training.soft_cross_entropy
    monkeypatch.setattr(training, "soft_cross_entropy", noted)
    batch = training.collate(run.sequences, [1, 2], 3)
    settings = dataclasses.replace(SETTINGS, head_dtype=str(dtype).removeprefix("torch."))
    with torch.autocast("cpu", torch.bfloat16):
        loss, _, _ = training.chain_loss(run.drafter, run.head, batch, settings)
        loss.backward()
    assert seen == [dtype] and run.drafter.lm_head.weight.grad.abs().sum() > 0
    exact, _, _ = training.chain_loss(run.drafter, run.head, batch, SETTINGS)
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)


def test_a_head_dtype_that_is_none_is_refused():
    with pytest.raises(UserError, match="settings.head_dtype: 'fp32' is neither bfloat16 nor float32"):
        dataclasses.replace(SETTINGS, head_dtype="fp32")


def test_loss_equals_a_literal_sum_over_rows_and_steps(target_folder, states):
    run = make_run(target_folder, states)
    sequences, head, drafter = run.sequences, run.head, run.drafter
    batch = training.collate(sequences, [1, 2], 3)
    loss, right, counted = training.chain_loss(drafter, head, batch, SETTINGS)
    expected, hits, rows = [], [], []
    for step in range(3):
        losses, hit, number = [], 0, 0
        for i in (1, 2):
            own = sequences.load(i, "token_ids", "loss_mask", "hidden", "last", "argmax")
            tokens = F.pad(own["token_ids"].long(), (0, 4))[None]
            hidden, context, length = drafter.fuse(own["hidden"][None]), None, len(own["token_ids"])
            for t in range(step + 1):
                whole = Rows.suffix(length, 0)
                hidden, context = drafter.step(tokens[:, 1 + t : length + 1 + t], hidden, context, whole)
            logits = drafter.logits(hidden)[0]
            for p in range(length - 2 - step):
                if not own["loss_mask"][p + 2] or not own["loss_mask"][p + 2 + step]:
                    continue
                number += 1
                if not head.in_vocabulary[own["argmax"][p + 1 + step].long()]:
                    continue
                goal = head.logits(own["last"][p + 1 + step]).float()
                losses.append(-(goal.softmax(-1) * logits[p].log_softmax(-1)).sum())
                hit += int(logits[p].argmax() == goal.argmax())
        expected.append(torch.stack(losses).mean())
        hits.append(hit)
        rows.append(number)
    weights = torch.tensor([1.0, 0.8, 0.64])
    torch.testing.assert_close(loss, (torch.stack(expected) * weights).sum() / weights.sum(), rtol=1e-4, atol=1e-4)
    assert right.tolist() == hits and counted.tolist() == rows
    assert rows[0] > rows[1] > rows[2] > 0


def gradients(drafter, loss):
    return torch.autograd.grad(loss, list(drafter.parameters()))


def test_a_packed_batch_is_its_sequences_one_by_one(target_folder, states):
    """Loss and gradients: the mean over all rows, so sequences are weighted by their trained rows at each step."""
    run = make_run(target_folder, states)
    one_step = dataclasses.replace(SETTINGS, ttt_steps=1)
    for settings in (one_step, SETTINGS):
        steps = settings.ttt_steps
        chosen = [1, 2, 3]
        packed, _, _ = training.chain_loss(
            run.drafter, run.head, training.collate(run.sequences, chosen, steps), settings
        )
        parts, trained = [], []
        for i in chosen:
            batch = training.collate(run.sequences, [i], steps)
            known = run.head.in_vocabulary[batch.argmax[batch.index + 1]]
            trained.append((batch.counted & known).sum(1).double())
            weight = settings.step_decay ** torch.arange(steps)
            # Losses of the single steps: chain_loss weights them all, so take the differences of growing decays.
            hidden = training.unroll(run.drafter, batch.tokens, batch.features, batch.rows(), steps)
            own = []
            for t in range(steps):
                rows = batch.source[t][batch.counted[t] & known]
                goal = run.head.logits(batch.last[batch.index[batch.counted[t] & known] + 1]).float().softmax(-1)
                own.append(F.cross_entropy(run.drafter.logits(hidden[t][rows]).float(), goal, reduction="sum"))
            parts.append(torch.stack(own))
        means = torch.stack(parts).sum(0) / torch.stack(trained).sum(0)
        expected = (means * weight).sum() / weight.sum()
        torch.testing.assert_close(packed, expected.float(), rtol=1e-5, atol=1e-5)
        pairs = zip(gradients(run.drafter, packed), gradients(run.drafter, expected), strict=True)
        for mine, reference in pairs:
            torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-5)


def test_the_batches_of_a_step_are_one_larger_batch(target_folder, states):
    """Loss, counts and gradients: the mean is over the rows of all, however they are cut into batches."""
    run = make_run(target_folder, states)
    cuts = [[[1, 2, 3, 5]], [[1], [2, 3, 5]], [[5], [2], [3], [1]]]
    found = []
    for cut in cuts:
        batches = [training.collate(run.sequences, indices, 3) for indices in cut]
        rows = sum(training.labelled(run.head, batch)[2].sum(1) for batch in batches)
        parts = [training.chain_loss(run.drafter, run.head, batch, SETTINGS, rows=rows) for batch in batches]
        loss, right, counted = (sum(values) for values in zip(*parts, strict=True))
        found.append([loss, right, counted, *gradients(run.drafter, loss)])
    for other in found[1:]:
        for mine, reference in zip(other, found[0], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-5)
    whole, _, _ = training.chain_loss(run.drafter, run.head, training.collate(run.sequences, cuts[0][0], 3), SETTINGS)
    torch.testing.assert_close(found[2][0], whole, rtol=1e-5, atol=1e-5)


def test_sequences_of_a_packed_batch_do_not_see_each_other(target_folder, states):
    run = make_run(target_folder, states)
    together = training.collate(run.sequences, [1, 2], 3)
    out = training.unroll(run.drafter, together.tokens, together.features, together.rows(), 3)
    alone = training.collate(run.sequences, [2], 3)
    expected = training.unroll(run.drafter, alone.tokens, alone.features, alone.rows(), 3)
    # The last rows of a chain are fed tokens beyond the sequence; they are not counted.
    counted = alone.source[2][alone.counted[2]]
    first = len(out[0]) - len(expected[0])
    torch.testing.assert_close(out[:, first:][:, counted], expected[:, counted], rtol=1e-5, atol=1e-5)


def test_a_sequence_longer_than_the_budget_is_its_own_batch(target_folder, states):
    settings = dataclasses.replace(SETTINGS, batch_tokens=10, epochs=1)
    run = make_run(target_folder, states, settings)
    assert all(len(batch) == 1 for batch in run.batches(0))
    rows = list(run.steps())
    assert len(rows) == len(run.training) + 1 and all(row["loss"] > 0 for row in rows)


def test_training_learns_and_validates_on_held_out_prompts(target_folder, states):
    settings = dataclasses.replace(SETTINGS, epochs=12)
    run = make_run(target_folder, states, settings)
    before = run.validate()
    rows = list(run.steps())
    train = [row for row in rows if row["split"] == "train"]
    held_out = [row for row in rows if row["split"] == "held_out"]
    last_epoch = [row["loss"] for row in train if row["epoch"] == 12]
    assert len(held_out) == 12 and sum(last_epoch) / len(last_epoch) < 0.85 * train[0]["loss"]
    assert held_out[-1]["loss"] < before["loss"]
    assert all(flag is False for i, flag in enumerate(run.sequences.held_out) if i in run.training)
    assert train[0]["learning_rate"] < max(row["learning_rate"] for row in train) > train[-1]["learning_rate"]


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_ends_with_the_same_weights(target_folder, states, tmp_path, stop):
    losses, second = tinymodels.resumed(lambda: make_run(target_folder, states), stop, tmp_path / "state.pt")
    assert losses == [row["loss"] for row in second.rows]


def test_online_training_is_training_on_the_store(target_folder, states, responses):
    """The target in the step: the same batches and, to bf16 rounding of the hidden states, the same losses."""
    stored = make_run(target_folder, states)
    capture = Capture(target.load_model(target_folder, "cpu"), tinymodels.DISTINCT)
    drafter = tinymodels.make_drafter(target_folder, IDS)
    online = training.Run(drafter, head_of(target_folder), Responses([responses], capture), SETTINGS, "cpu")
    assert online.batches(1) == stored.batches(1)
    mine, reference = list(online.steps()), list(stored.steps())
    for a, b in zip(mine, reference, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.05)


def test_batches_of_one_length_share_a_forward_pass_within_the_budget(target_folder, states):
    sequences = Sequences([states])
    made = [training.collate(sequences, [i], 3, shape) for i, shape in enumerate([(256, 128)] * 5 + [(512, 128)] * 2)]
    sizes = [[len(b.tokens) for b in group] for group in training.alike(made, 600)]
    assert sizes == [[256, 256], [256, 256], [256], [512], [512]]
    assert [b for group in training.alike(made, 0) for b in group] == made


def test_a_loss_that_is_not_finite_stops_with_its_step(target_folder, states):
    run = make_run(target_folder, states, dataclasses.replace(SETTINGS, learning_rate=1e30, warmup=0.0))
    with pytest.raises(UserError, match=r"the loss is nan at optimizer step [1-9]"):
        list(run.steps())


def test_threads_keep_the_order_and_pass_errors_on():
    made = training.ahead(lambda i: i * i, range(50), 3)
    assert list(made) == [i * i for i in range(50)]
    with pytest.raises(ZeroDivisionError):
        list(training.ahead(lambda i: 1 // (5 - i), range(50), 3))


def test_speed_counts_the_tokens_and_needs_a_peak_for_mfu(target_folder, states):
    run = make_run(target_folder, states)
    assert run.meter.report()["tokens_per_second"] is None
    list(run.steps())
    found = run.meter.report()
    whole = SETTINGS.epochs * sum(run.lengths[i] for i in run.training)
    assert 0 < found["timed_tokens"] < whole and found["tokens_per_second"] > 0 and found["mfu"] is None
    run.meter.peak = 2 * found["flops_per_second"]
    assert run.meter.report()["mfu"] == pytest.approx(0.5)


def test_flop_of_one_row_by_hand():
    config = DrafterConfig(8, 16, 2, 1, 4, 100, 50, [1, 2, 3], 1e-6, 1e4, None, 64)
    # One token that is the only row, one step, one counted pair, one key.
    fc, kv, qo, mlp, head = 3 * 64, 2 * 16 * 4, 16 * 8 + 64, 3 * 8 * 16, 400
    assert training_flops(config, 1, 1, 1, 1, 1) == 6 * (fc + kv + qo + mlp + head + 2 * 8) - 2 * fc + 2 * head


def test_a_state_of_other_settings_is_not_resumed(target_folder, states, tmp_path):
    run = make_run(target_folder, states)
    run.save(tmp_path / "state.pt", "key")
    assert not run.resume(tmp_path / "state.pt", "another key")


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_state_that_was_cut_off_is_not_resumed(target_folder, states, tmp_path, share):
    run = make_run(target_folder, states)
    run.save(tmp_path / "state.pt", "key")
    content = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(content[: int(share * len(content))])
    assert not run.resume(tmp_path / "state.pt", "key")


def test_only_the_network_is_trained_and_embeddings_stay(target_folder, states):
    run = make_run(target_folder, states)
    before = run.drafter.embed_tokens.clone()
    list(run.steps())
    assert torch.equal(before, run.drafter.embed_tokens)


def test_epochs_have_each_sequence_once_in_different_order():
    lengths = [10 + i % 7 for i in range(50)]
    first, second = (training.epoch_batches(lengths, list(range(50)), 60, 0, epoch) for epoch in (0, 1))
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(50))
    assert first != second and first == training.epoch_batches(lengths, list(range(50)), 60, 0, 0)
    assert all(sum(lengths[i] for i in b) <= 60 for b in first)


def test_no_training_prompt_is_a_clear_error(target_folder, states):
    sequences = Sequences([states])
    sequences.held_out = [True] * len(sequences)
    drafter = tinymodels.make_drafter(target_folder, IDS)
    with pytest.raises(UserError, match="every prompt is held out"):
        training.Run(drafter, head_of(target_folder), sequences, SETTINGS, "cpu")


def test_learning_rate_warms_up_and_falls():
    settings = training.Settings(learning_rate=1.0, warmup=0.1, final_learning_rate=0.1)
    rates = [training.learning_rate(settings, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates.index(max(rates)) in (9, 10)
    assert rates[-1] == pytest.approx(0.1, abs=0.01) and all(
        a >= b for a, b in zip(rates[10:], rates[11:], strict=False)
    )


def test_a_run_on_n_samples_reads_the_first_n(target_folder, states):
    drafter = tinymodels.make_drafter(target_folder, IDS)
    run = training.Run(drafter, head_of(target_folder), Sequences([states]), SETTINGS, "cpu", samples=4)
    assert run.training == [1, 2, 3, 5]
    assert sorted(i for batch in run.batches(0) for i in batch) == [1, 2, 3, 5]
    with pytest.raises(UserError, match="10 training samples are asked for, but there are 9"):
        training.Run(drafter, head_of(target_folder), Sequences([states]), SETTINGS, "cpu", samples=10)


def test_the_throughput_benchmark_runs():
    command = [sys.executable, ROOT / "benchmarks/train/throughput.py", "--steps", "8", "--batch-tokens", "512"]
    done = subprocess.run([*command, "--ttt-steps", "1", "--peak-flops", "1e15"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] >= 8 and report["tokens_per_second"] > 0 and 0 < report["mfu"] < 1
