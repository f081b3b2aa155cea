import numpy as np
import pytest

from breakeven import acceptance


def test_histogram_of_sglang():
    steps, counts = acceptance.from_histogram([39, 1, 0, 3])
    assert (steps, counts.tolist()) == (43, [4, 3, 3])
    assert acceptance.acceptance_length(steps, counts.sum(), k=3) == pytest.approx(1.2326, abs=5e-5)
    assert acceptance.acceptance_rate(steps, counts.sum(), k=3) == pytest.approx(0.0775, abs=5e-5)
    assert acceptance.marginal(steps, counts) == pytest.approx([4 / 43, 3 / 43, 3 / 43])
    assert acceptance.conditional(steps, counts) == pytest.approx([4 / 43, 3 / 4, 1])


def test_conditional_is_nan_where_a_position_was_never_reached():
    assert acceptance.conditional(10, [5, 0, 0])[:2] == pytest.approx([0.5, 0])
    assert np.isnan(acceptance.conditional(10, [5, 0, 0])[2])


@pytest.mark.parametrize(
    "mask, run", [([1, 0, 1, 1], 1), ([0, 1, 1], 0), ([1, 1, 1], 3), ([], 0)], ids=["gap", "none", "all", "empty"]
)
def test_only_the_leading_run_counts(mask, run):
    assert acceptance.leading_run(np.array(mask, dtype=bool)) == run


@pytest.mark.parametrize(
    "counts, text",
    [
        ((10, [11, 2]), "position 1 accepted 11 times in 10 steps"),
        ((10, [4, 5]), "position 2 accepted more often"),
        ((10, [4, 3], 8), "add up to 7"),
        ((10, [4, 3], 7, 6), "acceptance rate above 1"),
        ((10, [10, 10], 21), "above K + 1 = 3"),
        ((0, [1]), "without a verification step"),
        ((10, [-1]), "negative"),
    ],
)
def test_impossible_counts_are_named(counts, text):
    assert text in "; ".join(acceptance.impossible(*counts))
    with pytest.raises(acceptance.ImpossibleCounts):
        acceptance.check(*counts)


def test_possible_counts_pass():
    assert acceptance.impossible(10, [7, 3, 3], accepted=13, drafted=30) == []
    assert acceptance.impossible(0, [0, 0]) == []


def test_impossible_lengths_and_rates_raise():
    with pytest.raises(acceptance.ImpossibleCounts, match=r"above K \+ 1 = 4"):
        acceptance.acceptance_length(10, 31, k=3)
    with pytest.raises(acceptance.ImpossibleCounts, match="rate above 1"):
        acceptance.acceptance_rate(10, 31, k=3)
    with pytest.raises(acceptance.ImpossibleCounts):
        acceptance.from_histogram([3, -1])


def test_wilson_agrees_with_scipy_and_stays_within_bounds():
    from scipy.stats import binomtest

    for successes, n in [(0, 20), (3, 20), (20, 20), (604, 1000)]:
        expected = binomtest(successes, n).proportion_ci(method="wilson")
        assert np.allclose(acceptance.wilson(successes, n), (expected.low, expected.high))
    assert acceptance.wilson(0, 0) == (0, 1)


def test_agreement_holds_its_level_and_finds_a_layer_fault():
    rng = np.random.default_rng(1)
    conditional = [0.60, 0.67, 0.75]

    def run(steps, factor=1.0):
        counts, left = [], steps
        for c in conditional:
            left = rng.binomial(left, c * factor)
            counts.append(left)
        return steps, counts

    rejected = sum(not acceptance.agreement(run(1500), run(4000), floor=0).agree for _ in range(400))
    assert rejected <= 0.08 * 400
    assert not acceptance.agreement(run(1500), run(4000, factor=0.85)).agree
    # 1 % apart in a million steps is engine numerics, not a fault
    a, b = (1_000_000, [600_000, 400_000]), (1_000_000, [610_000, 405_000])
    assert acceptance.agreement(a, b).agree and not acceptance.agreement(a, b, floor=0).agree


def test_curves_of_different_k_are_not_compared():
    with pytest.raises(ValueError, match="K = 1 and K = 2"):
        acceptance.agreement((10, [1]), (10, [1, 1]))
