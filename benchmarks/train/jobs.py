"""What every racer is given: the drafter to start from, the batches, a watch; and how the useful work is counted."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from breakeven import speed, training
from breakeven.drafter import DrafterConfig


def plan(sequences, chosen: list[int], tokens: int, batch_tokens: int, seed: int) -> list[list[int]]:
    """The batches of a training run of `tokens` tokens: epoch after epoch as training.Run has them, cut off there."""
    lengths = [sequences.length(i) for i in range(len(sequences))]
    batches, epoch, total = [], 0, 0
    while True:
        for batch in training.epoch_batches(lengths, chosen, batch_tokens, seed, epoch):
            batches.append(batch)
            total += sum(lengths[i] for i in batch)
            if total >= tokens:
                return batches
        epoch += 1


def useful_flops(config: DrafterConfig, steps: int, length: int, response: int) -> float:
    """speed.training_flops of one sequence: a prompt of length - response tokens, then the response."""
    rows = min(response, length - 2)  # row p predicts x[p+2]
    pairs = sum(max(rows - step, 0) for step in range(steps))
    keys = sum(range(length - 1 - rows, length - 1))  # row p sees keys 0 ... p; the last row is length - 3
    return speed.training_flops(config, steps, length, rows, pairs, keys)


class Watch:
    """Tokens per second after the first `skip` steps, with the device waited for at both ends; peak memory.

    `with watch:` around the training; a step that ends later than `limit` seconds after its start ends it.
    """

    def __init__(self, device: str, cost: Callable[[list[int]], tuple[int, float]], skip: int, limit: float):
        self.device, self.cost, self.skip, self.limit = device, cost, skip, limit
        self.cuda = device.startswith("cuda")
        self.steps = self.tokens = self.timed = 0
        self.flops, self.seconds = 0.0, None
        self.begun = self.since = 0.0

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def __enter__(self) -> "Watch":
        self.wait()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.begun = time.monotonic()
        return self

    def step(self, batch: list[int]) -> None:
        """Count an optimizer step on the sequences of `batch`."""
        tokens, flops = self.cost(batch)
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        if self.steps == self.skip:
            self.wait()
            self.since = time.monotonic()
        elif self.steps > self.skip:
            self.timed, self.flops = self.timed + tokens, self.flops + flops
        if time.monotonic() - self.begun > self.limit:
            raise TimeoutError

    def __exit__(self, kind, *_) -> bool:
        self.wait()
        self.wall = time.monotonic() - self.begun
        self.seconds = time.monotonic() - self.since if self.steps > self.skip else None
        # Read here: exporting a checkpoint may take more.
        self.memory = torch.cuda.max_memory_allocated() if self.cuda else None
        self.finished = kind is None
        return kind is TimeoutError

    def report(self, peak: float | None) -> dict[str, Any]:
        rate = self.timed / self.seconds if self.seconds else None
        return {
            "steps": self.steps,
            "tokens": self.tokens,
            "tokens_per_second": rate,
            "mfu": self.flops / self.seconds / peak if self.seconds and peak else None,
            "peak_memory_bytes": self.memory,
            "seconds": self.tokens / rate if rate else None,  # at that rate: compilation is not counted
            "wall_seconds": self.wall,
            "finished": self.finished,  # false: stopped by the limit, in the middle of its learning-rate schedule
        }


@dataclass
class Job:
    """One training run of one racer.

    start: the drafter's tensors before training, float32. embeddings and head [V, H], norm [H]: the target's. d2t [D]
    int64 and t2d [V] bool: the draft vocabulary. plan: batches, as numbers of sequences; settings.batch_tokens tokens
    each at most. folder: where it may write; exported: the checkpoint folder it leaves, if `export`.
    """

    config: DrafterConfig
    start: dict[str, Tensor]
    embeddings: Tensor
    head: Tensor
    norm: Tensor
    d2t: Tensor
    t2d: Tensor
    open_sequences: Callable[[], Any]
    plan: list[list[int]]
    settings: training.Settings
    device: str
    watch: Watch
    folder: Path
    target: Path | None  # the target's folder; None on random data
    export: bool
    options: dict[str, Any] = field(default_factory=dict)
    exported: Path | None = None
