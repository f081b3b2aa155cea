"""Soft cross-entropy over the draft vocabulary, chunk by chunk: no logits are kept for the backward pass.

With z the drafter's logits and p the target's distribution, the loss of a row is logsumexp(z) - p . z and its gradient
by z is softmax(z) - p. Both need the logits only once, so the forward pass already computes the gradients of hidden
states and head, which the backward pass scales. The target's distribution of a label position is computed once and
shared by all steps that predict it. Softmax and sums are float32.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

# Logits in memory at once: on the CPU what its matrix products work well with; on a GPU 0.5 GB of bf16.
CHUNK = {"cpu": 4_000_000, "cuda": 256_000_000}


def rows(logits: Tensor, goal: Tensor, weights: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
    """One chunk: logits [S, L, D], target logits [L, D], weights [S, L].

    Returns the cross-entropy [S, L] float32, whether both have the same greatest entry [S, L] bool, and the gradient
    of sum(weights * cross-entropy) by the logits, in their dtype (the logits themselves where it is not asked for).
    """
    z, p = logits.float(), goal.float().softmax(-1)
    top, best = z.max(-1, keepdim=True)
    shifted = z - top
    dot = torch.einsum("sld,ld->sl", shifted, p) if z.device.type == "cpu" else (shifted * p).sum(-1)
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    right = best[..., 0] == goal.argmax(-1)
    if gradient:
        logits = (exponentials * (weights / total)[..., None] - p * weights[..., None]).to(logits.dtype)
    return total.log() - dot, right, logits


def rows_in_cache(logits: Tensor, goal: Tensor, weights: Tensor, gradient: bool, size: int = 8):
    """`rows` on the CPU, a few labels at a time, since it goes over the logits several times; overwrites the logits."""
    found = []
    for a in range(0, goal.shape[0], size):
        part = logits[:, a : a + size]
        cross, right, derived = rows(part, goal[a : a + size], weights[:, a : a + size], gradient)
        if gradient:
            part.copy_(derived)
        found.append((cross, right))
    return torch.cat([f[0] for f in found], 1), torch.cat([f[1] for f in found], 1), logits


@functools.cache
def compiled_rows():
    return torch.compile(rows, dynamic=True)


class SoftCrossEntropy(torch.autograd.Function):
    """See `soft_cross_entropy`."""

    @staticmethod
    def forward(ctx, hidden, head, last, target, weights, gradient):
        steps, count, _ = hidden.shape
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        states, matrix = hidden.to(dtype), head.to(dtype)
        row_function = compiled_rows() if kind == "cuda" else rows_in_cache
        size = max(1, CHUNK[kind] // (steps * len(head)))
        by_hidden = torch.empty_like(hidden, dtype=torch.float32) if gradient else None
        by_head = torch.zeros_like(head, dtype=torch.float32) if gradient else None
        crosses, rights = [], []
        for a in range(0, count, size):
            part, weight = states[:, a : a + size], weights[:, a : a + size]
            goal = target.logits(last[a : a + size])
            cross, right, derived = row_function(F.linear(part, matrix), goal, weight, gradient)
            if gradient:
                by_hidden[:, a : a + size] = derived @ matrix
                by_head += derived.flatten(0, 1).T @ part.flatten(0, 1)
            crosses.append(cross)
            rights.append(right)
        if gradient:
            ctx.save_for_backward(by_hidden, by_head)
            ctx.dtypes = hidden.dtype, head.dtype
        cross, right = torch.cat(crosses, dim=1), torch.cat(rights, dim=1)
        ctx.mark_non_differentiable(right)
        return (cross * weights).sum(), right

    @staticmethod
    def backward(ctx, upstream, _):
        by_hidden, by_head = ctx.saved_tensors
        hidden, head = ctx.dtypes
        return (by_hidden * upstream).to(hidden), (by_head * upstream).to(head), None, None, None, None


def soft_cross_entropy(hidden: Tensor, head: Tensor, last: Tensor, target, weights: Tensor) -> tuple[Tensor, Tensor]:
    """sum over s, l of weights[s, l] * cross-entropy of hidden[s, l] @ head.T against the target's softmax at label l.

    hidden [S, L, H] after the final norm, head [D, H], last [L, H] the target's pre-norm states at the labels, target
    with `logits(last) -> [L, D]` (training.TargetHead), weights [S, L] float32. Under autocast the products are of its
    dtype. Returns (loss [] float32, right [S, L] bool: same greedy token as the target over the draft vocabulary).
    """
    if hidden.shape[1] == 0:
        return (hidden.sum() + head.sum()) * 0.0, weights.bool()
    return SoftCrossEntropy.apply(hidden, head, last, target, weights, torch.is_grad_enabled())
