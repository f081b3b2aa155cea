"""One module per engine, all with the same functions: see `vllm.py`, the first of them. `endpoint.py` only generates."""

import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from breakeven.cli import UserError

ENGINES = ("vllm", "sglang")
GENERATORS = (*ENGINES, "endpoint")  # what can generate responses


@dataclass
class Speculation:
    """How an arm speculates. method none: plain decoding, k 0. k: drafted tokens per verification step."""

    method: str = "none"
    k: int = 0
    drafter: str | None = None  # checkpoint folder
    options: dict[str, Any] = field(default_factory=dict)  # the engine's own further keys


def method(arm: dict[str, Any]) -> str:
    """How an arm of the config speculates: its `method`, else eagle3 where it names a drafter, else none."""
    return arm.get("method") or ("eagle3" if arm.get("drafter") else "none")


def speculation_of(arm: dict[str, Any], drafter: str | None) -> Speculation:
    """The Speculation of an arm of the config, with `drafter` as its checkpoint folder."""
    return Speculation(method(arm), arm.get("k") or 0, drafter, arm.get("options") or {})


@dataclass
class Counters:
    """Totals of a server since its start; differences of two readings are what a request did.

    None: this engine's counters do not say, and each request's own metrics must.
    """

    steps: int | None = 0
    drafted: int | None = 0
    accepted: int | None = 0  # draft tokens accepted, bonus tokens not counted
    accepted_per_position: list[int] | None = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    decode_s: float = 0.0  # seconds from first to last token, summed over finished requests; 0 where not counted
    preempted: int = 0  # requests that lost their place in the cache and were read again; 0 where not counted

    def __sub__(self, other: "Counters") -> "Counters":
        per_position = None
        if self.accepted_per_position is not None:
            before = (other.accepted_per_position or []) + [0] * len(self.accepted_per_position)
            per_position = [a - b for a, b in zip(self.accepted_per_position, before, strict=False)]
        return Counters(
            None if self.steps is None else self.steps - (other.steps or 0),
            None if self.drafted is None else self.drafted - (other.drafted or 0),
            None if self.accepted is None else self.accepted - (other.accepted or 0),
            per_position,
            self.completion_tokens - other.completion_tokens,
            self.prompt_tokens - other.prompt_tokens,
            self.decode_s - other.decode_s,
            self.preempted - other.preempted,
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


def samples(text: str, prefix: str, served_name: str) -> Iterator[tuple[str, str, float]]:
    """(name, labels, value) of each sample of one served model in a text of /metrics, `prefix:` taken off the name."""
    for line in text.splitlines():
        found = re.match(rf"{prefix}:(\w+)\{{(.*)\}} (\S+)$", line)
        if found and f'model_name="{served_name}"' in found[2]:
            value = sample_value(found[1], found[3])
            if value is not None:
                yield found[1], found[2], value


def sample_value(name: str, text: str) -> float | None:
    """The value of a Prometheus sample; None for a gauge that has none. A text that is no number, and a counter that is
    not finite, are a UserError."""
    try:
        value = float(text)
    except ValueError:
        value = None
    if value is None or (not math.isfinite(value) and name.endswith(("_total", "_sum", "_count"))):
        raise UserError(f"the server's metrics say {name} is {text[:40]!r}, which is no number; read /metrics again")
    return value if math.isfinite(value) else None


def engine(name: str) -> ModuleType:
    """The module of an engine, or of the endpoint; an unknown name is a UserError."""
    if name not in GENERATORS:
        raise UserError(f"engine {name!r} is unknown; use one of {', '.join(GENERATORS)}")
    return importlib.import_module(f"breakeven.engines.{name}")


# The spellings of both engines, as options and as arguments.
TENSOR_PARALLEL = ("tensor-parallel-size", "tensor_parallel_size", "tp-size", "tp_size", "tp")
# What the workflow itself tells a server: where it listens, what it serves, and to which key.
RESERVED = ("host", "port", "model", "model-path", "served-model-name", "config", "api-key")
# What a request leaves out vLLM's server takes from the model's generation_config.json; offline generation does not.
NEUTRAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": -1,  # all tokens; SGLang refuses 0
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def tensor_parallel(settings: dict[str, Any]) -> int:
    """How many GPUs an engine with these flags or arguments spreads the target over; False leaves a flag out."""
    return next((int(settings[name]) for name in TENSOR_PARALLEL if settings.get(name, False) is not False), 1)


def prepare(module: ModuleType, hardware: str, environment: dict[str, str]) -> None:
    """Put an engine's environment variables in force in this process, before the engine is imported."""
    variables = module.environment(hardware) | environment
    os.environ.update(variables)
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]


def options(flags: dict[str, Any]) -> list[str]:
    """Long options of a command line: True gives a bare switch, False leaves it out, other values are JSON or text."""
    words = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words


def require_key(key: str, folder: Path) -> list[str]:
    """Further words of the command line of a server that answers only to `key`, which is not in them.

    In a file in `folder`, which only this user reads: every user of a machine can read the words of a command line, SGLang
    takes no key from the environment, and vLLM before 0.32 compiles anew for each VLLM_API_KEY. /health and /metrics stay
    open.
    """
    file = folder / "key.yaml"
    file.write_text(f"api-key: {json.dumps(key)}\n")  # quoted, else a key of digits alone is read as a number
    return ["--config", str(file)]


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


def facts(python: str, name: str) -> dict[str, Any]:
    """Versions and optional flags of the engine in another interpreter, without importing the engine."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from breakeven import engines;"
        f"print(json.dumps({{'versions': engines.versions({name!r}), 'optional_flags':"
        f" sorted(engines.engine({name!r}).optional_flags())}}))"
    )
    done = subprocess.run([python, "-c", code, str(Path(__file__).parents[2])], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{python} cannot be used for {name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)
