"""The simulated walk against a literal speculative decoder, and its counts."""

import numpy as np
import pytest
import torch

import tinymodels
from breakeven import artefacts, checkpoint, tables, target, vocabulary, walk
from breakeven.drafter import Rows
from breakeven.hidden_states import Sequences

IDS = torch.arange(0, 120, 2)


@pytest.fixture(scope="module")
def drafter(target_folder):
    return tinymodels.make_drafter(target_folder, IDS).eval().requires_grad_(False)


def literal_walk(drafter, ids, tokens, features, first_response, k):
    """Draft and verify step by step: from each position, run the prefix through the drafter and decode greedily."""
    accepted, row = [], first_response - 1
    while row + 2 + k <= len(tokens):
        fused = drafter.fuse(features[None, : row + 1])
        known = tokens[: row + 2].tolist()
        hidden, context = fused, None
        drafts = []
        for _ in range(k):
            start = 0 if context is None else row
            fed = torch.tensor([(known + drafts)[start + 1 + len(drafts) : row + 2 + len(drafts)]])
            hidden, context = drafter.step(fed, hidden, context, Rows.suffix(row + 1, row))
            drafts.append(int(ids[drafter.logits(hidden)[0, -1].argmax()]))
        right = 0
        while right < k and drafts[right] == int(tokens[row + 2 + right]):
            right += 1
        accepted.append(right)
        row += right + 1
    return accepted


@pytest.mark.parametrize("k", [1, 3])
def test_walk_equals_a_literal_speculative_decoder(drafter, states, k):
    sequences = Sequences([states])
    found_any = 0
    for i in range(len(sequences)):
        loaded = sequences.load(i, "token_ids", "loss_mask", "hidden")
        tokens, first = loaded["token_ids"].long(), int(loaded["loss_mask"].nonzero()[0])
        drafts = walk.draft(drafter, IDS, tokens, loaded["hidden"].float(), first - 1, 5)
        mine = walk.walk(walk.match(drafts, tokens, first - 1), k)
        assert mine == literal_walk(drafter, IDS, tokens, loaded["hidden"].float(), first, k)
        found_any += sum(mine)
    assert found_any > 0


def test_a_drafter_that_is_always_right_accepts_everything():
    tokens = torch.arange(20)
    drafts = torch.stack([torch.arange(row + 2, row + 5) for row in range(4, 20)])
    matches = walk.match(drafts, tokens, 4)
    assert walk.walk(matches, 3) == [3, 3, 3]  # rows 4, 8, 12; row 16 could only be judged on two tokens
    assert walk.counts([3, 3, 3], 3)[1].tolist() == [3, 3, 3]


def test_only_the_leading_run_is_accepted():
    tokens = torch.tensor([9, 9, 5, 6, 7, 8, 1, 1, 1])
    drafts = torch.tensor([[5, 0, 7], [6, 7, 0]])
    assert walk.match(drafts, tokens, 0).matched.tolist() == [1, 2]


def test_counts_and_table():
    steps, accepted = walk.counts([0, 2, 1, 3], 3)
    assert (steps, accepted.tolist()) == (4, [3, 2, 1])
    rows = walk.table([walk.Matches(np.array([1, 0, 2, 9, 9]), np.array([3, 3, 3, 2, 1]))], [2], "held-out")
    # Row 0 accepts one and goes to row 2, which accepts two and goes to row 5, which is not there.
    assert [(r["position"], r["steps"], r["accepted"]) for r in rows] == [(1, 2, 2), (2, 2, 1)]
    assert rows[0]["acceptance_length"] == 2.5 and rows[1]["conditional"] == 0.5


def test_no_steps_give_no_rates():
    rows = walk.table([], [2], "held-out")
    assert [row["marginal"] for row in rows] == [None, None] and rows[0]["acceptance_length"] is None
    assert walk.said(rows) == "acceptance length nan, per position nan nan"


def test_responses_too_short_for_a_step_are_evaluated(drafter, target_folder, tmp_path):
    shard = tinymodels.write_shard(target_folder, tmp_path / "shard-000000.safetensors", count=2, response=3)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint.save(folder, drafter, *vocabulary.maps(IDS.numpy(), 120), target.text_config(target_folder))
    out = tmp_path / "offline.parquet"
    given = ["--target", target_folder, "--checkpoint", folder, "--hidden-states", shard, "--max-k", 3]
    tinymodels.run_script("evaluate_drafter", *given, "--out", out)
    rows = artefacts.read_table(out, tables.OFFLINE).to_pylist()
    assert [row["steps"] for row in rows if row["k"] > 1] == [1, 1, 0, 0, 0]


def test_counts_by_sequence_add_up_to_the_table(drafter, states):
    sequences = Sequences([states])
    chosen = sequences.judged()
    found = walk.evaluate(drafter, IDS, sequences, chosen, 3, "cpu")
    rows = walk.by_sequence(found, [(i, sequences.conversation[i]) for i in chosen], [1, 3])
    assert [(row["sequence"], row["k"]) for row in rows] == [(i, k) for i in chosen for k in (1, 3)]
    for k in (1, 3):
        table = [row for row in walk.table(found, [1, 3], "held-out") if row["k"] == k]
        mine = [row for row in rows if row["k"] == k]
        assert sum(row["steps"] for row in mine) == table[0]["steps"] > 0
        accepted = np.sum([row["accepted_per_position"] for row in mine], axis=0)
        assert accepted.tolist() == [row["accepted"] for row in table]
