"""What if the engine runs the drafter otherwise than it was trained? The offline walk, once per fault hypothesis.

Each hypothesis changes what the drafter is fed, or one of its parts, in just the way in which an engine, a flag or a
checkpoint is known to get it wrong, and walks over the same sequences. No weight is trained. Served acceptance that
fits a hypothesis and not "as-built" names the fault (verdict.py).

    as-built              as trained: `walk.evaluate` and nothing else
    layers-minus-1        features are the inputs of layers k - 1: ids written as outputs, read as inputs (vLLM)
    layers-plus-1         features are the inputs of layers k + 1: ids written as inputs, read as outputs (SGLang)
    layers-reversed       features in descending order of the layers; engines feed them ascending
    shift-by-one          position p gets the features of position p - 1
    fc-skipped            the final hidden state, post-norm, in place of the fused features; the head is the target's, cut
                          to its first D rows; d2t is ignored, so draft id j is target id j. SGLang with the algorithm
                          EAGLE where EAGLE3 is needed (0.5.23: eagle_worker_v2.py init_lm_head, llama_eagle3.py forward,
                          logits_processor.py)
    fc-skipped-own-head   the same features, but own head and d2t: vLLM with eagle_config.use_aux_hidden_state false
    d2t-zero              draft id j is taken as target id j (no d2t, or one that was never filled)
    d2t-absolute          d2t holds target ids where the engine adds j: target id j + id(j); past the vocabulary it is
                          read as the last token
    theta-10000           rotary base 10,000 without scaling: the drafter's RoPE settings stand in a spelling that is
                          not read
    norm-before-residual, norm-before-fc, norm-output
                          that flag turned over, as vLLM's llama_eagle3.py implements it; the norm before fc that a
                          checkpoint lacks has weights of one
    target-head           the head is the first D rows of the target's, d2t as built: vLLM for a checkpoint without an
                          lm_head

A hypothesis that cannot differ from "as-built" (theta of a drafter that has 10,000, d2t of a full vocabulary) is left
out, and so are layers that the target does not have.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from breakeven import walk
from breakeven.checkpoint import FLAGS
from breakeven.drafter import Drafter, RMSNorm, Rotary
from breakeven.hidden_states import Capture, InMemory, Sequences

AS_BUILT = "as-built"
OTHER_THETA = 10_000.0  # what transformers' LlamaConfig and both engines fall back to


@dataclass
class Hypothesis:
    """A drafter, its ids [D] of target tokens, and the features [T, A, H] it is fed, made of a loaded sequence."""

    name: str
    drafter: Drafter
    ids: Tensor
    features: Callable[[dict[str, Tensor]], Tensor]


class Fed:
    """Sequences whose "hidden" are the features of a hypothesis; all else is the sequences' own."""

    def __init__(self, sequences: Sequences | InMemory, features: Callable[[dict[str, Tensor]], Tensor]):
        self.sequences, self.features = sequences, features

    def load(self, i: int, *names: str) -> dict[str, Tensor]:
        loaded = self.sequences.load(i, *dict.fromkeys((*names, "hidden", "last")))
        return loaded | {"hidden": self.features(loaded)}


def neighbours(layers: list[int], n_layers: int) -> list[int]:
    """The physical layers that must be captured to test every layer hypothesis: each one and those beside it."""
    return sorted({k + step for k in layers for step in (-1, 0, 1) if 0 <= k + step <= n_layers})


def variant(drafter: Drafter, modules: dict[str, nn.Module] | None = None, **config) -> Drafter:
    """The same drafter with other modules or config values; weights are shared, and the original stays as it is."""
    other = copy.copy(drafter)
    other._modules = drafter._modules | (modules or {})
    other.config = replace(drafter.config, **config)
    return other


def flipped(drafter: Drafter, flag: str) -> Drafter:
    """The drafter with one norm flag turned over."""
    turned = not getattr(drafter.config, flag)
    modules = {}
    if flag == "norm_before_fc":
        width = drafter.fc.in_features
        norm = RMSNorm(width, drafter.config.rms_norm_eps).to(drafter.lm_head.weight.device)
        modules["input_norm"] = norm.requires_grad_(False) if turned else nn.Identity()
    return variant(drafter, modules, **{flag: turned})


def hypotheses(drafter: Drafter, ids: Tensor, capture: Capture) -> Iterator[Hypothesis]:
    """Every hypothesis for this drafter; `capture` has run with `neighbours(drafter.config.layers, N)` as its layers."""
    config, device = drafter.config, ids.device
    places = {k: i for i, k in enumerate(capture.layers)}
    draft_ids = torch.arange(len(ids), device=device)

    def of_layers(layers: list[int]) -> Callable[[dict[str, Tensor]], Tensor]:
        columns = [places[k] for k in layers]
        return lambda loaded: loaded["hidden"][:, columns]

    def final(loaded: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            return capture.body.norm(loaded["last"].to(device))[:, None]

    def delayed(loaded: dict[str, Tensor]) -> Tensor:
        features = built(loaded)
        return torch.cat([features[:1], features[:-1]])

    built = of_layers(config.layers)
    yield Hypothesis(AS_BUILT, drafter, ids, built)
    for name, step in (("layers-minus-1", -1), ("layers-plus-1", 1)):
        layers = [k + step for k in config.layers]
        if set(layers) <= set(places):
            yield Hypothesis(name, drafter, ids, of_layers(layers))
    if len(config.layers) > 1:
        yield Hypothesis("layers-reversed", drafter, ids, of_layers(config.layers[::-1]))
    yield Hypothesis("shift-by-one", drafter, ids, delayed)

    head = nn.Linear(config.hidden_size, len(ids), bias=False, device="meta")
    head.weight = nn.Parameter(capture.model.lm_head.weight[: len(ids)].to(drafter.dtype), requires_grad=False)
    no_fc = {"fc": nn.Identity(), "input_norm": nn.Identity()}
    yield Hypothesis("fc-skipped", variant(drafter, no_fc | {"lm_head": head}, fc_norm=False), draft_ids, final)
    yield Hypothesis("fc-skipped-own-head", variant(drafter, no_fc, fc_norm=False), ids, final)
    if not torch.equal(ids, draft_ids):
        yield Hypothesis("d2t-zero", drafter, draft_ids, built)
    yield Hypothesis("d2t-absolute", drafter, (draft_ids + ids).clamp(max=config.vocab_size - 1), built)
    if config.rope_theta != OTHER_THETA or config.rope_scaling is not None:
        rotary = Rotary(replace(config, rope_theta=OTHER_THETA, rope_scaling=None)).to(device)
        other = variant(drafter, {"rotary": rotary}, rope_theta=OTHER_THETA, rope_scaling=None)
        yield Hypothesis("theta-10000", other, ids, built)
    for flag in FLAGS:
        yield Hypothesis(flag.replace("_", "-"), flipped(drafter, flag), ids, built)
    yield Hypothesis("target-head", variant(drafter, {"lm_head": head}), ids, built)


def evaluate(
    drafter: Drafter,
    ids: Tensor,
    capture: Capture,
    sequences: Sequences | InMemory,
    chosen: list[int],
    k: int,
    device: str,
    progress=None,
) -> dict[str, list[walk.Matches]]:
    """Walk matches of the chosen sequences under every hypothesis, "as-built" first.

    `sequences` hold the layers of `capture` (see `neighbours`). `progress` counts hypotheses.
    """
    found = {}
    for hypothesis in hypotheses(drafter, ids, capture):
        fed = Fed(sequences, hypothesis.features)
        found[hypothesis.name] = walk.evaluate(hypothesis.drafter, hypothesis.ids, fed, chosen, k, device)
        if progress is not None:
            progress.add(1, hypothesis.name)
    return found


def table(found: dict[str, list[walk.Matches]], k: int) -> list[dict]:
    """Rows of tables.WHAT_IF: acceptance per position at K = k under every hypothesis."""
    names = ("k", "position", "steps", "accepted", "marginal", "acceptance_length")
    return [
        {"hypothesis": hypothesis} | {name: row[name] for name in names}
        for hypothesis, matches in found.items()
        for row in walk.table(matches, [k], "")
    ]


def by_output(found: dict[str, list[walk.Matches]], k: int) -> dict[str, list[list[int]]]:
    """What the walk does in each sequence under every hypothesis: [steps, accepted at position 1, ... K] for each.

    Pooled counts hide faults that leave the mean alone; `verdict.paired` looks at each output by itself.
    """

    def count(matches: walk.Matches) -> list[int]:
        steps, accepted = walk.counts(walk.walk(matches, k), k)
        return [steps, *accepted.tolist()]

    return {name: [count(m) for m in matches] for name, matches in found.items()}
