"""The draft vocabulary: which target tokens the drafter can propose, and the maps that engines read.

d2t [D] int64 is an *offset*: draft token j stands for target id j + d2t[j]. t2d [V] bool marks those target ids.
"""

import numpy as np

from breakeven.cli import UserError


def choose(counts: np.ndarray, size: int, always: list[int]) -> np.ndarray:
    """Target ids of a draft vocabulary, ascending and unique: [size] int64.

    counts [V]: how often each target id occurs in the training responses. `always` (end tokens, chat-template ids) are
    in, but for those from V on, which a tokenizer may have and the target cannot emit; then the most frequent ids, ties
    by lower id; slots that no seen token fills take the lowest unused ids, which are the most common tokens of a
    byte-pair vocabulary.
    """
    if not 0 < size <= len(counts):
        raise UserError(f"vocabulary_size: {size} is not between 1 and the target's vocabulary of {len(counts)}")
    always = [token for token in always if token < len(counts)]
    if len(always) > size:
        raise UserError(f"vocabulary_size: {size} does not hold the {len(always)} special and template tokens")
    priority = counts.astype(np.int64).copy()
    priority[always] = priority.max() + 1
    order = np.lexsort((np.arange(len(counts)), -priority))
    return np.sort(order[:size]).astype(np.int64)


def keep(counts: np.ndarray, ids: np.ndarray, size: int, always: list[int]) -> np.ndarray:
    """Which rows of a vocabulary to keep, ascending: [size] int64 indices into ids [D], the most frequent by counts [V].

    `always` as in `choose`; of these the vocabulary's own stay in.
    """
    if not 0 < size <= len(ids):
        raise UserError(f"--size {size}: the drafter's vocabulary has {len(ids)} tokens")
    return choose(counts[ids], size, np.flatnonzero(np.isin(ids, always)).tolist())


def maps(ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(d2t [D] int64 offsets, t2d [V] bool) of ascending unique target ids."""
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[ids] = True
    return ids - np.arange(len(ids)), t2d


def target_ids(d2t: np.ndarray) -> np.ndarray:
    """The target ids of an offset map: j + d2t[j]."""
    return np.arange(len(d2t)) + d2t


def coverage(counts: np.ndarray, ids: np.ndarray) -> float | None:
    """Share of the counted tokens that the vocabulary holds; None where nothing was counted."""
    return float(counts[ids].sum() / counts.sum()) if counts.sum() else None
