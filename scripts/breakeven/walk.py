"""Offline acceptance: a simulated speculative walk over responses that the target has already given.

Drafts are greedy, as in vLLM and SGLang. Every row drafts a chain from the target's features, all rows at once, with
the same `Drafter.step` that training uses, but fed with its own tokens; the walk then hops over the rows as an engine
would: a verification step at row p accepts the leading draft tokens that equal the response and continues at row
p + accepted + 1. Where the response was sampled at a temperature, a greedy draft d equals the sampled token with the
target's own probability of d, which is the probability that rejection sampling accepts it; so the walk's expectation
is right there too.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven.drafter import Drafter, Rows, autocast
from breakeven.hidden_states import InMemory, Sequences


@dataclass
class Matches:
    """How many leading draft tokens of each row are right.

    matched [R] int64, 0 ... K, for rows first_row ... first_row + R - 1 of one sequence; a row can only be judged on
    the response tokens that are left behind it, `judged` [R] = min(K, tokens left).
    """

    matched: np.ndarray
    judged: np.ndarray


@torch.inference_mode()
def draft(drafter: Drafter, ids: Tensor, tokens: Tensor, features: Tensor, first_row: int, k: int) -> Tensor:
    """Greedy draft chains of every row from first_row on: target ids [R, K].

    tokens [T] int64, features [T, A, H]; row p drafts x[p+2] ... x[p+1+K]. ids [D] maps draft to target ids.
    """
    length = len(tokens)
    fed = F.pad(tokens, (0, 1))[None, 1:]
    hidden, context = drafter.fuse(features[None]), None
    rows = Rows.suffix(length, first_row, tokens.device)
    drafts = []
    for _ in range(k):
        hidden, context = drafter.step(fed, hidden, context, rows)
        fed = ids[drafter.logits(hidden).argmax(-1)]
        drafts.append(fed[0])
    assert hidden.shape[1] == length - first_row
    return torch.stack(drafts, dim=1)


def match(drafts: Tensor, tokens: Tensor, first_row: int) -> Matches:
    """Compare drafts [R, K] with the tokens [T] that really follow."""
    rows, k = drafts.shape
    position = first_row + torch.arange(rows, device=tokens.device)[:, None] + 2 + torch.arange(k, device=tokens.device)
    inside = position < len(tokens)
    right = inside & (drafts == tokens[position.clamp(max=len(tokens) - 1)])
    matched = right.long().cumprod(dim=1).sum(dim=1)
    return Matches(matched.cpu().numpy(), inside.sum(dim=1).cpu().numpy())


def walk(matches: Matches, k: int) -> list[int]:
    """Accepted draft tokens of each verification step of one sequence, at K = k <= drafted.

    Starts at the row that follows the first response token, which the prefill gives. Ends before the first step that
    would draft past the response, since its acceptance cannot be judged.
    """
    accepted, row = [], 0
    while row < len(matches.matched) and matches.judged[row] >= k:
        accepted.append(int(min(matches.matched[row], k)))
        row += accepted[-1] + 1
    return accepted


def counts(steps: list[int], k: int) -> tuple[int, np.ndarray]:
    """(number of steps, accepted_per_position [k]): steps that accepted at least i tokens, for i = 1 ... k."""
    accepted = np.asarray(steps, dtype=np.int64)
    return len(accepted), np.array([(accepted >= i).sum() for i in range(1, k + 1)], dtype=np.int64)


def evaluate(
    drafter: Drafter,
    ids: Tensor,
    sequences: Sequences | InMemory,
    chosen: list[int],
    k: int,
    device: str,
    progress=None,
) -> list[Matches]:
    """Matches of the chosen sequences, with up to k draft tokens a row, in bf16 as the engines compute."""
    found = []
    for i in chosen:
        loaded = sequences.load(i, "token_ids", "loss_mask", "hidden")
        tokens = loaded["token_ids"].long().to(device)
        # Row first_response - 1 sees the first response token and drafts the second one.
        first = int(loaded["loss_mask"].nonzero()[0]) - 1
        with autocast(device):
            drafts = draft(drafter, ids, tokens, loaded["hidden"].to(device), first, k)
        found.append(match(drafts, tokens, first))
        if progress is not None:
            progress.add(len(tokens))
    return found


def table(found: list[Matches], ks: list[int], prompts: str) -> list[dict]:
    """Rows of tables.OFFLINE: acceptance per position for every K of `ks`."""
    rows = []
    for k in ks:
        steps, accepted = counts([a for matches in found for a in walk(matches, k)], k)
        length = 1 + accepted.sum() / steps if steps else None
        before = steps
        for position, count in enumerate(accepted.tolist(), start=1):
            rows.append(
                {
                    "prompts": prompts,
                    "k": k,
                    "position": position,
                    "steps": steps,
                    "accepted": count,
                    "marginal": count / steps if steps else None,
                    "conditional": count / before if before else None,
                    "acceptance_length": length,
                }
            )
            before = count
    return rows


def said(rows: list[dict]) -> str:
    """What the rows of one K say, for the log; nan where no step could be judged."""
    rates = [rows[0]["acceptance_length"], *(row["marginal"] for row in rows)]
    length, *marginal = (math.nan if rate is None else rate for rate in rates)
    return f"acceptance length {length:.2f}, per position {' '.join(f'{rate:.3f}' for rate in marginal)}"


def by_sequence(found: list[Matches], about: list[tuple[int, int]], ks: list[int]) -> list[dict]:
    """Rows of tables.OFFLINE_BY_SEQUENCE; about: (sequence, conversation) of each of `found`."""
    rows = []
    for matches, (sequence, conversation) in zip(found, about, strict=True):
        for k in ks:
            steps, accepted = counts(walk(matches, k), k)
            rows.append(
                {
                    "sequence": sequence,
                    "conversation": conversation,
                    "k": k,
                    "steps": steps,
                    "accepted_per_position": accepted.tolist(),
                }
            )
    return rows
