"""One module per engine, all with the same functions: see `vllm.py`, the first of them."""

import importlib
from dataclasses import dataclass, field
from importlib import metadata
from types import ModuleType
from typing import Any

from breakeven.cli import UserError

ENGINES = ("vllm",)


@dataclass
class Speculation:
    """How an arm speculates. method none: plain decoding, k 0. k: drafted tokens per verification step."""

    method: str = "none"
    k: int = 0
    drafter: str | None = None  # checkpoint folder
    options: dict[str, Any] = field(default_factory=dict)  # the engine's own further keys


@dataclass
class Counters:
    """Totals of a server since its start; differences of two readings are what a request did."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0  # draft tokens accepted, bonus tokens not counted
    accepted_per_position: list[int] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0

    def __sub__(self, other: "Counters") -> "Counters":
        before = other.accepted_per_position + [0] * len(self.accepted_per_position)
        return Counters(
            self.steps - other.steps,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
            [a - b for a, b in zip(self.accepted_per_position, before, strict=False)],
            self.completion_tokens - other.completion_tokens,
            self.prompt_tokens - other.prompt_tokens,
        )


@dataclass
class Reply:
    """What one request brought back, filled event by event."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    histogram: list[int] | None = None  # histogram[a]: verification steps that accepted a draft tokens
    drafted: int | None = None


def engine(name: str) -> ModuleType:
    """The module of an engine; an unknown name is a UserError."""
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is unknown; use one of {', '.join(ENGINES)}")
    return importlib.import_module(f"breakeven.engines.{name}")


def versions(name: str) -> dict[str, str]:
    """Versions of an engine and of torch, as installed in the running interpreter."""
    found = {}
    for label, distributions in {name: engine(name).DISTRIBUTIONS, "torch": ("torch",)}.items():
        for distribution in distributions:
            try:
                found[label] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found
