"""A shard of hidden states that is filled while the target reads the prompts, in the format of hidden_states.py.

The lengths of all sequences are known before, so the file is made at its full size, and the process that holds the target
writes rows where they belong: nothing is held in memory and nothing is written twice. Beside it lies
FILE.rows, which counts what has been written of each sequence.
"""

import contextlib
import json
import math
import mmap
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from breakeven import headers, hidden_states, target
from breakeven.cli import Progress, UserError

NAMES = {
    torch.bool: "BOOL", torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float32: "F32",
    torch.bfloat16: "BF16",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in NAMES.items()}
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
WAITING = 4  # steps whose hidden states may wait for the disk, in pinned memory
PATIENCE_S = 60.0  # without a further row, after the engine is done, before rows count as lost


def layout(tokens: int, sequences: int, features: int, hidden_size: int, codec: str) -> Layout:
    """Dtype and shape of every tensor of a shard."""
    made: Layout = {
        "token_ids": (torch.int32, (tokens,)),
        "loss_mask": (torch.bool, (tokens,)),
        "cu_seqlens": (torch.int64, (sequences + 1,)),
        "held_out": (torch.bool, (sequences,)),
        "temperature": (torch.float32, (sequences,)),
        "conversation": (torch.int64, (sequences,)),
        "argmax": (torch.int32, (tokens,)),
    }
    for name, shape in {"hidden": (tokens, features), "last": (tokens,)}.items():
        made[name] = (torch.bfloat16 if codec == "bfloat16" else torch.int8, (*shape, hidden_size))
        if codec == "int8":
            made[f"{name}_scale"] = (torch.float32, shape)
    return made


def create(path: Path, tensors: Layout) -> None:
    """Make a safetensors file of zeros. Its space is taken now: a full disk is an OSError here, not a crash later."""
    header, end = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        size = dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)


def open_writable(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory; what is written to them is in the file."""
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    return {
        name: torch.frombuffer(mapped, dtype=DTYPES[x.dtype], count=math.prod(x.shape), offset=x.start).view(x.shape)
        for name, x in headers.read_header(path).items()
    }


def rows_path(path: Path | str) -> Path:
    return Path(f"{path}.rows")


def check_rows(path: Path, cu_seqlens: Tensor) -> None:
    """Wait until every sequence has all its rows; a UserError names the first that lacks some when none come any more."""
    rows, lengths = open_writable(rows_path(path))["rows"], cu_seqlens.diff()
    seen, since = -1, time.monotonic()
    while not torch.equal(rows, lengths):
        if int(rows.sum()) != seen:
            seen, since = int(rows.sum()), time.monotonic()
        if time.monotonic() - since > PATIENCE_S:
            i = int((rows != lengths).nonzero()[0, 0])
            raise UserError(
                f"the engine gave hidden states of {int(rows[i])} of the {int(lengths[i])} tokens of sequence {i}; see its log"
            )
        time.sleep(0.05)


@contextlib.contextmanager
def new(
    path: Path, prompts: list[list[int]], responses: list[list[int]], features: int, hidden_size: int, codec: str
) -> Iterator[dict[str, Tensor]]:
    """A new shard of these sequences, its tokens filled, for a Writer to fill its rows in a `with` block; yields its tensors,
    mapped. Every sequence has all its rows at the end, else a UserError names one that lacks some."""
    total = sum(map(len, prompts)) + sum(map(len, responses))
    create(path, layout(total, len(prompts), features, hidden_size, codec))
    create(rows_path(path), {"rows": (torch.int64, (len(prompts),))})
    try:
        tensors = open_writable(path)
        hidden_states.fill_tokens(tensors, prompts, responses)
        yield tensors
        check_rows(path, tensors["cu_seqlens"])
    finally:
        rows_path(path).unlink(missing_ok=True)


def extract(
    engine: ModuleType,
    folder: Path,
    layers: list[int],
    prompts: list[list[int]],
    responses: list[list[int]],
    path: Path,
    codec: str,
    settings: dict[str, Any],
) -> dict[str, Tensor]:
    """Let an engine run the target in `folder` and fill a new shard at `path`; returns its tensors, mapped.

    All but argmax and what hidden_states.about_sequences gives is filled.
    """
    config = target.text_config(folder)
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    with new(path, prompts, responses, len(layers), config["hidden_size"], codec) as tensors:
        with Progress(sum(map(len, sequences)), "tok", "hidden states") as progress:
            for i, *_ in engine.extract(str(folder), sequences, path, layers, config, settings):
                progress.add(len(sequences[i]))
    return tensors


def extract_here(
    capture: hidden_states.Capture,
    prompts: list[list[int]],
    responses: list[list[int]],
    path: Path,
    codec: str,
    budget: int,
    device: str,
) -> dict[str, Tensor]:
    """Run the target with transformers, in batches of `budget` tokens, and fill a new shard at `path`; returns its tensors,
    mapped. All but what hidden_states.about_sequences gives is filled. Memory holds some sequences, never the shard."""
    hidden_size = capture.model.config.get_text_config().hidden_size
    with new(path, prompts, responses, len(capture.layers), hidden_size, codec) as tensors:
        starts, argmax = tensors["cu_seqlens"].tolist(), tensors["argmax"].fill_(-1)
        with contextlib.closing(Writer(path)) as writer:
            for found in hidden_states.passes(capture, prompts, responses, budget, device):
                states = torch.cat([found.features, found.last[:, None]], 1)
                writer.add([(found.number, 0, len(states))], states)
                end = starts[found.number + 1]
                argmax[end - len(found.greedy) : end] = found.greedy.cpu()
    return tensors


@torch.inference_mode()
def fill_argmax(
    tensors: dict[str, Tensor], norm: Tensor, head: Tensor, eps: float, device: str, rows: int = 2048
) -> None:
    """Write the target's greedy next tokens, from the stored `last`: at the last prompt token and all response tokens.

    norm [H], head [V, H]. The arithmetic is that of transformers' RMSNorm and head.
    """
    norm, head, argmax = norm.to(device), head.to(device), tensors["argmax"].fill_(-1)
    responses = tensors["loss_mask"]
    after = responses | torch.nn.functional.pad(responses[1:], (0, 1))
    for at in after.nonzero()[:, 0].split(rows):
        scale = tensors["last_scale"][at] if "last_scale" in tensors else None
        last = hidden_states.decode(tensors["last"][at], scale).to(device).float()
        normed = last * torch.rsqrt(last.square().mean(-1, keepdim=True) + eps)
        argmax[at] = (norm * normed.to(norm.dtype) @ head.T).argmax(-1).int().cpu()


class Writer:
    """Puts hidden states into a shard's rows, in the process that holds the target.

    The captured layers come in ascending order: the shard's features first, the last layer's output, pre-norm, at the end
    (where it is a feature too, it comes once). On a GPU the copy runs beside the next forward pass, and a thread writes what
    has arrived.
    """

    def __init__(self, path: Path):
        # Written to, not mapped: filling a page of a mapped file for the first time takes longer than the copy itself.
        self.descriptor = os.open(path, os.O_WRONLY)
        self.places = {name: tensor.start for name, tensor in headers.read_header(path).items()}
        tensors = open_writable(path)
        self.starts = tensors["cu_seqlens"].tolist()
        self.rows = open_writable(rows_path(path))["rows"]
        self.features = tensors["hidden"].shape[1]
        self.codec = "int8" if "hidden_scale" in tensors else "bfloat16"
        self.arrivals: queue.Queue = queue.Queue(WAITING)
        self.error: Exception | None = None
        self.stream = self.thread = None

    def add(self, pieces: list[tuple[int, int, int]], states: Tensor) -> None:
        """states [n, L, H] of consecutive pieces (sequence, first position, positions); their positions add up to n."""
        if self.error:
            raise self.error
        states = states.bfloat16()  # where the target computes in float32
        made = {"hidden": states[:, : self.features], "last": states[:, -1]}
        made = hidden_states.encode_shard(made, self.codec)
        if states.device.type == "cpu":
            self._write(pieces, made)
            return
        if self.thread is None:
            self.stream = torch.cuda.Stream(states.device)
            self.thread = threading.Thread(target=self._write_arrivals, daemon=True)
            self.thread.start()
        self.stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(self.stream):
            pinned = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for name, x in made.items()}
            for name, x in made.items():
                pinned[name].copy_(x, non_blocking=True)
                x.record_stream(self.stream)
            arrived = self.stream.record_event()
        self.arrivals.put((arrived, pieces, pinned))

    def close(self) -> None:
        """Return when all that was added is in the file."""
        if self.thread is not None:
            self.arrivals.put(None)
            self.thread.join()
            self.thread = None
        os.close(self.descriptor)
        if self.error:
            raise self.error

    def _write_arrivals(self) -> None:
        while (arrival := self.arrivals.get()) is not None:
            if self.error:
                continue  # go on emptying the queue, so that nobody waits for room in it
            try:
                arrival[0].synchronize()
                self._write(*arrival[1:])
            except Exception as error:
                self.error = error

    def _write(self, pieces: list[tuple[int, int, int]], made: dict[str, Tensor]) -> None:
        # Few long writes: after each one this thread waits for Python's lock, 5 ms where the engine's thread is in Python.
        for at, taken, count in self._runs(pieces):
            for name, x in made.items():
                part = x[taken : taken + count].contiguous()
                data = memoryview(part.view(torch.uint8).numpy()).cast("B")
                place = self.places[name] + at * (len(data) // count)
                while data:  # a write may take less than it is given
                    written = os.pwrite(self.descriptor, data, place)
                    data, place = data[written:], place + written
        sequences, firsts, counts = torch.tensor(pieces).T
        self.rows[sequences] = firsts + counts

    def _runs(self, pieces: list[tuple[int, int, int]]) -> list[list[int]]:
        """Pieces that follow each other in the file, joined: [position in the file, row of the states, rows]."""
        runs, taken = [], 0
        for sequence, first, count in pieces:
            at = self.starts[sequence] + first
            if at + count > self.starts[sequence + 1]:
                raise ValueError(f"sequence {sequence} has no positions {first} ... {first + count - 1}")
            if runs and at == runs[-1][0] + runs[-1][2]:
                runs[-1][2] += count
            else:
                runs.append([at, taken, count])
            taken += count
        return runs
