"""A layer off by one is found among neighbours that hardly differ; a store of other layers too."""

import pytest
import torch

import tinymodels
from breakeven import hidden_states, parity, target
from breakeven.cli import UserError
from tinymodels import DISTINCT


@pytest.fixture(scope="module")
def references(target_folder):
    prompts, responses = tinymodels.sequences(target_folder, count=3)
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    known, exact = (parity.reference(target_folder, sequences, "cpu", dtype) for dtype in ("bfloat16", "float32"))
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    return known, exact, hidden_states.extract(capture, prompts, responses, 64, "cpu")["hidden"]


def close(known, step):
    """Layers of which each differs from the next by `step` of its norm, as in large targets."""
    steps = torch.randn(known.shape, generator=torch.Generator().manual_seed(0))
    base = known[:, :1].float()
    return base + step * (steps * base.norm(dim=-1, keepdim=True) / known.shape[-1] ** 0.5).cumsum(1)


def test_the_reference_is_every_layer_and_rounding_is_its_floor(references):
    known, exact, stored = references
    assert known.shape == exact.shape == (len(stored), 7, 32)
    rows = parity.compare(stored, DISTINCT, known, exact, stored)
    assert [row["nearest"] for row in rows] == DISTINCT
    for row in rows:
        assert row["stored"] == 0 and row["difference"] < row["next_layer"]
        assert 0 < row["floor"] < row["next_layer"]
    parity.refuse_other_layers(rows, "engine 1.0")


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_layer_off_by_one_is_named(references, shift):
    known = close(references[0], 0.014)
    noise = 0.004 * torch.randn(known.shape, generator=torch.Generator().manual_seed(1)) * known.std()
    right = parity.compare((known + noise)[:, DISTINCT], DISTINCT, known, known, None)
    parity.refuse_other_layers(right, "engine 1.0")
    wrong = parity.compare((known + noise)[:, [k + shift for k in DISTINCT]], DISTINCT, known, known, None)
    with pytest.raises(UserError, match=f"engine 1.0 captures other layers .* {1 + shift} for 1, {3 + shift} for 3"):
        parity.refuse_other_layers(wrong, "engine 1.0")


def test_a_store_of_another_layer_is_refused(references):
    known, exact, stored = references
    rows = parity.compare(stored, DISTINCT, known, exact, known[:, [1, 2, 5]])
    with pytest.raises(UserError, match="stored hidden states of layer 3 are .* extract them again"):
        parity.refuse_other_layers(rows, "engine 1.0")


def test_the_table_is_markdown():
    row = {"layer": 2, "nearest": 2, "difference": 0.0012, "next_layer": 0.015, "floor": 0.001, "stored": None}
    assert parity.table([row]).splitlines()[-1] == "| 2 | 2 | 0.12 % | 1.50 % | 0.10 % | - |"
