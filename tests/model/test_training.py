"""Labels, masks and loss against a literal reference; order of the data; interrupted and resumed runs."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import tinymodels
from breakeven import target, training
from breakeven.cli import UserError
from breakeven.hidden_states import Sequences

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


def toy_batch(mask, argmax, first_row=0):
    length = len(mask)
    return training.Batch(
        torch.arange(length)[None] + 10,
        torch.zeros(1, length, 1, 4),
        torch.zeros(1, length, 4),
        torch.tensor([argmax]),
        torch.tensor([mask], dtype=torch.bool),
        first_row,
    )


def test_mask_covers_the_positions_that_predict_the_first_response_tokens():
    """Prompt of three tokens, response of three: x[3], x[4], x[5]. Row p of step t predicts x[p+2+t]."""
    batch = toy_batch([0, 0, 0, 1, 1, 1], [-1, -1, 4, 4, 4, 4])
    head = training.TargetHead(torch.ones(4), torch.zeros(1, 4), torch.ones(5, dtype=torch.bool), 1e-6)
    counted = [training.chain_labels(batch, head, step, 6)[0][0].int().tolist() for step in range(3)]
    assert counted == [[0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0]]
    label = training.chain_labels(batch, head, 0, 6)[2].tolist()
    assert label == [1, 2, 3, 4, 5, 5]


def test_unknown_and_out_of_vocabulary_labels_are_not_trained():
    inside = torch.tensor([True, False, True])
    batch = toy_batch([0, 1, 1, 1], [-1, 0, 1, 2])
    head = training.TargetHead(torch.ones(4), torch.zeros(2, 4), inside, 1e-6)
    counted, trained, _ = training.chain_labels(batch, head, 0, 4)
    assert counted[0].tolist() == [True, True, False, False]
    assert trained[0].tolist() == [True, False, False, False]


def test_loss_equals_a_literal_sum_over_rows_and_steps(target_folder, states):
    run = make_run(target_folder, states)
    sequences, head, drafter = run.sequences, run.head, run.drafter
    batch = training.collate(sequences, [1, 2], "cpu")
    loss, right, counted = training.chain_loss(drafter, head, batch, SETTINGS)
    expected, hits, rows = [], [], []
    for step in range(3):
        losses, hit, number = [], 0, 0
        for i in (1, 2):
            own = sequences.load(i, "token_ids", "loss_mask", "hidden", "last", "argmax")
            tokens = F.pad(own["token_ids"].long(), (0, 4))[None]
            hidden, context, length = drafter.fuse(own["hidden"][None]), None, len(own["token_ids"])
            for t in range(step + 1):
                hidden, context = drafter.step(tokens[:, 1 + t : length + 1 + t], hidden, context, 0)
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


def test_training_learns_and_validates_on_held_out_prompts(target_folder, states):
    settings = dataclasses.replace(SETTINGS, epochs=12)
    run = make_run(target_folder, states, settings)
    before = training.validate(run.drafter, run.head, run.sequences, settings, "cpu")
    rows = list(run.steps())
    train = [row for row in rows if row["split"] == "train"]
    held_out = [row for row in rows if row["split"] == "held_out"]
    assert len(held_out) == 12 and train[-1]["loss"] < 0.85 * train[0]["loss"]
    assert held_out[-1]["loss"] < before["loss"]
    assert all(flag is False for i, flag in enumerate(run.sequences.held_out) if i in run.training)
    assert train[0]["learning_rate"] < max(row["learning_rate"] for row in train) > train[-1]["learning_rate"]


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_resumed_run_ends_with_the_same_weights(target_folder, states, tmp_path, stop):
    whole = make_run(target_folder, states)
    rows = list(whole.steps())
    first = make_run(target_folder, states)
    for number, _ in enumerate(first.steps(), 1):
        if number == stop:
            first.save(tmp_path / "state.pt", "key")
            break
    second = make_run(target_folder, states)
    assert second.resume(tmp_path / "state.pt", "key")
    list(second.steps())
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name
    assert [row["loss"] for row in rows] == [row["loss"] for row in second.rows]


def test_a_state_of_other_settings_is_not_resumed(target_folder, states, tmp_path):
    run = make_run(target_folder, states)
    run.save(tmp_path / "state.pt", "key")
    assert not run.resume(tmp_path / "state.pt", "another key")


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
    assert all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 60 for b in first)


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
