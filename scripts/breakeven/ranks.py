"""Several processes that train one drafter, a GPU each: the only module that knows about ranks (torchrun).

Every rank takes its share of the batches of each optimizer step; rank 0 alone writes files and logs. Data parallel:
each rank holds the whole drafter and its optimizer, and gradients are summed over all ranks, so that weights stay
equal. Sharded (FSDP2): each rank keeps its part of every weight, of its gradient's sum and of the optimizer's state.
Weights are made whole for the batches of an optimizer step, all at once: the drafter is one layer, which a batch runs
several times as one compiled chain, so that hooks layer by layer would save little and communicate for every run.
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from breakeven.cli import UserError, logger

# Ranks wait for each other while one compiles a batch of a shape of its own.
TIMEOUT = timedelta(minutes=30)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    sharded: bool = False

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

    def shard(self, module: nn.Module) -> None:
        """If sharded, leave this rank its part of each parameter, cut along the first dimension."""
        if not self.sharded:
            return
        # Here and below, since they are slow to import and seldom needed.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(module.parameters()).device.type, (self.size,))
        fully_shard(module, mesh=mesh, reshard_after_forward=False)

    def gather(self, module: nn.Module) -> None:
        """Make the parameters whole, for forward and backward passes; until `release` or `sum_gradients`."""
        if self.sharded:
            module.unshard()

    def release(self, module: nn.Module) -> None:
        """Keep this rank's parts of the parameters alone."""
        if self.sharded:
            module.reshard()

    def sum_gradients(self, module: nn.Module, more: Tensor) -> Tensor:
        """Replace the gradients, all of one dtype, by their sums over all ranks; returns the sum of `more` [n], the same way.

        One reduction of one flat buffer, which the gradients are views of from then on; a missing gradient is zero.
        If sharded, each parameter is released and its gradient reduced to this rank's part, one after the other.
        """
        if self.size == 1:
            return more
        parameters = list(module.parameters())
        if self.sharded:
            self.release(module)
            for part, whole in zip(module.parameters(), parameters, strict=True):
                part.grad = scattered_sum(whole.grad, part)
                whole.grad = None
            return self.sum(more)
        parts = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters]
        flat = self.sum(torch.cat([*parts, more.to(parts[0].dtype)]))
        *parts, more = flat.split([*map(len, parts), len(more)])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        return more

    def full(self, x: Tensor) -> Tensor:
        """The whole of what may be sharded; all ranks ask for it together."""
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    def gathered(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors; if sharded, one by one to the CPU of the writer, and the others get nothing."""
        if not self.sharded:
            return tensors
        whole = {}
        for name, x in tensors.items():
            x = self.full(x)
            if self.writer:
                whole[name] = x.cpu()
        return whole

    def own_part(self, x: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor what this rank holds, if `like`, of the same shape, is sharded; else all of it."""
        if not hasattr(like, "full_tensor") or x.shape != like.shape:
            return x
        from torch.distributed.tensor import distribute_tensor

        part = distribute_tensor(x.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
        return part.clone()  # it is a view, which would keep the whole

    def all_write(self, due: bool) -> bool:
        """Whether this rank takes part in writing what the writer finds due: all that hold parts do, else it alone."""
        if not self.sharded:
            return self.writer and due
        answer = torch.tensor(int(due))  # on the CPU, so that nobody waits for a GPU
        dist.broadcast(answer, 0)
        return bool(answer)

    def wait(self) -> None:
        """Until all ranks have come here."""
        if self.size > 1:
            dist.barrier()


@torch.no_grad()
def scattered_sum(gradient: Tensor | None, like: Tensor) -> Tensor:
    """The sum over all ranks of a whole gradient, sharded as `like`; a missing one is zero."""
    from torch.distributed.tensor import DTensor, Partial

    if gradient is None:
        gradient = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    return DTensor.from_local(gradient, like.device_mesh, [Partial()]).redistribute(placements=like.placements)


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
def joined(device: str, sharded: bool = False) -> Iterator[tuple[Ranks, str]]:
    """(this process's rank, its device) for the length of a `with` block; without torchrun, alone.

    Under torchrun the process ends with the block, when all ranks have come to its end.

    device: cpu (gloo) or cuda (NCCL), of which each rank of a host takes its own GPU. UserError if there are too few.
    sharded: whether ranks keep parts of what they train; one rank keeps all.
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
    on_gpus = "cpu:gloo,cuda:nccl" if sharded else "nccl"  # see `all_write`
    dist.init_process_group(on_gpus if gpu else "gloo", timeout=TIMEOUT, device_id=gpu)
    size = dist.get_world_size()
    ranks = Ranks(dist.get_rank(), size, sharded and size > 1)
    if not ranks.writer:
        logger.setLevel(logging.WARNING)
    yield ranks, str(gpu or device)
    # Not after an error: it could wait for ranks that are gone, and torchrun for this one.
    ranks.wait()
    dist.destroy_process_group()
    # Threads of torch's may abort a process that Python tears down, and torchrun would call the training failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
