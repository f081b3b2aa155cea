"""Training an EAGLE-3 drafter: data order, the training-time-test loss, the optimizer loop, resuming.

Training-time test (EAGLE-3, section 3.2): the drafter's own output is fed back for `ttt_steps` steps, so that it learns
from the features it will see when it drafts several tokens. The tokens fed are the true ones.

Row p of step t predicts token x[p+2+t]; its label is the target's distribution at position p+1+t. It counts where
x[p+2+t] is a response token, and so is x[p+2], since no engine starts a chain inside a prompt. The mask moves with the
label, so that the first position drafted after the prompt is trained too. The distribution is restricted to the draft vocabulary; where the target's own greedy token lies outside
it, the position is masked in the loss and counts as wrong in every accuracy.

An optimizer step is made of `batches_per_step` batches, which the ranks of a run share (ranks.py). The loss is the mean
over all of them, so that it is the same for any number of ranks, up to the order of sums.
"""

import contextlib
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from breakeven import artefacts
from breakeven.cli import Progress, UserError, logger
from breakeven.crossentropy import soft_cross_entropy
from breakeven.drafter import BLOCK, Drafter, Rows, autocast, row_blocks
from breakeven.hidden_states import Capture, Responses, Sequences, captured_states, decode
from breakeven.ranks import ALONE, Ranks
from breakeven.speed import Meter, training_flops


@dataclass
class Settings:
    """What shapes a training run; every field is a config key of `drafters.NAME`."""

    ttt_steps: int = 3
    step_decay: float = 0.8  # weight of step t is step_decay**t, normalised by their sum
    epochs: int = 3
    learning_rate: float = 1e-3
    warmup: float = 0.03  # share of all optimizer steps
    final_learning_rate: float = 0.05  # share of the peak that the cosine ends at
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    batch_tokens: int = 512  # tokens in a batch, prompts included; at least one sequence
    batches_per_step: int = 1  # whose gradients make one optimizer step; ranks share them
    head_dtype: str = "bfloat16"  # of the products with the drafter's and the target's head; or float32
    seed: int = 0

    def __post_init__(self):
        if self.head_dtype not in ("bfloat16", "float32"):
            raise UserError(f"settings.head_dtype: {self.head_dtype!r} is neither bfloat16 nor float32")


@dataclass
class Batch:
    """Sequences packed one behind the other into T positions, R rows of which draft; S training-time-test steps.

    A row is a position p from which an engine can start a chain: x[p+2] is a response token. The label positions p+1+s
    of all rows and steps are those of step 0, so labels are numbered like rows: label l is position index[l] + 1.

    tokens [T] int64; lengths of the sequences; positions [T] int64 in their own sequence; index [R] and starts [R]
    int64, places of the rows and of the first position of their sequence; source [S, R] int64 and counted [S, R] bool:
    at step s, label l is predicted by row source[s, l], if counted. features [T, A, H] and last [T, H] as stored, with
    scales if the codec has them; argmax [T] int64, the target's greedy next token, -1 where unknown; these three are
    None where the target is still to be run. spans: see drafter.Rows.
    With `blocks`, attention is by blocks, and there may be padding behind the sequences: positions that no row sees, each
    a sequence of its own, and rows that are never counted.
    """

    tokens: Tensor
    lengths: list[int]
    positions: Tensor
    index: Tensor
    starts: Tensor
    source: Tensor
    counted: Tensor
    features: Tensor | None
    features_scale: Tensor | None
    last: Tensor | None
    last_scale: Tensor | None
    argmax: Tensor | None
    spans: list[tuple[int, int, int, int]]
    blocks: bool
    flops: tuple[int, int, int, int]  # tokens, rows, counted pairs, keys seen: arguments of speed.training_flops

    def to(self, device: str) -> "Batch":
        """The batch on a device; copies from pinned memory do not wait."""
        tensors = {
            f.name: x.to(device, non_blocking=True)
            for f in fields(self)
            if isinstance(x := getattr(self, f.name), Tensor)
        }
        return replace(self, **tensors)

    def rows(self) -> Rows:
        if not self.blocks:
            return Rows(self.index, self.positions, self.spans)
        return Rows(self.index, self.positions, [], row_blocks(self.starts, self.index, len(self.tokens)))


def join(parts: list[Tensor], length: int, pin: bool) -> Tensor:
    """Concatenate along the first dimension into `length` entries, the rest zero."""
    joined = torch.empty((length, *parts[0].shape[1:]), dtype=parts[0].dtype, pin_memory=pin)
    used = sum(map(len, parts))
    torch.cat(parts, out=joined[:used])
    joined[used:] = 0
    return joined


def collate(
    sequences: Sequences | Responses, indices: list[int], steps: int, shape: tuple[int, int] | None = None
) -> Batch:
    """Pack sequences on the CPU. With a shape, T and R are padded to it, pinned, and attention is by blocks."""
    parts = [sequences.stored(i, "token_ids", "loss_mask", "hidden", "last", "argmax") for i in indices]
    lengths = [len(part["token_ids"]) for part in parts]
    used, pin = sum(lengths), shape is not None and torch.cuda.is_available()
    mask = torch.cat([part["loss_mask"] for part in parts]).numpy()
    starts_of = np.cumsum([0, *lengths[:-1]])
    start = np.repeat(starts_of, lengths)  # [T]
    predicted = np.flatnonzero(mask)
    index = predicted[predicted - 2 >= start[predicted]] - 2
    starts = start[index]
    number = np.full(used, -1)
    number[index] = np.arange(len(index))
    earlier = index - np.arange(steps)[:, None]  # [S, R]
    source = number[np.maximum(earlier, 0)]
    counted = (earlier >= starts) & (source >= 0)
    positions = np.arange(used) - start
    ends = np.searchsorted(index, [*starts_of[1:], used])
    firsts = [0, *ends[:-1]]
    spans = [
        (int(a), int(a + n), int(r0), int(r1)) for a, n, r0, r1 in zip(starts_of, lengths, firsts, ends, strict=True)
    ]
    flops = used, len(index), int(counted.sum()), int((positions[index] + 1).sum())
    length = used
    if shape is not None:
        length, height = shape
        spare = height - len(index)
        # Rows of padding see padding, or repeat a last row: their results are finite and never used.
        index = np.pad(index, (0, spare), constant_values=length - 1)
        starts = np.pad(starts, (0, spare), constant_values=used if used < length else starts_of[-1])
        source, counted = np.pad(source, ((0, 0), (0, spare))), np.pad(counted, ((0, 0), (0, spare)))
        positions = np.pad(positions, (0, length - used))

    def tensor(x, dtype=torch.int64):
        made = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
        return made.pin_memory() if pin else made

    stored = {name: join([part[name] for part in parts], length, pin) for name in parts[0] if name != "loss_mask"}
    argmax = stored.get("argmax")
    return Batch(
        tokens=stored["token_ids"].long(),
        lengths=lengths,
        positions=tensor(positions),
        index=tensor(index),
        starts=tensor(starts),
        source=tensor(np.maximum(source, 0)),
        counted=tensor(counted, torch.bool),
        features=stored.get("hidden"),
        features_scale=stored.get("hidden_scale"),
        last=stored.get("last"),
        last_scale=stored.get("last_scale"),
        argmax=None if argmax is None else argmax.long(),
        spans=spans,
        blocks=shape is not None,
        flops=flops,
    )


@torch.no_grad()
def decoded(batch: Batch) -> Batch:
    """The batch with its stored hidden states decoded."""
    features, last = decode(batch.features, batch.features_scale), decode(batch.last, batch.last_scale)
    return replace(batch, features=features, last=last)


@torch.no_grad()
def computed(batches: list[Batch], capture: Capture, budget: int) -> list[Batch]:
    """Batches of one T without hidden states, with those that the target computes for them.

    With attention by blocks, one forward pass over all of them, filled up to `budget` tokens so that its shape is always
    the same: the pass of a small target over a single batch is bound by the launch of its kernels. Else padded passes.
    """
    size = len(batches[0].tokens)
    if batches[0].blocks:
        spare = max(0, budget // size - len(batches)) * size
        tokens, positions = (
            F.pad(torch.cat([getattr(b, x) for b in batches]), (0, spare)) for x in ("tokens", "positions")
        )
        captured = capture.packed(tokens, positions)
        states = [(captured.features[a : a + size], captured.last[a : a + size]) for a in range(0, len(tokens), size)]
    else:
        states = [captured_states(capture, batch.tokens, batch.lengths, budget) for batch in batches]
    made = []
    for batch, (features, last) in zip(batches, states, strict=False):
        argmax = torch.full_like(batch.tokens, -1)
        for labels in (batch.index + 1).clamp(max=size - 1).split(2048):
            argmax[labels] = capture.logits(last[labels]).argmax(-1)
        made.append(replace(batch, features=features, last=last, argmax=argmax))
    return made


def alike(batches: Iterable[Batch], budget: int) -> Iterator[list[Batch]]:
    """Neighbours of one T together, of at most `budget` tokens (at least one batch)."""
    group: list[Batch] = []
    for batch in batches:
        size = len(batch.tokens)
        if group and (size != len(group[0].tokens) or (len(group) + 1) * size > budget):
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


def epoch_batches(lengths: list[int], indices: list[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch: a seeded shuffle, cut where the next sequence would exceed `budget` tokens."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    filled = budget
    for at in torch.randperm(len(indices), generator=generator).tolist():
        i = indices[at]
        if filled + lengths[i] > budget:
            batches.append([])
            filled = 0
        batches[-1].append(i)
        filled += lengths[i]
    return batches


def ahead(make: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
    """make(item) for every item, in order; `workers` threads prepare the next ones (0: none, made when asked for)."""
    if not workers:
        yield from map(make, items)
        return
    # One thread each for what they compute: teams of threads would crowd out the one that feeds the device.
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting: deque[Future] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


@dataclass
class TargetHead:
    """The target's final norm and head, as far as training needs them.

    norm [H] and rows [D, H], the head rows of the draft vocabulary, float32 or bf16; in_vocabulary [V] bool.
    """

    norm: Tensor
    rows: Tensor
    in_vocabulary: Tensor
    eps: float

    def logits(self, last: Tensor) -> Tensor:
        """Pre-norm hidden states [..., H] -> target logits of the draft vocabulary [..., D]."""
        normed = F.rms_norm(last.float(), (last.shape[-1],), self.norm.float(), self.eps)
        return F.linear(normed.to(self.rows.dtype), self.rows)


def unroll(drafter: Drafter, tokens: Tensor, features: Tensor, rows: Rows, steps: int) -> Tensor:
    """Pre-norm outputs [S, R, H] of all training-time-test steps, the true tokens fed. tokens [T], features [T, A, H]."""
    following = F.pad(tokens, (0, steps + 1))
    hidden, context = drafter.fuse(features[None]), None
    outputs = []
    for step in range(steps):
        fed = following[1 : len(tokens) + 1] if step == 0 else following[rows.index + 1 + step]
        hidden, context = drafter.step(fed[None], hidden, context, rows)
        outputs.append(hidden[0])
    return torch.stack(outputs)


def labelled(head: TargetHead, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """(labels [R] int64, counted [S, R] bool, trained [S, R] bool) of a prepared batch.

    Counted rows predict a response token; trained ones also have their greedy label in the draft vocabulary.
    """
    label = (batch.index + 1).clamp(max=len(batch.tokens) - 1)
    greedy = batch.argmax[label]
    counted = batch.counted & (greedy >= 0)
    return label, counted, counted & head.in_vocabulary[greedy.clamp(min=0)]


def chain_loss(
    drafter: Drafter,
    head: TargetHead,
    batch: Batch,
    settings: Settings,
    unrolled: Callable[..., Tensor] = unroll,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of one batch, and per step the number of right greedy predictions and of counted rows.

    Returns (loss [], right [S] int64, counted [S] int64). Loss: per step the mean over trained rows of the
    cross-entropy against softmax(target logits over the draft vocabulary), steps weighted by step_decay**t. With `rows`
    [S], the trained rows of all batches of an optimizer step, it is this batch's part of their mean.
    """
    hidden = unrolled(drafter, batch.tokens, batch.features, batch.rows(), settings.ttt_steps)
    source = batch.source
    label, counted, trained = labelled(head, batch)
    counts = counted.sum(1)
    rows = trained.sum(1) if rows is None else rows
    if label.device.type == "cpu":  # a GPU would have to wait for their number, and its shapes would change
        kept = trained.any(0).nonzero()[:, 0]
        label, source, trained = label[kept], source[:, kept], trained[:, kept]
    decay = settings.step_decay ** torch.arange(settings.ttt_steps, device=label.device)
    weights = (decay / decay.sum() / rows.clamp(min=1))[:, None] * trained
    flat = source + len(batch.index) * torch.arange(settings.ttt_steps, device=label.device)[:, None]
    picked = hidden.flatten(0, 1).index_select(0, flat.flatten()).view(*flat.shape, -1)
    normed, exact = drafter.norm(picked), settings.head_dtype == "float32"
    with torch.autocast(label.device.type, enabled=False) if exact else contextlib.nullcontext():
        normed = normed.float() if exact else normed
        loss, right = soft_cross_entropy(normed, drafter.lm_head.weight, batch.last[label], head, weights)
    return loss, (right & trained).sum(1), counts


def learning_rate(settings: Settings, step: int, total: int) -> float:
    """Linear warm-up, then cosine down to final_learning_rate of the peak."""
    warmup = max(1, round(settings.warmup * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class Run:
    """One training run: model, optimizer and the place in the data, which `save` and `resume` keep in one file.

    On CUDA all batches have one shape, the chain of steps is compiled, threads prepare the batches, and losses are read
    LAG steps later, so that nothing waits for the device.
    """

    LAG = 8
    WORKERS = 4

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        sequences: Sequences | Responses,
        settings: Settings,
        device: str,
        samples: int | None = None,
        peak: float | None = None,
        ranks: Ranks = ALONE,
    ):
        if ranks.size > settings.batches_per_step:
            raise UserError(
                f"{ranks.size} ranks cannot share the {settings.batches_per_step} batches of an optimizer step; start"
                f" fewer, or raise batches_per_step to {ranks.size}, which trains with that many times larger steps"
            )
        self.drafter, self.head, self.sequences, self.ranks = drafter, head, sequences, ranks
        self.settings, self.device, self.cuda = settings, device, device.startswith("cuda")
        self.training = sequences.training(samples)
        self.held_out = [i for i, flag in enumerate(sequences.held_out) if flag]
        if not self.training:
            raise UserError("there is no training sequence: every prompt is held out; raise prompts.size")
        self.lengths = [sequences.length(i) for i in range(len(sequences))]
        self.shape = self._shape() if self.cuda else None
        self.unroll = torch.compile(unroll, dynamic=False) if self.cuda else unroll
        ranks.shard(drafter)  # the optimizer's state is of what is left
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.epoch, self.position, self.step, self.tokens = 0, 0, 0, 0
        self.rows: list[dict[str, Any]] = []
        self.note = ""  # the last loss that was read
        self.unread: deque[tuple[dict[str, Any], Tensor, Any]] = deque()
        self.meter = Meter(device, peak, ranks.size)

    def batches(self, epoch: int) -> list[list[int]]:
        return epoch_batches(self.lengths, self.training, self.settings.batch_tokens, self.settings.seed, epoch)

    def groups(self, epoch: int, position: int = 0) -> list[list[list[int]]]:
        """The batches of each optimizer step of an epoch, from batch `position` on; the last step may have fewer."""
        left, size = self.batches(epoch)[position:], self.settings.batches_per_step
        return [left[a : a + size] for a in range(0, len(left), size)]

    def validation_batches(self) -> list[list[int]]:
        return epoch_batches(self.lengths, self.held_out, self.settings.batch_tokens, 0, 0)

    def _shape(self) -> tuple[int, int]:
        """T and R that all batches of the run are padded to: the budget, and the most response tokens of a batch."""
        answers = [self.sequences.response_length(i) for i in range(len(self.sequences))]
        batches = [batch for epoch in range(self.settings.epochs) for batch in self.batches(epoch)]
        fitting = [b for b in batches + self.validation_batches() if len(b) > 1] or [[]]
        rows = max(sum(answers[i] for i in batch) for batch in fitting)
        # Rounded coarsely, so that runs of other sizes find what was compiled for this one.
        return rounded(self.settings.batch_tokens), rounded(max(rows, 1), 4 * BLOCK)

    def _collate(self, indices: list[int]) -> Batch:
        shape = self.shape
        if shape is not None:
            rows = sum(self.sequences.response_length(i) for i in indices)
            # A sequence longer than the budget has a shape of its own: doubled until it fits, so that few are compiled.
            while sum(self.lengths[i] for i in indices) > shape[0]:
                shape = (2 * shape[0], shape[1])
            while rows > shape[1]:
                shape = (shape[0], 2 * shape[1])
        return collate(self.sequences, indices, self.settings.ttt_steps, shape)

    def _batches(self, batches: list[list[int]]) -> Iterator[Batch]:
        """Prepared batches on the device; on CUDA the next one is copied there, on a stream of its own, meanwhile."""
        collated = ahead(self._collate, batches, self.WORKERS if self.cuda else 0)
        yield from self._with_states(copied_ahead(collated, self.device) if self.cuda else collated)

    def _with_states(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches on the device with their hidden states, stored or computed by the target."""
        if isinstance(self.sequences, Responses):
            for group in alike(batches, self.sequences.budget if self.cuda else 0):
                yield from computed(group, self.sequences.capture, self.sequences.budget)
        else:
            yield from map(decoded, batches)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss and per-step accuracy on the held-out sequences; None without any."""
        if not self.held_out:
            return {"loss": None, "accuracy": None}
        found = [torch.zeros(1 + 2 * self.settings.ttt_steps, dtype=torch.double, device=self.device)]
        self.ranks.gather(self.drafter)
        for batch in self._batches(self.ranks.own(self.validation_batches())):
            with autocast(self.device):
                loss, right, counted = chain_loss(self.drafter, self.head, batch, self.settings, self.unroll)
            found.append(torch.cat([loss[None] * len(batch.lengths), right, counted]).double())
        self.ranks.release(self.drafter)
        total = self.ranks.sum(torch.stack(found).sum(0)).cpu()
        right, counted = total[1:].chunk(2)
        return {"loss": total[0].item() / len(self.held_out), "accuracy": (right / counted.clamp(min=1)).tolist()}

    def weights(self) -> dict[str, Tensor]:
        """The drafter's, for the rank that writes; ranks that hold parts ask together."""
        return self.ranks.gathered(self.drafter.state_dict())

    def state(self) -> dict[str, Any]:
        """What a run goes on from, the same for any number of ranks, sharded or not."""
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {i: self.ranks.gathered(own) for i, own in optimizer["state"].items()}
        return {
            "drafter": self.weights(),
            "optimizer": optimizer,
            "place": (self.epoch, self.position, self.step, self.tokens),
            "rows": self.rows,
            "rng": torch.get_rng_state(),
        }

    def save(self, path: Path, fingerprint: str) -> None:
        self.read()
        state = self.state()
        if not self.ranks.writer:
            return
        # Through a file of Python's, which says when the disk is full; torch's own does not.
        with artefacts.atomic(path) as temporary, open(temporary, "wb") as file:
            torch.save({"fingerprint": fingerprint, **state}, file)

    def resume(self, path: Path, fingerprint: str) -> bool:
        """Continue from `path` if it belongs to the same parameters and inputs; else say so and start over."""
        if not path.is_file():
            return False
        try:
            # Whole, it may not fit on the device of a rank that holds a part.
            device = "cpu" if self.ranks.sharded else self.device
            state = torch.load(path, map_location=device, weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            logger.info("%s cannot be read (%s); starting from the beginning", path, " ".join(str(error).split())[:200])
            return False
        if state["fingerprint"] != fingerprint:
            logger.info("%s belongs to other settings or data; starting from the beginning", path)
            return False
        self._load(state["drafter"], state["optimizer"])
        self.epoch, self.position, self.step, self.tokens = state["place"]
        self.rows = state["rows"]
        torch.set_rng_state(state["rng"].cpu())
        logger.info("resuming at epoch %d, optimizer step %d", self.epoch + 1, self.step)
        return True

    def _load(self, weights: dict[str, Tensor], optimizer: dict[str, Any]) -> None:
        """Take over weights and optimizer state of `state`, this rank's part of them."""
        part, held = self.ranks.own_part, self.drafter.state_dict()
        self.drafter.load_state_dict({name: part(x, held[name]) for name, x in weights.items()})
        parameters = list(self.drafter.parameters())
        own = {i: {name: part(x, parameters[i]) for name, x in of.items()} for i, of in optimizer["state"].items()}
        self.optimizer.load_state_dict({**optimizer, "state": own})

    def steps(self) -> Iterator[dict[str, Any]]:
        """Train to the end, yielding the row of each optimizer step and of each validation (after every epoch).

        Loss, accuracy and gradient norm of an optimizer step are filled in when they have been read, LAG steps later.
        """
        settings = self.settings
        total = sum(len(self.groups(epoch)) for epoch in range(settings.epochs))
        expected = settings.epochs * sum(self.lengths[i] for i in self.training)
        with Progress(expected, "tok", "training", done=self.tokens) as progress:
            while self.epoch < settings.epochs:
                self.meter.start()
                groups = self.groups(self.epoch, self.position)
                shares = [self.ranks.own(group) for group in groups]
                prepared = self._batches([batch for share in shares for batch in share])
                for group, share in zip(groups, shares, strict=True):
                    batches = [next(prepared) for _ in share]
                    row = self._optimize(batches, total)
                    tokens = sum(self.lengths[i] for batch in group for i in batch)
                    self.rows.append(row)
                    self.position += len(group)
                    self.step += 1
                    self.tokens += tokens
                    self.read(self.LAG if self.cuda else 0)
                    progress.add(tokens, self.note)
                    flops = sum(training_flops(self.drafter.config, settings.ttt_steps, *b.flops) for b in batches)
                    if self.meter.add(tokens, flops):
                        self.read()
                        self.meter.restart()
                    yield row
                self.read()
                self.meter.stop()
                self.epoch, self.position = self.epoch + 1, 0
                row = {"step": self.step, "epoch": self.epoch, "split": "held_out", "tokens": self.tokens}
                row |= self.validate()
                self.rows.append(row)
                if row["loss"] is not None:
                    accuracy = ", ".join(f"{a:.3f}" for a in row["accuracy"])
                    logger.info("epoch %d: held-out loss %.3f, accuracy %s", self.epoch, row["loss"], accuracy)
                yield row

    def _optimize(self, batches: list[Batch], total: int) -> dict[str, Any]:
        """One optimizer step on this rank's batches of it, of which there may be none; total: steps of the run."""
        rate = learning_rate(self.settings, self.step, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = None
        if self.settings.batches_per_step > 1:
            rows = torch.zeros(self.settings.ttt_steps, dtype=torch.int64, device=self.device)
            rows = self.ranks.sum(sum((labelled(self.head, batch)[2].sum(1) for batch in batches), rows))
        self.optimizer.zero_grad(set_to_none=True)
        found = torch.zeros(1 + 2 * self.settings.ttt_steps, device=self.device)
        self.ranks.gather(self.drafter)
        for batch in batches:
            with autocast(self.device):
                loss, right, counted = chain_loss(self.drafter, self.head, batch, self.settings, self.unroll, rows)
            loss.backward()
            found += torch.cat([loss.detach()[None], right, counted])
        found = self.ranks.sum_gradients(self.drafter, found)
        right, counted = found[1:].chunk(2)
        norm = self.ranks.full(clip_grad_norm_(self.drafter.parameters(), self.settings.gradient_clip))
        self.optimizer.step()
        row = {
            "step": self.step,
            "epoch": self.epoch + 1,
            "split": "train",
            "loss": None,
            "accuracy": None,
            "learning_rate": rate,
            "gradient_norm": None,
            "tokens": self.tokens,
        }
        results = torch.cat([found[:1], norm[None], right / counted.clamp(min=1)])
        done = None
        if self.cuda:
            results = torch.empty(results.shape, dtype=results.dtype, pin_memory=True).copy_(results, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.unread.append((row, results, done))
        return row

    def read(self, lag: int = 0) -> None:
        """Fill in the rows of all steps but the last `lag`; a loss that is not finite is a UserError."""
        while len(self.unread) > lag:
            row, results, done = self.unread.popleft()
            if done is not None:
                done.synchronize()
            row["loss"], row["gradient_norm"], *accuracy = results.tolist()
            row["accuracy"], self.note = accuracy, f"loss {row['loss']:.3f}"
            if not math.isfinite(row["loss"]):
                raise UserError(
                    f"the loss is {row['loss']} at optimizer step {row['step']}; lower drafters.NAME.learning_rate"
                )


def copied_ahead(batches: Iterable[Batch], device: str) -> Iterator[Batch]:
    """The batches on a CUDA device, each copied while the one before is in use."""
    stream, waiting = torch.cuda.Stream(device), deque()

    def arrived() -> Batch:
        batch, done = waiting.popleft()
        current = torch.cuda.current_stream(device)
        current.wait_event(done)
        for field in fields(batch):
            if isinstance(x := getattr(batch, field.name), Tensor):
                x.record_stream(current)  # its memory is not given away before work asked for so far is done
        return batch

    for batch in batches:
        with torch.cuda.stream(stream):
            waiting.append((batch.to(device), stream.record_event()))
        if len(waiting) > 1:
            yield arrived()
    if waiting:
        yield arrived()


def rounded(count: int, unit: int = BLOCK) -> int:
    """The next multiple of `unit`."""
    return -(-count // unit) * unit


def fingerprint(settings: Settings, drafter: Drafter, inputs: dict[str, Any]) -> str:
    """Identifies a run for resuming: settings, network shape, and content hashes of what it reads, with its options."""
    return artefacts.fingerprint([asdict(settings), drafter.config.to_dict(), inputs])
