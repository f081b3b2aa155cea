import numpy as np
import pytest

from breakeven.sanity import degenerate

TEXT = np.random.default_rng(0).integers(0, 5000, 400).tolist()


@pytest.mark.parametrize(
    "ids, text",
    [
        ([7] * 100, "token 7 is repeated 100 times"),
        (TEXT[:40] + [7] * 88, "token 7 is repeated 88 times"),
        (TEXT[:30] + [1, 2, 3, 4, 5] * 20, "a block of 5 tokens is repeated over 100 of 130 tokens, from token 30 on"),
        (TEXT[:40] * 3, "a block of 40 tokens"),
        ([int(x) for x in np.random.default_rng(1).integers(0, 2, 400)], "4-grams"),
    ],
    ids=["constant", "collapse", "loop", "paragraph", "babble"],
)
def test_degenerate_outputs_are_named(ids, text):
    assert text in degenerate(ids)


@pytest.mark.parametrize(
    "ids",
    [TEXT, TEXT[:300] + [7] * 30, [7] * 20, [], TEXT[:100] + TEXT[:50]],
    ids=["text", "rule", "short", "none", "quote"],
)
def test_ordinary_outputs_pass(ids):
    assert degenerate(ids) is None
