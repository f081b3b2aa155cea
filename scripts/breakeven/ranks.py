"""Several processes that train one drafter, a GPU each: the only module that knows about ranks (torchrun, data parallel).

Every rank holds the whole drafter and its optimizer and takes its share of the batches of each optimizer step. Gradients
are summed over all ranks, so that weights stay equal; rank 0 alone writes files and logs.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from breakeven.cli import UserError, logger

# Ranks wait for each other while one compiles a batch of a shape of its own.
TIMEOUT = timedelta(minutes=30)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1

    @property
    def writer(self) -> bool:
        return self.rank == 0

    def own(self, items: list[Any]) -> list[Any]:
        """This rank's share of items that all ranks know in the same order: every `size`-th."""
        return items[self.rank :: self.size]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sum_gradients(self, parameters: Iterable[Tensor], more: Tensor) -> Tensor:
        """Replace the gradients, all of one dtype, by their sums over all ranks; returns the sum of `more` [n], the same way.

        One reduction of one flat buffer, which the gradients are views of from then on; a missing gradient is zero.
        """
        if self.size == 1:
            return more
        parameters = list(parameters)
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters]
        flat = self.sum(torch.cat([*parts, more.to(parts[0].dtype)]))
        *parts, more = flat.split([*map(len, parts), len(more)])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return more

    def wait(self) -> None:
        """Until all ranks have come here."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


def torchrun(count: int) -> list[str]:
    """The command of torchrun on this host, behind which a script and its options stand."""
    # By address: a machine may have no name that resolves.
    where = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={count}"]
    return [sys.executable, "-m", "torch.distributed.run", *where]


def launch(count: int) -> None:
    """Run this very command in `count` ranks, by torchrun, in place of this process; with one, or in a rank, go on."""
    if count > 1 and "RANK" not in os.environ:
        os.execv(sys.executable, [*torchrun(count), *sys.argv])


@contextlib.contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, str]]:
    """(this process's rank, its device) for the length of a `with` block; without torchrun, alone.

    device: cpu (gloo) or cuda (NCCL), of which each rank of a host takes its own GPU. UserError if there are too few.
    """
    if "RANK" not in os.environ:
        yield ALONE, device
        return
    # A rank that outlived a killed torchrun would train on, and write, beside the next attempt.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gpu = None
    if device.startswith("cuda"):
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise UserError(
                f"{os.environ['LOCAL_WORLD_SIZE']} ranks, but only {there} GPUs are to be seen; start fewer"
            )
        gpu = torch.device("cuda", local)
        torch.cuda.set_device(gpu)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=TIMEOUT, device_id=gpu)
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    if not ranks.writer:
        logger.setLevel(logging.WARNING)
    yield ranks, str(gpu or device)
    # Not after an error: it could wait for ranks that are gone, and torchrun for this one.
    dist.destroy_process_group()
