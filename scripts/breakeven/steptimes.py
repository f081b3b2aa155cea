"""How long a step takes with and without speculation, measured before any data exists.

A random drafter of the right shape is served with K = 1, 2, ... drafted tokens, and the target alone before and after.
Hardly any draft is accepted, so the acceptance length is 1 (it is measured, not assumed), and the time of a step is
what speculation costs. Prompts are token ids drawn from the target's vocabulary: what a step costs does not depend on
what is said. The formulas that follow from rho(K) are in stepcost.py.

The unit is a round: b requests at once, which run in lock-step, each for max_tokens. The time of a step in a round is

    (seconds from the first to the last token, summed over its requests) / (steps, summed over its requests)

where a request without speculation takes tokens - 1 steps. The seconds are the server's own where the engine counts
them, else the client's.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from breakeven import load, stats, stepcost
from breakeven.benchmark import Client, check_preempted
from breakeven.cli import Progress, UserError

ROUNDS = stats.MINIMUM_PROMPTS  # at each concurrency: what an interval over them needs
PROMPT_TOKENS = 32
EXAMPLES = (0.5, 0.6, 0.7, 0.8, 0.9)  # conditional acceptances that the best K is shown for


@dataclass
class Settings:
    """What is measured; every field is a config key of `stepcost`."""

    ks: list[int] = field(default_factory=lambda: [1, 2, 3, 5])
    concurrency: list[int] = field(default_factory=lambda: [1, 4])
    passes: int = 1  # how often each server is asked all rounds
    max_tokens: int = 32
    synthetic_acceptance_length: float | None = None  # force this AL as a cross-check, where the engine can


@dataclass
class Round:
    """One round: seconds and steps summed over its requests, and what was accepted."""

    seconds: float
    steps: int
    accepted: int
    requests: int

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def check(engine: ModuleType, settings: Settings, flags: dict[str, Any], hardware: str) -> None:
    """Refuse, before any server starts, what could not be measured."""
    reason = load.too_many(max(settings.concurrency), engine, flags)
    if reason:
        raise UserError(f"stepcost.concurrency: {reason}")
    if settings.synthetic_acceptance_length and hardware not in engine.FORCES_ACCEPTANCE_ON:
        raise UserError(
            f"stepcost.synthetic_acceptance_length: {engine.NAME} can force an acceptance length on"
            f" {' and '.join(engine.FORCES_ACCEPTANCE_ON)} only; set it to null"
        )


def prompts(vocab_size: int, count: int, seed: int = 0) -> list[list[int]]:
    """Fixed random token ids; the lowest ids, where special tokens lie, are left out."""
    draw = random.Random(seed)
    lowest = min(256, vocab_size // 2)
    return [[draw.randrange(lowest, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def measure(
    client: Callable[[], Client], vocab_size: int, settings: Settings, k: int
) -> dict[tuple[int, int], list[Round]]:
    """Rounds by (concurrency, pass) of one running server that drafts k tokens (0: none); `client` makes a client of it."""
    sampling = {"max_tokens": settings.max_tokens, "temperature": 0, "seed": 0, "ignore_eos": True}
    clients = [client() for _ in range(max(settings.concurrency))]
    asked = prompts(vocab_size, ROUNDS * max(settings.concurrency))
    rounds: dict[tuple[int, int], list[Round]] = {}
    total = len(settings.concurrency) * (settings.passes * ROUNDS + 1)
    with (
        ThreadPoolExecutor(len(clients)) as pool,
        Progress(total, "rounds", f"K={k}" if k else "plain", every=60) as progress,
    ):
        for b in settings.concurrency:
            # The first round at each concurrency allocates and compiles, and is not counted.
            _round(clients[:b], pool, prompts(vocab_size, b, seed=1), sampling, k)
            progress.add(1)
            for number in range(1, settings.passes + 1):
                rounds[b, number] = []
                for i in range(ROUNDS):
                    measured = _round(clients[:b], pool, asked[i * b : (i + 1) * b], sampling, k)
                    rounds[b, number].append(measured)
                    progress.add(1, f"{b} at once, {1000 * measured.step_s:.1f} ms a step")
    return rounds


def _round(
    clients: list[Client], pool: ThreadPoolExecutor, asked: list[list[int]], sampling: dict[str, Any], k: int
) -> Round:
    before = clients[0].counters()
    replies = list(pool.map(lambda client, prompt: client.stream(prompt, sampling), clients, asked))
    tokens = sum(len(reply.token_ids) for reply, _, _ in replies)
    delta = clients[0].settled_counters(before.completion_tokens + tokens) - before
    if delta.completion_tokens != tokens:
        raise UserError(
            f"{tokens} tokens arrived, the server counted {delta.completion_tokens}; is something else using this server?"
        )
    check_preempted(delta, len(clients), clients[0].engine)
    seconds = delta.decode_s or sum(last - first for _, first, last in replies)
    steps, accepted = (delta.steps, delta.accepted) if k else (tokens - len(replies), 0)
    if accepted is None:  # an engine that reports it of each request instead
        histograms = [reply.histogram for reply, _, _ in replies]
        if None in histograms:
            raise UserError("the server reports no acceptance, neither in its counters nor per request")
        steps = sum(map(sum, histograms)) if steps is None else steps
        accepted = sum(a * n for histogram in histograms for a, n in enumerate(histogram))
    if not steps:
        raise UserError("the server reports no verification step; is speculation on? See the server log")
    return Round(seconds, steps, accepted, len(replies))


def rows(
    engine: str, by_k: dict[int, dict[tuple[int, int], list[Round]]], plain: list[dict[tuple[int, int], list[Round]]]
) -> list[dict[str, Any]]:
    """Rows of tables.STEP_COST: one for each K, concurrency and pass.

    plain: the servers without speculation, before and after. Round i of a K is paired with round i of each of them,
    which had the same prompts; rho is the geometric mean over rounds and over the plain servers. Its interval joins the
    95 % intervals over rounds against each plain server, so it covers the machine's drift as far as the two show it.
    """
    found = []
    for k, of_k in sorted(by_k.items()):
        for (b, number), rounds in of_k.items():
            mine = np.log([r.step_s for r in rounds])
            theirs = np.log([[r.step_s for r in server[b, number]] for server in plain])
            step_low, step_high = stats.bootstrap_interval(mine)
            low, high = stats.bootstrap_interval(mine - theirs)
            steps = sum(r.steps for r in rounds)
            found.append(
                {
                    "engine": engine,
                    "k": k,
                    "concurrency": b,
                    "repeat": number,
                    "step_s": float(np.exp(mine.mean())),
                    "step_low": float(np.exp(step_low)),
                    "step_high": float(np.exp(step_high)),
                    "plain_step_s": float(np.exp(theirs.mean())),
                    "rho": float(np.exp((mine - theirs).mean())),
                    "rho_low": float(np.exp(low.min())),
                    "rho_high": float(np.exp(high.max())),
                    "acceptance_length": 1 + sum(r.accepted for r in rounds) / steps,
                    "steps": steps,
                    "requests": sum(r.requests for r in rounds),
                }
            )
    return found


def drift(plain: list[dict[tuple[int, int], list[Round]]]) -> dict[str, float]:
    """Step time of the plain server after, over that before, by concurrency: what the same server differs by (A/A)."""
    levels = [
        {b: np.mean([math.log(r.step_s) for (c, _), rounds in server.items() if c == b for r in rounds])
         for b in sorted({b for b, _ in server})}
        for server in plain
    ]  # fmt: skip
    return {str(b): round(math.exp(levels[-1][b] - levels[0][b]), 4) for b in levels[0]}


def cross_check(
    table: list[dict[str, Any]],
    forced: dict[int, dict[tuple[int, int], list[Round]]],
    plain: list[dict[tuple[int, int], list[Round]]],
    length: float,
) -> list[dict[str, Any]]:
    """Speed-up with a forced acceptance length, measured, beside what AL / rho of the random drafter predicts.

    Both are for the AL that was reached. They differ where a step costs more when drafts are accepted.
    """
    found = []
    for row in rows("", forced, plain):
        same = [r["rho"] for r in table if (r["k"], r["concurrency"]) == (row["k"], row["concurrency"])]
        rho = math.exp(np.mean(np.log(same)))
        found.append(
            {key: row[key] for key in ("k", "concurrency", "repeat")}
            | {
                "forced": length,
                "acceptance_length": round(row["acceptance_length"], 4),
                "measured_speedup": round(row["acceptance_length"] / row["rho"], 4),
                "predicted_speedup": round(stepcost.predicted_speedup(row["acceptance_length"], rho), 4),
            }
        )
    return found


def summary(table: list[dict[str, Any]], curve: Sequence[float] | None = None) -> str:
    """What the step cost means, as text for a terminal: rows of tables.STEP_COST, one block for each concurrency.

    curve: marginal acceptance per position, if a drafter's is known.
    """
    blocks = [_block(table, b, curve) for b in sorted({row["concurrency"] for row in table})]
    return "\n\n".join([*blocks, LEGEND]) + "\n"


LEGEND = """\
break-even AL   tokens per verification step (bonus included) at which speculation is as fast as plain decoding: rho
needed          acceptance of each position, given the one before, that gives this AL; "never": even 1.00 falls short
ceiling         (K + 1) / rho, the speed-up that no drafter exceeds"""


def _block(table: list[dict[str, Any]], b: int, curve: Sequence[float] | None) -> str:
    mine = [row for row in table if row["concurrency"] == b]
    cost = stepcost.StepCost([(row["k"], row["rho"]) for row in mine], "step cost")
    engine, plain = mine[0]["engine"], math.exp(np.mean([math.log(row["plain_step_s"]) for row in mine]))
    at_once = "one request" if b == 1 else f"{b} requests at once"
    lines = [
        f"{engine}, {at_once}: a step without speculation takes {1000 * plain:.1f} ms",
        "",
        " K   step ms   break-even AL (95 %)   needed   ceiling   AL measured",
    ]
    for k, same in itertools.groupby(mine, key=lambda row: row["k"]):
        same = list(same)
        rho = cost.at(k)
        needed = stepcost.needed_conditional(rho, k)
        low, high = min(row["rho_low"] for row in same), max(row["rho_high"] for row in same)
        lines.append(
            f"{k:2d}   {1000 * plain * rho:7.1f}   {rho:6.2f} ({low:.2f} to {high:.2f})"
            f"   {'never' if needed is None else format(needed, '6.2f'):>6}   {stepcost.ceiling(k, rho):6.2f}x"
            f"   {np.mean([row['acceptance_length'] for row in same]):11.3f}"
        )
    if cost.line is not None:
        lines += ["", f"rho(K) = {cost.line.a:.3f} + {cost.line.b:.3f} K{_fit_interval(cost)}"]
    lines += ["", "acceptance of each position   best K   AL   speed-up"]
    rho = cost.known(max([stepcost.DEEPEST, *cost.measured]))
    for c in EXAMPLES:
        lines.append(_best(f"{c:.2f} throughout", [c**i for i in range(1, max(rho) + 1)], rho, cost))
    if curve is not None:
        lines.append(_best("the given curve", curve, rho, cost))
    return "\n".join(lines)


def _fit_interval(cost: stepcost.StepCost) -> str:
    """The line's 95 % interval at the deepest K that was measured, where there are enough points for one."""
    deepest = max(cost.measured)
    low, high = cost.line.interval(deepest)
    return f"; at K = {deepest} {low:.2f} to {high:.2f} (95 %)" if math.isfinite(low) else ""


def _best(label: str, marginal: Sequence[float], rho: dict[int, float], cost: stepcost.StepCost) -> str:
    best = stepcost.best_k(marginal, rho)
    if best.k == 0:
        return f"{label:<29} none: plain decoding is faster"
    fitted = "" if best.k in cost.measured else "   (step time from the fit)"
    return f"{label:<29} {best.k:6d}   {best.length:.2f}   {best.speedup:.2f}x{fitted}"
