"""Acceptance against training data: a saturating law through the points of a data curve, and what more data would do.

    AL(N) = a - b N^-c        a: acceptance length with unlimited data, at most K + 1; b >= 0; 0 < c

the power law with an offset that learning curves follow (Hestness et al. 2017, arXiv:1712.00409). For a given c, a and b
are a least-squares problem with a closed form, so c is searched on a grid: the best fit is found in every resample.

The unit is the held-out conversation: all points walk the same ones, so each resample of conversations gives a curve of
its own, and what differs between conversations but not between points cancels in the law. The intervals cover the choice
of held-out conversations. They do not cover another seed of the training, nor that the true curve may bend otherwise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from breakeven import artefacts, stats
from breakeven.cli import UserError
from breakeven.stepcost import StepCost

LEAST_POINTS = 3
HORIZON = 10  # times the data of the largest point: as far as a crossing is claimed
EXPONENTS = np.geomspace(0.02, 2.0, 240)
QUANTILES = (0.025, 0.975)


@dataclass
class Law:
    """AL(N) = a - b N^-c; floats, or arrays [R] with one law for each resample."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    def at(self, samples: float) -> np.ndarray:
        """AL of a drafter trained on so many samples."""
        return self.a - self.b * samples**-self.c

    def crossing(self, length: float) -> np.ndarray:
        """Samples at which AL reaches `length`; inf where the law stays below, 0 where it always lies above."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            samples = (self.b / (self.a - length)) ** (1 / self.c)
        return np.where(self.a > length, samples, np.inf)


@dataclass
class Curve:
    """The points of one K, their law, and the same for each resample of the held-out conversations."""

    k: int
    samples: np.ndarray  # int64 [P], ascending
    lengths: np.ndarray  # AL, float64 [P]
    resampled: np.ndarray  # AL, float64 [R, P]
    law: Law
    laws: Law  # [R]
    conversations: int
    steps: np.ndarray  # verification steps, int64 [P]

    @property
    def largest(self) -> int:
        return int(self.samples[-1])

    def interval(self, values: np.ndarray) -> tuple[float, float]:
        """95 % percentile interval of a value that each resample has."""
        low, high = np.quantile(values, QUANTILES, method="inverted_cdf")
        return float(low), float(high)

    def forecast(self, samples: float) -> tuple[float, float, float]:
        """(AL, low, high) that the law has at so many samples."""
        return float(self.law.at(samples)), *self.interval(self.laws.at(samples))


def fit(samples: Sequence[int], lengths: np.ndarray, k: int) -> Law:
    """Least squares of the law through (samples [P], AL [..., P]), with 0 <= b and a <= K + 1.

    ValueError with fewer than three different numbers of samples.
    """
    x = np.asarray(samples, dtype=np.float64)
    if len(np.unique(x)) < LEAST_POINTS:
        raise ValueError(
            f"a law with three parameters needs {LEAST_POINTS} points or more; there are {len(np.unique(x))}"
        )
    scale = np.exp(np.log(x).mean())
    u = (x / scale) ** -EXPONENTS[:, None]  # [G, P]
    y = np.asarray(lengths, dtype=np.float64)[..., None, :]  # [..., 1, P]
    centred = u - u.mean(-1, keepdims=True)
    slope = np.maximum(-(centred * y).sum(-1) / (centred**2).sum(-1), 0)
    limit = y.mean(-1) + slope * u.mean(-1)
    # Where the limit is above what K allows, the best fit of the allowed ones lies on that edge.
    beyond = limit > k + 1
    limit = np.where(beyond, k + 1.0, limit)
    slope = np.where(beyond, np.maximum(((k + 1 - y) * u).sum(-1) / (u**2).sum(-1), 0), slope)
    errors = ((limit[..., None] - slope[..., None] * u - y) ** 2).sum(-1)  # [..., G]
    best = errors.argmin(-1)[..., None]
    c = EXPONENTS[best[..., 0]]
    b = np.take_along_axis(slope, best, -1)[..., 0] * scale**c
    return Law(np.take_along_axis(limit, best, -1)[..., 0], b, c)


@dataclass
class Lengths:
    """Acceptance lengths of P drafters that walked the same held-out responses with one K."""

    lengths: np.ndarray  # AL, float64 [P]
    resampled: np.ndarray  # AL, float64 [R, P]; one resample of conversations for all drafters
    conversations: int
    steps: np.ndarray  # verification steps, int64 [P]


def lengths(walks: Mapping[str, Any], k: int, resamples: int = 2000, seed: int = 0) -> Lengths:
    """walks: by what an error calls it, a pandas table of tables.OFFLINE_BY_SEQUENCE.

    UserError for drafters that walked different sequences, a K that was not walked, or fewer conversations than an
    interval needs.
    """
    tables = {name: table[table["k"] == k].sort_values("sequence") for name, table in walks.items()}
    first = next(iter(tables.values()))
    for name, table in tables.items():
        if table.empty:
            raise UserError(f"{name} was not walked with K = {k}; choose a smaller K in data_curve.k")
        if table["sequence"].tolist() != first["sequence"].tolist():
            raise UserError(f"{name} walked other held-out sequences than the first; walk it again")
    group = np.unique(first["conversation"].to_numpy(), return_inverse=True)[1]
    conversations = int(group.max()) + 1
    if conversations < stats.MINIMUM_PROMPTS:
        raise UserError(
            f"there are walks of {conversations} held-out conversations, and an interval needs"
            f" {stats.MINIMUM_PROMPTS} or more; raise prompts.held_out_fraction or prompts.size"
        )
    steps = np.stack([np.bincount(group, t["steps"]) for t in tables.values()], axis=1)  # [C, P]
    accepted = np.stack(
        [np.bincount(group, [sum(counts) for counts in t["accepted_per_position"]]) for t in tables.values()], axis=1
    )
    if not steps.sum(0).all():
        raise UserError(f"no held-out response is long enough to judge a step of K = {k}; raise sampling.max_tokens")
    draws = np.random.default_rng(seed).multinomial(conversations, np.full(conversations, 1 / conversations), resamples)
    return Lengths(
        1 + accepted.sum(0) / steps.sum(0),
        1 + (draws @ accepted) / np.maximum(draws @ steps, 1),
        conversations,
        steps.sum(0).astype(np.int64),
    )


def curve(points: Mapping[int, Any], k: int, resamples: int = 2000, seed: int = 0) -> Curve:
    """The curve of one K. points: by number of samples, a pandas table of tables.OFFLINE_BY_SEQUENCE.

    UserError for fewer than three points, points that walked different sequences, a K that was not walked, or fewer
    conversations than an interval needs.
    """
    if len(points) < LEAST_POINTS:
        raise UserError(
            f"data_curve.samples: {len(points)} points do not determine a law with three parameters; name three or more"
        )
    points = dict(sorted(points.items()))
    walks = lengths({f"the point of {n} samples": table for n, table in points.items()}, k, resamples, seed)
    samples = np.array(list(points), dtype=np.int64)
    law, laws = fit(samples, walks.lengths, k), fit(samples, walks.resampled, k)
    return Curve(k, samples, walks.lengths, walks.resampled, law, laws, walks.conversations, walks.steps)


def step_costs(measured: Mapping[str, Any], summary: Any, drafters: Sequence[str]) -> dict[str, StepCost]:
    """rho(K) of each engine: its step-cost table where there is one, else its measured arms, with fewest requests at once.

    measured: by engine, a pandas table of tables.STEP_COST. summary: that of tables.SUMMARY, or None; arms count that
    have one of `drafters`.
    """

    def cost(rows: Any, source: str) -> StepCost:
        least = rows[rows["concurrency"] == rows["concurrency"].min()]
        return StepCost(list(zip(least["k"], least["rho"], strict=True)), source)

    found = {engine: cost(rows, "random drafter") for engine, rows in measured.items()}
    if summary is not None:
        arms = summary[summary["drafter"].isin(drafters) & (summary["rho"] > 0) & (summary["verdict"] != "refused")]
        for engine, rows in arms.groupby("engine"):
            if engine not in found:
                found[engine] = cost(rows, "arms of the comparison")
    return found


def sentence(found: Curve, rho: float | None, where: str = "") -> str:
    """Whether more data will, will not or may cross break-even (AL = rho); without a rho, which step cost would pay."""
    limit, (low, high) = float(found.law.a), found.interval(found.laws.a)
    k, n = found.k, found.largest
    if rho is None:
        twice, *_ = found.forecast(2 * n)
        return (
            f"K = {k}: no step cost is known here (`snakemake step_cost` measures it): speculation pays where rho is below"
            f" {found.lengths[-1]:.2f} with {n:,} samples, below {twice:.2f} with twice as many, and no amount of data pays"
            f" above {limit:.2f} (95 %: {low:.2f} to {high:.2f})."
        )
    cost = f"at this step cost ({where}{', ' if where else ''}rho = {rho:.2f})"
    now_low, now_high = found.interval(found.resampled[:, -1])
    now = f"AL {found.lengths[-1]:.2f} (95 %: {now_low:.2f} to {now_high:.2f}) with {n:,} samples"
    if now_low > rho:
        return f"K = {k}: no more data is needed to cross break-even {cost}: {now} is above it already."
    if high < rho:
        return (
            f"K = {k}: more data will not cross break-even {cost}: {now}, and with unlimited data the law ends at"
            f" {limit:.2f} (95 %: {low:.2f} to {high:.2f}); the step has to become cheaper."
        )
    at = found.laws.crossing(rho)
    share = float((at <= HORIZON * n).mean())
    first, last = found.interval(at)
    if last <= HORIZON * n:
        at_best = float(found.law.crossing(rho))
        return (
            f"K = {k}: more data will cross break-even {cost}: {now}, and the law reaches it at {_count(at_best)} samples"
            f" (95 %: {_count(first)} to {_count(last)})."
        )
    return (
        f"K = {k}: more data may cross break-even {cost}: {now}, and {100 * share:.0f} % of the resampled laws reach it"
        f" within {HORIZON} times the data; with unlimited data the law ends at {limit:.2f} (95 %: {low:.2f} to {high:.2f})."
    )


def _count(samples: float) -> str:
    """Two significant digits are all that a crossing is known to."""
    if not 0 < samples < math.inf:
        return str(samples)
    return f"{round(samples, 1 - math.floor(math.log10(samples))):,.0f}"


def rows(found: Curve, drafter: str, served: Mapping[tuple[str, int], float]) -> list[dict[str, Any]]:
    """Rows of tables.DATA_CURVE: the points, and the forecast for twice the data. served: AL by (drafter, K)."""
    law = {"a": float(found.law.a), "b": float(found.law.b), "c": float(found.law.c)}
    made = []
    for i, n in enumerate(found.samples.tolist()):
        low, high = found.interval(found.resampled[:, i])
        made.append(
            {
                "drafter": f"{drafter}-{n}",
                "samples": n,
                "k": found.k,
                "kind": "measured",
                "acceptance_length": float(found.lengths[i]),
                "low": low,
                "high": high,
                "fitted": float(found.law.at(n)),
                "served_acceptance_length": served.get((f"{drafter}-{n}", found.k)),
                "conversations": found.conversations,
                "steps": int(found.steps[i]),
                **law,
            }
        )
    value, low, high = found.forecast(2 * found.largest)
    forecast = {"drafter": None, "samples": 2 * found.largest, "k": found.k, "kind": "forecast", "steps": None}
    forecast |= {
        "acceptance_length": value,
        "low": low,
        "high": high,
        "fitted": value,
        "served_acceptance_length": None,
    }
    return [*made, forecast | {"conversations": found.conversations} | law]


def summary(curves: Sequence[Curve], made: Sequence[Mapping[str, Any]], costs: Mapping[str, StepCost]) -> str:
    """The curve as text: one line for each point, the law, the forecast, and a sentence for each K and engine."""
    lines = ["Held-out acceptance length against training samples (95 % over held-out conversations)", ""]
    lines.append(f"{'K':>3} {'samples':>9}     AL   95 %           law  served")
    for row in made:
        served = row["served_acceptance_length"]
        note = "  forecast" if row["kind"] == "forecast" else f"  {served:6.2f}" if served else ""
        lines.append(
            f"{row['k']:3d} {row['samples']:9,d}  {row['acceptance_length']:5.2f}   {row['low']:.2f} to {row['high']:.2f}"
            f"  {row['fitted']:5.2f}{note}"
        )
    lines.append("")
    for found in curves:
        low, high = found.interval(found.laws.a)
        law = found.law
        value, *interval = found.forecast(2 * found.largest)
        lines.append(
            f"K = {found.k}: AL(N) = {law.a:.2f} - {law.b:.3g} N^-{law.c:.3g}; with unlimited data {law.a:.2f} (95 %:"
            f" {low:.2f} to {high:.2f}); with {2 * found.largest:,} samples {value:.2f} (95 %: {interval[0]:.2f} to"
            f" {interval[1]:.2f}). {found.conversations} held-out conversations."
        )
    lines.append("")
    for found in curves:
        known = [(engine, cost, cost.at(found.k)) for engine, cost in sorted(costs.items())]
        told = [sentence(found, rho, f"{engine}, {cost.source}") for engine, cost, rho in known if rho is not None]
        lines += told or [sentence(found, None)]
    return "\n".join(lines) + "\n"


def draw(curves: Sequence[Curve], costs: Mapping[str, StepCost], path: Path | str, style: Path | str) -> None:
    """The points with intervals, the laws up to twice the data with theirs, and break-even where it is known."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.style.context(str(style)):
        figure, axes = plt.subplots(figsize=(6.4, 3.8))
        for found, colour in zip(curves, plt.cm.viridis(np.linspace(0.15, 0.75, len(curves))), strict=True):
            x = np.geomspace(found.samples[0], 2 * found.largest, 60)
            band = np.array([found.forecast(n) for n in x])
            low, high = np.array([found.interval(values) for values in found.resampled.T]).T
            axes.fill_between(x, band[:, 1], band[:, 2], color=colour, alpha=0.15, linewidth=0)
            axes.plot(x, band[:, 0], color=colour, label=f"K = {found.k}")
            errors = np.maximum([found.lengths - low, high - found.lengths], 0)
            axes.errorbar(found.samples, found.lengths, errors, color=colour, marker="o", markersize=5, linestyle="")
            for engine, cost in sorted(costs.items()):
                if (rho := cost.at(found.k)) is not None:
                    axes.axhline(rho, color=colour, linestyle=":", linewidth=1.2)
                    axes.annotate(
                        f"break-even, {engine}, K = {found.k}", (x[0], rho), textcoords="offset points", xytext=(2, 3)
                    )
        axes.set_xscale("log")
        axes.set_xticks(found.samples, [f"{n:,}" for n in found.samples])
        axes.minorticks_off()
        axes.set_xlabel("training samples")
        axes.set_ylabel("held-out acceptance length")
        axes.legend(loc="lower right")
        with artefacts.atomic(path) as temporary:
            figure.savefig(temporary, format="svg", metadata={"Date": None})
        plt.close(figure)
