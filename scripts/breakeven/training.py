"""Training an EAGLE-3 drafter: data order, the training-time-test loss, the optimizer loop, resuming.

Training-time test (EAGLE-3, section 3.2): the drafter's own output is fed back for `ttt_steps` steps, so that it learns
from the features it will see when it drafts several tokens. The tokens fed are the true ones.

Row p of step t predicts token x[p+2+t]; its label is the target's distribution at position p+1+t. It counts where
x[p+2+t] is a response token, and so is x[p+2], since no engine starts a chain inside a prompt. The mask moves with the
label, so that the first position drafted after the prompt is trained too. The distribution is restricted to the draft vocabulary; where the target's own greedy token lies outside
it, the position is masked in the loss and counts as wrong in every accuracy.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from breakeven import artefacts
from breakeven.cli import Progress, UserError, logger
from breakeven.drafter import Drafter, autocast
from breakeven.hidden_states import Sequences, pad


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
    batch_tokens: int = 512  # padded tokens in a batch; at least one sequence
    seed: int = 0


@dataclass
class Batch:
    """Right-padded sequences. tokens [B, T] int64, features [B, T, A, H], last [B, T, H], argmax [B, T] int64 (-1 where
    unknown), mask [B, T] bool, true for response tokens; first_row: the first row that is trained."""

    tokens: Tensor
    features: Tensor
    last: Tensor
    argmax: Tensor
    mask: Tensor
    first_row: int


def collate(sequences: Sequences, indices: list[int], device: str) -> Batch:
    """Load and pad sequences. Rows before all responses need no queries: only their keys and values matter."""
    loaded = [sequences.load(i, "token_ids", "loss_mask", "hidden", "last", "argmax") for i in indices]
    tokens, _ = pad([s["token_ids"].long() for s in loaded])
    argmax = torch.nn.utils.rnn.pad_sequence([s["argmax"].long() for s in loaded], batch_first=True, padding_value=-1)
    mask, _ = pad([s["loss_mask"] for s in loaded])
    features, _ = pad([s["hidden"] for s in loaded])
    last, _ = pad([s["last"] for s in loaded])
    first = min(int(s["loss_mask"].nonzero()[0]) for s in loaded)
    tensors = (x.to(device, non_blocking=True) for x in (tokens, features, last, argmax, mask))
    return Batch(*tensors, first_row=max(0, first - 2))


def epoch_batches(lengths: list[int], indices: list[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch: a seeded shuffle, neighbours sorted by length within windows to limit padding."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = [indices[i] for i in torch.randperm(len(indices), generator=generator).tolist()]
    batches, window = [], 64
    for at in range(0, len(order), window):
        batch: list[int] = []
        for i in sorted(order[at : at + window], key=lambda i: (lengths[i], i)):
            if batch and (len(batch) + 1) * lengths[i] > budget:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


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


def chain_labels(batch: Batch, head: TargetHead, step: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows of training-time-test step `step` are trained, and on what.

    Returns (counted [B, R] bool, trained [B, R] bool, position [R] int64): counted rows predict a response token,
    trained ones also have their greedy label in the draft vocabulary; position is the label's p+1+t, clamped.
    """
    length = batch.tokens.shape[1]
    row = torch.arange(batch.first_row, batch.first_row + rows, device=batch.tokens.device)
    predicted, label = row + 2 + step, row + 1 + step
    starts = batch.mask[:, (row + 2).clamp(max=length - 1)]
    counted = starts & batch.mask[:, predicted.clamp(max=length - 1)] & (predicted < length)
    label = label.clamp(max=length - 1)
    greedy = batch.argmax[:, label]
    counted &= greedy >= 0
    return counted, counted & head.in_vocabulary[greedy.clamp(min=0)], label


def chain_loss(drafter: Drafter, head: TargetHead, batch: Batch, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of one batch, and per step the number of right greedy predictions and of counted rows.

    Returns (loss [], right [steps] int64, counted [steps] int64). Loss: per step the mean over trained rows of the
    cross-entropy against softmax(target logits over the draft vocabulary), steps weighted by step_decay**t.
    """
    tokens = F.pad(batch.tokens, (0, settings.ttt_steps + 1))
    length, first = batch.tokens.shape[1], batch.first_row
    hidden, context = drafter.fuse(batch.features), None
    losses, right, counts = [], [], []
    for step in range(settings.ttt_steps):
        start = 0 if step == 0 else first
        hidden, context = drafter.step(tokens[:, start + 1 + step : length + 1 + step], hidden, context, first)
        counted, trained, label = chain_labels(batch, head, step, hidden.shape[1])
        at = trained.nonzero(as_tuple=True)
        logits = drafter.logits(hidden[at]).float()
        with torch.no_grad():
            target = head.logits(batch.last[at[0], label[at[1]]]).float()
        losses.append(F.cross_entropy(logits, target.softmax(-1)) if len(logits) else logits.sum())
        right.append((logits.argmax(-1) == target.argmax(-1)).sum())
        counts.append(counted.sum())
    weights = torch.tensor([settings.step_decay**t for t in range(settings.ttt_steps)], device=batch.tokens.device)
    loss = (torch.stack(losses) * weights).sum() / weights.sum()
    return loss, torch.stack(right), torch.stack(counts)


def learning_rate(settings: Settings, step: int, total: int) -> float:
    """Linear warm-up, then cosine down to final_learning_rate of the peak."""
    warmup = max(1, round(settings.warmup * total))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    floor = settings.final_learning_rate
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def validate(
    drafter: Drafter, head: TargetHead, sequences: Sequences, settings: Settings, device: str
) -> dict[str, Any]:
    """Loss and per-step accuracy on the held-out sequences."""
    held_out = [i for i, flag in enumerate(sequences.held_out) if flag]
    lengths = [sequences.length(i) for i in range(len(sequences))]
    losses, right, counted = [], torch.zeros(settings.ttt_steps), torch.zeros(settings.ttt_steps)
    for indices in epoch_batches(lengths, held_out, settings.batch_tokens, 0, 0) if held_out else []:
        with autocast(device):
            loss, hits, counts = chain_loss(drafter, head, collate(sequences, indices, device), settings)
        losses.append(loss.item() * len(indices))
        right, counted = right + hits.cpu(), counted + counts.cpu()
    accuracy = (right / counted.clamp(min=1)).tolist()
    return {"loss": sum(losses) / len(held_out) if held_out else None, "accuracy": accuracy if held_out else None}


class Run:
    """One training run: model, optimizer and the place in the data, which `save` and `resume` keep in one file."""

    def __init__(
        self,
        drafter: Drafter,
        head: TargetHead,
        sequences: Sequences,
        settings: Settings,
        device: str,
        samples: int | None = None,
    ):
        self.drafter, self.head, self.sequences = drafter, head, sequences
        self.settings, self.device = settings, device
        self.training = sequences.training(samples)
        if not self.training:
            raise UserError("there is no training sequence: every prompt is held out; raise prompts.size")
        self.lengths = [sequences.length(i) for i in range(len(sequences))]
        self.optimizer = torch.optim.AdamW(
            drafter.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.epoch, self.position, self.step, self.tokens = 0, 0, 0, 0
        self.rows: list[dict[str, Any]] = []

    def batches(self, epoch: int) -> list[list[int]]:
        return epoch_batches(self.lengths, self.training, self.settings.batch_tokens, self.settings.seed, epoch)

    def state(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "place": (self.epoch, self.position, self.step, self.tokens),
            "rows": self.rows,
            "rng": torch.get_rng_state(),
        }

    def save(self, path: Path, fingerprint: str) -> None:
        with artefacts.atomic(path) as temporary:
            torch.save({"fingerprint": fingerprint, **self.state()}, temporary)

    def resume(self, path: Path, fingerprint: str) -> bool:
        """Continue from `path` if it belongs to the same parameters and inputs; else say so and start over."""
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["fingerprint"] != fingerprint:
            logger.info("%s belongs to other settings or data; starting from the beginning", path)
            return False
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.position, self.step, self.tokens = state["place"]
        self.rows = state["rows"]
        torch.set_rng_state(state["rng"].cpu())
        logger.info("resuming at epoch %d, optimizer step %d", self.epoch + 1, self.step)
        return True

    def steps(self) -> Iterator[dict[str, Any]]:
        """Train to the end, yielding the row of each optimizer step and of each validation (after every epoch)."""
        settings = self.settings
        total = sum(len(self.batches(epoch)) for epoch in range(settings.epochs))
        expected = settings.epochs * sum(self.lengths[i] for i in self.training)
        with Progress(expected, "tok", "training", done=self.tokens) as progress:
            while self.epoch < settings.epochs:
                batches = self.batches(self.epoch)
                while self.position < len(batches):
                    row = self._optimize(batches[self.position], total)
                    self.rows.append(row)
                    self.position += 1
                    self.step += 1
                    done = sum(self.lengths[i] for i in batches[self.position - 1])
                    self.tokens += done
                    progress.add(done, f"loss {row['loss']:.3f}")
                    yield row
                self.epoch, self.position = self.epoch + 1, 0
                row = {"step": self.step, "epoch": self.epoch, "split": "held_out", "tokens": self.tokens}
                row |= validate(self.drafter, self.head, self.sequences, settings, self.device)
                self.rows.append(row)
                if row["loss"] is not None:
                    accuracy = ", ".join(f"{a:.3f}" for a in row["accuracy"])
                    logger.info("epoch %d: held-out loss %.3f, accuracy %s", self.epoch, row["loss"], accuracy)
                yield row

    def _optimize(self, indices: list[int], total: int) -> dict[str, Any]:
        rate = learning_rate(self.settings, self.step, total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = collate(self.sequences, indices, self.device)
        with autocast(self.device):
            loss, right, counted = chain_loss(self.drafter, self.head, batch, self.settings)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.settings.gradient_clip)
        self.optimizer.step()
        value = loss.item()
        if not math.isfinite(value):
            raise UserError(f"the loss is {value} at optimizer step {self.step}; lower drafters.NAME.learning_rate")
        return {
            "step": self.step,
            "epoch": self.epoch + 1,
            "split": "train",
            "loss": value,
            "accuracy": (right / counted.clamp(min=1)).tolist(),
            "learning_rate": rate,
            "gradient_norm": norm.item(),
            "tokens": self.tokens,
        }


def fingerprint(settings: Settings, drafter: Drafter, inputs: dict[str, str]) -> str:
    """Identifies a run for resuming: settings, network shape, and content hashes of what it reads."""
    return artefacts.fingerprint([asdict(settings), drafter.config.to_dict(), inputs])
