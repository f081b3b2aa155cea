"""Why the speed-up of an arm is undecided, and what to do about it."""

import math
from collections.abc import Mapping
from typing import Any

from breakeven import refusals
from breakeven.arms import Arm
from breakeven.stats import Speedup

MORE = "more prompts, or max_passes in the protocol"
REASONS = {
    "apart": (
        "it was measured apart from its baseline, and the machine's speed may have changed meanwhile",
        "measure it and its baseline again, interleaved: delete results/benchmarks/{arm} and results/benchmarks/{baseline}",
    ),
    "few-prompts": ("there are too few prompts for an interval", "more prompts in the protocol"),
    "single-pass": (
        "it or its baseline ran a single pass, which does not show how much passes differ",
        "more passes in the protocol, three or more",
    ),
    "noise": ("the difference from plain decoding is within the noise of this measurement", MORE),
}
"""(why, what to do) by `undecided_because` of an arm's details; the first that applies counts."""


def because(arm: Arm, baseline: Arm, speedup: Speedup) -> str:
    """The key of REASONS for an undecided arm."""
    if refusals.apart(arm, baseline):
        return "apart"
    if not math.isfinite(speedup.high):
        return "few-prompts"
    return "single-pass" if min(len(arm.manifests), len(baseline.manifests)) == 1 else "noise"


def explained(row: Mapping[str, Any], details: Mapping[str, Any]) -> tuple[str, str]:
    """(why, what to do) of an undecided row of the summary; comparisons of former versions do not hold why."""
    why, remedy = REASONS.get(details.get("undecided_because"), ("this measurement does not decide it", MORE))
    return why, remedy.format(**row)
