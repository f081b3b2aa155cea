"""What a step costs and what would pay: break-even, ceilings, the acceptance needed, the best K. Pure numpy.

Definitions (docs/design.md, section 6). rho(K) = time of a step with speculation / time of a step without, on the same
engine, flags, machine and concurrency. AL = tokens per verification step, bonus included. Then

    speed-up       S = AL / rho          so rho is the break-even AL
    ceiling        S <= (K + 1) / rho    a step yields K + 1 tokens at most
    position K+1   pays iff m_{K+1} / AL > (rho(K+1) - rho(K)) / rho(K)

rho(K) comes from arms that ran (AL / S), or, before any training, from a random drafter of the right shape, whose AL is
1 so that its speed-up is 1 / rho (tables.STEP_COST). Nothing here knows where it came from.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

DEEPEST = 16  # the longest draft that is looked at


def predicted_speedup(length: float, rho: float) -> float:
    """S = AL / rho."""
    _check_rho(rho)
    return length / rho


def ceiling(k: int, rho: float) -> float:
    """The speed-up that no drafter can exceed: (K + 1) / rho."""
    _check_rho(rho)
    return (k + 1) / rho


def _check_rho(rho: float) -> None:
    if not (rho > 0 and math.isfinite(rho)):
        raise ValueError(f"rho is a ratio of two times, above 0; this one is {rho}")


def length_at(conditional: float, k: int) -> float:
    """AL of a drafter with the same conditional acceptance c at each position: 1 + c + ... + c^K."""
    return float(sum(conditional**i for i in range(k + 1)))


def needed_conditional(rho: float, k: int) -> float | None:
    """The constant conditional acceptance c with AL(K, c) = rho; 0 if rho <= 1, None if even c = 1 falls short."""
    _check_rho(rho)
    if rho <= 1:
        return 0.0
    if rho > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):  # AL grows with c
        middle = (low + high) / 2
        low, high = (middle, high) if length_at(middle, k) < rho else (low, middle)
    return high


def lengths(marginal: Sequence[float]) -> np.ndarray:
    """AL at K = 1 ... n from marginal acceptance per position, float64 [n].

    Taking the first K positions of a longer draft is an approximation: with another K, steps begin elsewhere.
    """
    return 1 + np.cumsum(np.asarray(marginal, dtype=np.float64))


class Best(NamedTuple):
    """Result of `best_k`; k 0 and speed-up 1 if no K beats plain decoding."""

    k: int
    speedup: float
    length: float


def best_k(marginal: Sequence[float], rho: Mapping[int, float]) -> Best:
    """The K with the largest AL(K) / rho(K), among the K that `rho` has and the curve reaches."""
    reached = lengths(marginal)
    best = Best(0, 1.0, 1.0)
    for k in sorted(rho):
        if 1 <= k <= len(reached):
            speedup = predicted_speedup(reached[k - 1], rho[k])
            if speedup > best.speedup:
                best = Best(k, float(speedup), float(reached[k - 1]))
    return best


def position_pays(next_marginal: float, length: float, rho: float, next_rho: float) -> bool:
    """Whether drafting position K + 1 as well raises the speed-up: m_{K+1} / AL > (rho(K+1) - rho(K)) / rho(K)."""
    _check_rho(rho)
    return next_marginal / length > (next_rho - rho) / rho


def extend(marginal: Sequence[float], k: int) -> np.ndarray:
    """The curve up to position k, float64 [k]; beyond its end the last conditional acceptance is kept (a guess)."""
    curve = np.asarray(marginal, dtype=np.float64)
    if not len(curve):
        raise ValueError("a curve without a position cannot be extended")
    before = curve[-2] if len(curve) > 1 else 1.0
    c = curve[-1] / before if before > 0 else 0.0
    tail = curve[-1] * c ** np.arange(1, max(k - len(curve), 0) + 1)
    return np.concatenate([curve, tail])[:k]


class Split(NamedTuple):
    """Result of `split`: factors that multiply to expected speed-up / speed-up reached."""

    total: float
    acceptance: float  # expected AL / AL reached
    cost: float  # rho reached / rho expected
    acceptance_share: float  # of log(total); nan if there is no gap


def split(expected_speedup: float, expected_length: float, speedup: float, length: float) -> Split:
    """Why a published speed-up was not reached: how much of the (log) gap is acceptance, how much step cost."""
    total, acceptance = expected_speedup / speedup, expected_length / length
    share = math.log(acceptance) / math.log(total) if not math.isclose(total, 1) else math.nan
    return Split(total, acceptance, total / acceptance, share)


class Fit(NamedTuple):
    """rho(K) = a + b K by least squares, and what is needed for its interval."""

    a: float
    b: float
    ks: tuple[int, ...]  # of the points
    residual: float  # standard deviation of the points about the line; nan with two points
    inverse: np.ndarray  # (X'X)^-1, float64 [2, 2]

    def at(self, k: float) -> float:
        """rho at K; below K = 1 it has no meaning."""
        return self.a + self.b * k

    def interval(self, k: float, confidence: float = 0.95) -> tuple[float, float]:
        """Student interval for the line at K; (-inf, inf) with two points, which any line fits."""
        degrees = len(self.ks) - 2
        if degrees < 1:
            return -math.inf, math.inf
        x = np.array([1.0, k])
        half = special.stdtrit(degrees, 0.5 + confidence / 2) * self.residual * math.sqrt(x @ self.inverse @ x)
        return self.at(k) - half, self.at(k) + half


def fit(points: Sequence[tuple[int, float]]) -> Fit:
    """Fit rho(K) = a + b K to (K, rho) points, repeats allowed; ValueError with fewer than two different K."""
    ks = np.array([k for k, _ in points], dtype=np.float64)
    rhos = np.array([rho for _, rho in points], dtype=np.float64)
    if len(set(ks.tolist())) < 2:
        raise ValueError("a line through rho(K) needs points at two different K")
    x = np.stack([np.ones_like(ks), ks], axis=1)
    inverse = np.linalg.inv(x.T @ x)
    a, b = inverse @ x.T @ rhos
    degrees = len(points) - 2
    residual = math.sqrt(((rhos - a - b * ks) ** 2).sum() / degrees) if degrees else math.nan
    return Fit(float(a), float(b), tuple(int(k) for k in ks), residual, inverse)


class StepCost:
    """rho(K) of one engine on one machine at one concurrency: measured points, and the line between and beyond them.

    source: where it was measured, for the evidence ("step cost", "arms of this run").
    """

    def __init__(self, points: Sequence[tuple[int, float]], source: str):
        if not points:
            raise ValueError("a step cost needs at least one point")
        for k, rho in points:
            if k < 1:
                raise ValueError(f"a step with speculation drafts K >= 1 tokens, not {k}")
            _check_rho(rho)
        self.points = sorted((int(k), float(rho)) for k, rho in points)
        self.source = source
        self.line = fit(self.points) if len({k for k, _ in self.points}) > 1 else None

    @property
    def measured(self) -> dict[int, float]:
        """Geometric mean of the points at each K."""
        return {
            k: float(np.exp(np.mean([math.log(rho) for other, rho in self.points if other == k])))
            for k in sorted({k for k, _ in self.points})
        }

    def at(self, k: int) -> float | None:
        """rho at K as measured, else from the line; None where neither says anything.

        A step with speculation contains a plain one, so a line below 1 has left the range in which it holds.
        """
        if k in self.measured:
            return self.measured[k]
        if self.line is None or k > 2 * max(self.measured) or self.line.at(k) < 1:
            return None
        return self.line.at(k)

    def known(self, deepest: int = DEEPEST) -> dict[int, float]:
        """rho by K for every K = 1 ... deepest that `at` knows."""
        return {k: rho for k in range(1, deepest + 1) if (rho := self.at(k)) is not None}


def table(cost: StepCost, marginal: Sequence[float] | None = None) -> list[dict[str, float | int | None]]:
    """What each K needs, one row per K: rho (break-even AL), needed conditional acceptance, ceiling.

    With a curve of marginal acceptance, also its AL and the speed-up it would have.
    """
    known = cost.known()
    reached = [] if marginal is None else lengths(marginal)
    return [
        {
            "k": k,
            "rho": rho,
            "needed_conditional": needed_conditional(rho, k),
            "ceiling": ceiling(k, rho),
            "acceptance_length": float(reached[k - 1]) if k <= len(reached) else None,
            "speedup": float(reached[k - 1] / rho) if k <= len(reached) else None,
        }
        for k, rho in known.items()
    ]
