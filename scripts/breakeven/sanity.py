"""Is an output worth timing? A collapsed model repeats itself, its drafter guesses that, and garbage wins the race."""

from collections.abc import Sequence

import numpy as np

MINIMUM_TOKENS = 32  # shorter outputs are not judged: "no, no, no" is an answer
LONGEST_PERIOD = 48  # a loop is at most this many tokens long
LOOP_SHARE = 0.5  # an output is a loop if at least this share of it repeats one block
DISTINCT_SHARE = 0.25  # ... or if fewer than this share of its 4-grams are distinct


def degenerate(token_ids: Sequence[int]) -> str | None:
    """Why this output is degenerate (one token over and over, a loop, very few distinct 4-grams), or None.

    token_ids: the output, int [n]. Lists, tables and refrains repeat too, so each rule asks for half of the output.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    n = len(ids)
    if n < MINIMUM_TOKENS:
        return None
    for period in range(1, min(LONGEST_PERIOD, n // 3) + 1):
        start, run = longest_run(ids[period:] == ids[:-period])
        length = run + period  # tokens covered by the repetition
        if run >= 2 * period and length >= LOOP_SHARE * n:
            if period == 1:
                return f"token {ids[start]} is repeated {length} times in a row ({n} tokens)"
            return f"a block of {period} tokens is repeated over {length} of {n} tokens, from token {start} on"
    distinct = len(np.unique(np.lib.stride_tricks.sliding_window_view(ids, 4), axis=0))
    if distinct < DISTINCT_SHARE * (n - 3):
        return f"only {distinct} of {n - 3} 4-grams are distinct"
    return None


def longest_run(mask: np.ndarray) -> tuple[int, int]:
    """(start, length) of the longest run of true values in a boolean vector."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    best = int(np.argmax(lengths))
    return int(edges[2 * best]), int(lengths[best])
