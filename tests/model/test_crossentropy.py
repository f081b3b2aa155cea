"""The chunked soft cross-entropy against torch's own, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from breakeven import crossentropy
from breakeven.training import TargetHead


@pytest.fixture
def case():
    torch.manual_seed(0)
    steps, labels, width, vocabulary = 3, 21, 16, 50
    hidden = torch.randn(steps, labels, width, requires_grad=True)
    head = torch.randn(vocabulary, width, requires_grad=True)
    target = TargetHead(torch.rand(width), torch.randn(vocabulary, width), torch.ones(vocabulary), 1e-6)
    weights = torch.rand(steps, labels) * (torch.rand(steps, labels) > 0.2)
    return hidden, head, torch.randn(labels, width), target, weights


@pytest.mark.parametrize("chunk", [1, 3 * 50 * 4, 10**9])
def test_loss_and_gradients_equal_torchs_own(case, monkeypatch, chunk):
    monkeypatch.setitem(crossentropy.CHUNK, "cpu", chunk)
    hidden, head, last, target, weights = case
    loss, right = crossentropy.soft_cross_entropy(hidden, head, last, target, weights)
    logits, goal = hidden @ head.T, target.logits(last)
    own = F.cross_entropy(logits.flatten(0, 1), goal.softmax(-1).repeat(3, 1), reduction="none").view(3, -1)
    torch.testing.assert_close(loss, (own * weights).sum())
    assert torch.equal(right, logits.argmax(-1) == goal.argmax(-1))
    mine = torch.autograd.grad(2 * loss, (hidden, head))
    reference = torch.autograd.grad(2 * (own * weights).sum(), (hidden, head))
    for a, b in zip(mine, reference, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_are_those_of_differences(case):
    """gradcheck in float64 is not possible, since softmax is float32: central differences in a random direction."""
    hidden, head, last, target, weights = case
    loss, _ = crossentropy.soft_cross_entropy(hidden, head, last, target, weights)
    for tensor, gradient in zip((hidden, head), torch.autograd.grad(loss, (hidden, head)), strict=True):
        direction, size = torch.randn_like(tensor), 1e-2
        with torch.no_grad():
            values = []
            for sign in (1, -1):
                tensor.add_(direction, alpha=sign * size)
                values.append(crossentropy.soft_cross_entropy(hidden, head, last, target, weights)[0])
                tensor.sub_(direction, alpha=sign * size)
        slope = (values[0] - values[1]) / (2 * size)
        torch.testing.assert_close(slope, (gradient * direction).sum(), rtol=0.02, atol=0.02)


def test_under_autocast_it_is_close_and_without_gradient_equal(case):
    hidden, head, last, target, weights = case
    exact, _ = crossentropy.soft_cross_entropy(hidden, head, last, target, weights)
    with torch.autocast("cpu", torch.bfloat16):
        rough, _ = crossentropy.soft_cross_entropy(hidden, head, last, target, weights)
        with torch.no_grad():
            again, _ = crossentropy.soft_cross_entropy(hidden, head, last, target, weights)
    assert rough.dtype == torch.float32 and abs(rough - exact) < 0.02 * exact and torch.equal(again, rough)


def test_no_label_gives_no_loss(case):
    hidden, head, last, target, weights = case
    loss, right = crossentropy.soft_cross_entropy(hidden[:, :0], head, last[:0], target, weights[:, :0])
    assert loss == 0 and right.shape == (3, 0) and torch.autograd.grad(loss, head)[0].abs().sum() == 0
