"""Load: how many requests a pass asks for, how many were in flight, and at which concurrency speculation stops paying.

At concurrency N a pass is a closed loop: N requests are in flight, and the next one starts when one ends. Plain decoding
shares each read of the weights among the N sequences, so verifying K drafted tokens of every sequence costs more the
larger N is: rho grows with the load, and a drafter that pays for one user may cost for many.
"""

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

WAVES = 4
"""Requests of a pass for each one in flight, where the protocol does not say; the last of them run with fewer beside."""


def concurrency(protocol: Mapping[str, Any]) -> int:
    """Requests in flight at once; 1 where the protocol does not say."""
    return int(protocol.get("concurrency") or 1)


def requests(prompts: int, protocol: Mapping[str, Any]) -> int:
    """Requests of a pass: `requests` of the protocol, else each prompt equally often and WAVES per place at least.

    Single stream each prompt is asked once.
    """
    places = concurrency(protocol)
    if places == 1:
        return prompts
    return protocol.get("requests") or prompts * math.ceil(WAVES * places / max(prompts, 1))


def too_many(places: int, engine: ModuleType, flags: Mapping[str, Any]) -> str | None:
    """Why a server with these flags does not run so many requests at once, or None; a flag not given is no limit here."""
    flag = engine.CONCURRENCY_FLAG
    if places <= int(flags.get(flag) or places):
        return None
    return (
        f"{places} requests at once, but the server's {flag} is {flags[flag]} and the rest would wait; raise it in the flags, or"
        " lower the concurrency"
    )


def refuse(protocol: Mapping[str, Any], engine: ModuleType, flags: Mapping[str, Any]) -> str | None:
    """Why a protocol cannot be measured on a server with these flags, or None."""
    places, asked = concurrency(protocol), protocol.get("requests")
    if asked and places == 1:
        return (
            f"requests is {asked} without a concurrency above 1; single stream each prompt is asked once: leave it out"
        )
    if asked and asked < places:
        return f"requests is {asked}, fewer than the concurrency {places} that they should keep up; raise it"
    return too_many(places, engine, flags)


def in_flight(begins: Sequence[float], ends: Sequence[float], places: int) -> tuple[float, float]:
    """(seconds with a request in flight, seconds with `places` or more), from when each request began and ended."""
    busy = full = 0.0
    running, before = 0, 0.0
    for time, change in sorted([(t, 1) for t in begins] + [(t, -1) for t in ends]):
        busy += (time - before) * (running > 0)
        full += (time - before) * (running >= places)
        running, before = running + change, time
    return busy, full


class Crossing(NamedTuple):
    """Where speculation stops paying: a sentence, the two measured concurrencies around it, and the point between them."""

    sentence: str
    between: tuple[int, int] | None = None
    estimate: float | None = None


def crossing(points: Sequence[tuple[int, str, float | None]]) -> Crossing:
    """The crossing point of (concurrency, verdict, speed-up), by verdicts: faster pays, slower does not.

    The estimate is where log speed-up is 0 on the line between the two nearest measured points, over log concurrency.
    """
    points = sorted(points)
    judged = [point for point in points if point[1] in ("faster", "slower", "undecided")]
    found = _judged(judged)
    rest = [f"{n} ({label})" for n, label, _ in points if label not in ("faster", "slower", "undecided")]
    return found._replace(sentence=found.sentence + f"; not judged at {_words(rest)}") if rest else found


def _judged(points: Sequence[tuple[int, str, float]]) -> Crossing:
    at = {label: [n for n, verdict, _ in points if verdict == label] for label in ("faster", "slower", "undecided")}
    measured = _words([n for n, _, _ in points])
    if not points:
        return Crossing("there is no verdict at any concurrency")
    if len(at["faster"]) == len(points):
        return Crossing(f"speculation pays at all measured concurrencies ({measured})")
    if len(at["slower"]) == len(points):
        return Crossing(f"speculation pays at none of the measured concurrencies ({measured})")
    order = "".join(verdict[0] for _, verdict, _ in points)
    if at["faster"] and order.rstrip("s").rstrip("u").strip("f") == "":  # faster, undecided, slower, in this order
        last = at["faster"][-1]
        if not at["slower"]:
            return Crossing(
                f"speculation pays up to {last}, and is undecided at {_words(at['undecided'])} requests at once"
            )
        first, estimate = at["slower"][0], _zero([(n, ratio) for n, _, ratio in points])
        unsure = f"; undecided at {_words(at['undecided'])}" if at["undecided"] else ""
        return Crossing(
            f"speculation stops paying between {last} and {first} requests at once (interpolated: about"
            f" {estimate:.0f}){unsure}",
            (last, first),
            estimate,
        )
    parts = [f"{label} at {_words(ns)}" for label, ns in at.items() if ns]
    return Crossing(f"no crossing point: speculation is {', '.join(parts)} requests at once")


def _zero(points: Sequence[tuple[int, float]]) -> float:
    """Where the speed-up first falls to 1 between two points, interpolated in logs."""
    for (n, ratio), (next_n, next_ratio) in zip(points, points[1:], strict=False):
        if ratio > 1 >= next_ratio:
            share = math.log(ratio) / (math.log(ratio) - math.log(next_ratio))
            return math.exp(math.log(n) + share * (math.log(next_n) - math.log(n)))
    raise ValueError(f"the speed-up never falls to 1: {points}")


def _words(values: Sequence[Any]) -> str:
    """1, 8 and 32."""
    words = [str(value) for value in values]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
