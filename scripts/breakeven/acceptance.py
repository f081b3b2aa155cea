"""Acceptance from counts: lengths, marginal and conditional rates, intervals, and whether two curves agree.

Definitions (docs/design.md, section 6). A verification step checks K drafted tokens and yields the accepted ones plus
one bonus token. With S steps and a_i steps whose draft was accepted up to and including position i:

    accepted            A   = sum of a_i        (bonus tokens not counted)
    acceptance length   AL  = 1 + A / S         (tokens per step, bonus included; between 1 and K + 1)
    acceptance rate     r   = A / (S K)         (engines disagree on this one: never compare it across engines)
    marginal            m_i = a_i / S           (never increases with i)
    conditional         c_i = a_i / a_{i-1}     (a_0 = S)

Nothing here needs a model: the counts may come from an engine's counters, its per-request metrics, or an offline walk.
"""

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

ENGINE_NUMERICS = 0.015
"""Two runs of one drafter differ by 1-2 % in acceptance for reasons of arithmetic alone (kernels, batch shapes)."""


class ImpossibleCounts(ValueError):
    """Counts that no run can have produced, so that a number made of them would mean nothing."""


def impossible(
    steps: int, accepted_per_position: Sequence[int], accepted: int | None = None, drafted: int | None = None
) -> list[str]:
    """What is impossible about these counts, one sentence each; empty if they can be true.

    accepted_per_position: K counts, position 1 first. accepted, drafted: totals reported beside them, if any.
    """
    counts = np.asarray(accepted_per_position, dtype=np.int64)
    k = len(counts)
    found = []
    if steps < 0 or (counts < 0).any() or (accepted or 0) < 0 or (drafted or 0) < 0:
        found.append(f"a negative count (steps {steps}, accepted per position {counts.tolist()})")
    if steps == 0 and (counts.any() or accepted):
        found.append(f"accepted tokens without a verification step (accepted per position {counts.tolist()})")
    if k and counts[0] > steps:
        found.append(f"position 1 accepted {counts[0]} times in {steps} steps")
    for i in range(1, k):
        if counts[i] > counts[i - 1]:
            found.append(f"position {i + 1} accepted more often ({counts[i]}) than position {i} ({counts[i - 1]})")
    if accepted is not None and k and accepted != counts.sum():
        found.append(f"{accepted} accepted in total, but the positions add up to {counts.sum()}")
    total = int(counts.sum()) if accepted is None else accepted
    if drafted is not None and total > drafted:
        found.append(f"acceptance rate above 1: {total} accepted of {drafted} drafted")
    if k and steps > 0 and total > k * steps:
        found.append(f"acceptance length {1 + total / steps:.2f} above K + 1 = {k + 1}")
    return found


def check(
    steps: int, accepted_per_position: Sequence[int], accepted: int | None = None, drafted: int | None = None
) -> None:
    """Raise ImpossibleCounts with every finding of `impossible`."""
    found = impossible(steps, accepted_per_position, accepted, drafted)
    if found:
        raise ImpossibleCounts("; ".join(found))


def acceptance_length(steps: int, accepted: int, k: int | None = None) -> float:
    """AL = 1 + accepted / steps; nan without a step. With `k`, an AL above K + 1 raises ImpossibleCounts."""
    if steps < 0 or accepted < 0 or (steps == 0 and accepted):
        raise ImpossibleCounts(f"{accepted} accepted in {steps} steps")
    if k is not None and accepted > k * steps:
        raise ImpossibleCounts(f"acceptance length {1 + accepted / steps:.2f} above K + 1 = {k + 1}")
    return 1 + accepted / steps if steps else float("nan")


def acceptance_rate(steps: int, accepted: int, k: int) -> float:
    """Accepted / drafted with K drafted tokens in each step; above 1 raises ImpossibleCounts; nan without a step."""
    if accepted > steps * k:
        raise ImpossibleCounts(f"acceptance rate above 1: {accepted} accepted of {steps * k} drafted")
    return accepted / (steps * k) if steps * k else float("nan")


def marginal(steps: int, accepted_per_position: Sequence[int]) -> np.ndarray:
    """m_i = a_i / steps, float64 [K]; nan without a step. Impossible counts raise."""
    check(steps, accepted_per_position)
    counts = np.asarray(accepted_per_position, dtype=np.float64)
    return counts / steps if steps else np.full(len(counts), np.nan)


def conditional(steps: int, accepted_per_position: Sequence[int]) -> np.ndarray:
    """c_i = a_i / a_{i-1} with a_0 = steps, float64 [K]; nan where position i was never reached."""
    check(steps, accepted_per_position)
    counts = np.asarray(accepted_per_position, dtype=np.float64)
    reached = np.concatenate([[float(steps)], counts[:-1]]) if len(counts) else counts
    return np.divide(counts, reached, out=np.full(len(counts), np.nan), where=reached > 0)


def from_histogram(histogram: Sequence[int]) -> tuple[int, np.ndarray]:
    """(steps, accepted per position int64 [K]) of the steps counted by accepted length 0 ... K, as SGLang reports them.

    >>> from_histogram([39, 1, 0, 3])
    (43, array([4, 3, 3]))
    """
    counts = np.asarray(histogram, dtype=np.int64)
    if counts.ndim != 1 or len(counts) < 2 or (counts < 0).any():
        raise ImpossibleCounts(f"a histogram has K + 1 >= 2 counts, none negative; this one is {counts.tolist()}")
    return int(counts.sum()), np.cumsum(counts[::-1])[::-1][1:]


def leading_run(mask: Sequence[bool]) -> int:
    """Drafted tokens accepted in one step: the matches before the first mismatch, not all matches."""
    mask = np.asarray(mask, dtype=bool)
    return len(mask) if mask.all() else int(np.argmin(mask))


def wilson(successes, n, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's score interval for a proportion, elementwise: (low, high), float64; (0, 1) where n is 0.

    Wilson (1927), JASA 22, 209-212. It treats steps as independent; acceptance also varies from prompt to prompt, so
    as a statement about other prompts the interval is too narrow. For two runs on the same prompts it is the right one.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    successes, n = np.asarray(successes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    safe = np.maximum(n, 1)
    p = successes / safe
    centre = (p + z**2 / (2 * safe)) / (1 + z**2 / safe)
    half = z / (1 + z**2 / safe) * np.sqrt(p * (1 - p) / safe + z**2 / (4 * safe**2))
    return np.where(n > 0, np.maximum(centre - half, 0), 0.0), np.where(n > 0, np.minimum(centre + half, 1), 1.0)


class Agreement(NamedTuple):
    """Result of `agreement`."""

    agree: bool
    p_value: float  # of the whole curve, corrected for K looks
    z: np.ndarray  # float64 [K], per position, first minus second
    worst: int  # position (from 1) with the largest |z|


def agreement(
    first: tuple[int, Sequence[int]],
    second: tuple[int, Sequence[int]],
    floor: float = ENGINE_NUMERICS,
    level: float = 0.05,
) -> Agreement:
    """Do two marginal curves, each (steps, accepted per position [K]), differ by more than chance and engine numerics?

    Per position, z = (m - m') / sqrt(p (1 - p) (1/S + 1/S') + floor^2) with the pooled p: a two-sample test of
    proportions with an overdispersion floor, without which any two engines would differ given enough steps. `floor` is
    absolute, in units of the marginal, and is read as the standard deviation between two faithful runs. The positions
    of one run depend on each other, so the smallest p-value is corrected by Bonferroni, valid under any dependence.
    """
    (n1, a1), (n2, a2) = first, second
    m1, m2 = marginal(n1, a1), marginal(n2, a2)
    if len(m1) != len(m2):
        raise ValueError(f"curves of K = {len(m1)} and K = {len(m2)} positions cannot be compared")
    if not (n1 and n2 and len(m1)):
        raise ValueError("a curve without a step or without a position cannot be compared")
    pooled = (np.asarray(a1) + np.asarray(a2)) / (n1 + n2)
    spread = np.sqrt(pooled * (1 - pooled) * (1 / n1 + 1 / n2) + floor**2)
    z = np.divide(m1 - m2, spread, out=np.zeros(len(m1)), where=spread > 0)
    worst = int(np.argmax(np.abs(z)))
    p_value = min(1.0, len(z) * 2 * NormalDist().cdf(-abs(z[worst])))
    return Agreement(bool(p_value >= level), p_value, z, worst + 1)
