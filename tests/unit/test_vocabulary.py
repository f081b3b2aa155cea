"""The draft vocabulary: size, order, what is always in, offsets."""

import numpy as np
import pytest

from breakeven import vocabulary
from breakeven.cli import UserError


def counts_of(seen: dict[int, int], size: int = 1000) -> np.ndarray:
    counts = np.zeros(size, dtype=np.int64)
    for token, n in seen.items():
        counts[token] = n
    return counts


def test_a_small_corpus_is_filled_to_the_full_size_with_unused_ids():
    counts = counts_of({900 + i: 1 for i in range(50)})
    ids = vocabulary.choose(counts, 800, [2])
    assert len(ids) == len(set(ids)) == 800 and (np.diff(ids) > 0).all()
    assert set(range(900, 950)) <= set(ids) and 2 in ids
    assert set(ids) - set(range(900, 950)) == set(range(750))


def test_the_most_frequent_are_in_and_specials_always():
    counts = counts_of({5: 10, 6: 9, 7: 9, 8: 1})
    assert vocabulary.choose(counts, 3, []).tolist() == [5, 6, 7]
    assert vocabulary.choose(counts, 3, [999]).tolist() == [5, 6, 999]
    assert vocabulary.choose(counts, 3, [999, 1000]).tolist() == [5, 6, 999]  # 1000: the target has no such row
    assert vocabulary.choose(counts, 2, [998, 999]).tolist() == [998, 999]


@pytest.mark.parametrize(
    "size, always, said", [(0, [], "between 1"), (1001, [], "between 1"), (1, [1, 2], "2 special")]
)
def test_impossible_sizes_are_named(size, always, said):
    with pytest.raises(UserError, match=said):
        vocabulary.choose(counts_of({}), size, always)


def test_maps_are_offsets_that_agree():
    ids = np.array([0, 1, 7, 300])
    d2t, t2d = vocabulary.maps(ids, 1000)
    assert d2t.dtype == np.int64 and d2t.tolist() == [0, 0, 5, 297] and np.flatnonzero(t2d).tolist() == ids.tolist()
    assert vocabulary.target_ids(d2t).tolist() == ids.tolist()


def test_the_whole_vocabulary_has_zero_offsets():
    ids = vocabulary.choose(counts_of({1: 1}), 1000, [])
    assert not vocabulary.maps(ids, 1000)[0].any()


def test_coverage():
    counts = counts_of({1: 3, 2: 1})
    assert vocabulary.coverage(counts, np.array([1])) == 0.75
    assert vocabulary.coverage(counts_of({}), np.array([1])) is None


def test_a_cropped_vocabulary_keeps_the_most_frequent_and_its_own_special_tokens():
    ids = np.array([2, 5, 7, 9, 12])
    counts = counts_of({2: 1, 5: 0, 7: 8, 9: 3, 12: 2, 900: 99})
    assert ids[vocabulary.keep(counts, ids, 2, [])].tolist() == [7, 9]
    assert ids[vocabulary.keep(counts, ids, 3, [5, 900])].tolist() == [5, 7, 9]
    with pytest.raises(UserError, match="--size 6: the drafter's vocabulary has 5 tokens"):
        vocabulary.keep(counts, ids, 6, [])
