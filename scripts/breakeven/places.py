"""Acceptance by place in the output: does a drafter hold up beyond the length of the responses it was trained on?

An acceptance length over whole outputs hides a drafter that fails late: its positions, or what the target writes there,
were never trained. A step's place is the number of output tokens that stand before its drafts.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from breakeven import acceptance, artefacts

EDGES = (0, 128, 512, 2048, 8192, 32768)
MINIMUM_STEPS = 50
"""Beyond the trained length; with fewer steps nothing is said about it."""
SMALLEST_FALL = 0.1
"""Of the acceptance length; a smaller one is not worth a warning: texts, too, change along their way."""
LEVEL = 0.001
"""Of the test: the steps of one output are not independent of each other, as it takes them to be."""


def longest_trained(checkpoint: Path | str) -> int | None:
    """Tokens of the longest response that a drafter of this workflow was trained on; None where nobody wrote it down."""
    manifest = Path(checkpoint) / "manifest.json"
    if not manifest.is_file():
        return None
    return artefacts.read_manifest(manifest, "drafter")["counts"].get("longest_response")


def table(walks: Iterable[Sequence[int]], k: int, trained: int | None) -> list[dict[str, Any]]:
    """One entry for each range of places that has a step.

    walks: for each output the accepted draft tokens of every step, as walk.walk gives them: the first step drafts behind
    one token, each other behind what the ones before yielded. trained: a further edge between ranges.
    Keys: k, first and end (places, end excluded and None in the last range), trained, histogram (steps by accepted
    tokens 0 ... K), steps, acceptance_length, low, high (95 %, steps taken as independent).
    """
    edges = sorted({*EDGES, *([trained] if trained else [])})
    histograms = np.zeros((len(edges), k + 1), dtype=np.int64)
    for steps in walks:
        accepted = np.asarray(steps, dtype=np.int64)
        before = 1 + np.concatenate([[0], np.cumsum(accepted + 1)[:-1]]) if len(accepted) else accepted
        np.add.at(histograms, (np.searchsorted(edges, before, side="right") - 1, accepted), 1)
    rows = []
    for first, end, histogram in zip(edges, [*edges[1:], None], histograms, strict=True):
        if not histogram.any():
            continue
        mean, error = _mean(histogram)
        half = NormalDist().inv_cdf(0.975) * error
        rows.append(
            {
                "k": k,
                "first": first,
                "end": end,
                "trained": trained,
                "histogram": histogram.tolist(),
                "steps": int(histogram.sum()),
                "acceptance_length": 1 + mean,
                "low": max(1.0, 1 + mean - half),
                "high": min(k + 1.0, 1 + mean + half),
            }
        )
    return rows


def fall(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The sentence about an acceptance length that is clearly lower beyond the trained length; None if there is none."""
    trained = rows[0]["trained"] if rows else None
    if not trained:
        return None
    within = [row["histogram"] for row in rows if row["first"] < trained]
    beyond = [row["histogram"] for row in rows if row["first"] >= trained]
    if not within or not beyond:
        return None
    steps = int(np.sum(beyond))
    (inside, error), (outside, its_error) = (_mean(np.sum(side, axis=0)) for side in (within, beyond))
    lost = (inside - outside) / (1 + inside)
    needed = NormalDist().inv_cdf(1 - LEVEL) * np.hypot(error, its_error)
    if steps < MINIMUM_STEPS or lost < SMALLEST_FALL or inside - outside <= needed:
        return None
    return (
        f"acceptance length falls from {1 + inside:.2f} to {1 + outside:.2f} beyond output token {trained}, the longest"
        f" response that the drafter was trained on ({steps} steps there); train on longer responses"
        " (responses.sampling.max_tokens) or expect less from long outputs"
    )


def _mean(histogram: Sequence[int]) -> tuple[float, float]:
    """Mean accepted tokens of a step and its standard error."""
    steps, per_position = acceptance.from_histogram(histogram)
    mean = per_position.sum() / steps
    values = np.arange(len(histogram))
    return float(mean), float(np.sqrt(np.dot(histogram, (values - mean) ** 2) / max(steps - 1, 1) / steps))
