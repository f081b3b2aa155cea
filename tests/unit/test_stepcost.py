import math

import numpy as np
import pytest

from breakeven import stepcost


def test_break_even_is_where_the_prediction_is_one():
    for rho in (1.2, 2.58, 3.57):
        assert stepcost.predicted_speedup(rho, rho) == 1
    assert stepcost.predicted_speedup(3.46, 3.57) == pytest.approx(0.969, abs=1e-3)
    assert stepcost.ceiling(3, 1.5) == pytest.approx(4 / 1.5)


@pytest.mark.parametrize("rho", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_rho_is_refused(rho):
    with pytest.raises(ValueError, match="rho"):
        stepcost.ceiling(3, rho)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 15])
@pytest.mark.parametrize("c", [0.1, 0.5, 0.72, 0.99])
def test_needed_conditional_inverts_the_length(k, c):
    assert stepcost.needed_conditional(stepcost.length_at(c, k), k) == pytest.approx(c, abs=1e-9)


def test_needed_conditional_at_the_ends():
    assert stepcost.needed_conditional(0.9, 3) == 0
    assert stepcost.needed_conditional(4.0, 3) == pytest.approx(1)
    assert stepcost.needed_conditional(4.01, 3) is None


def test_best_k_against_exhaustive_search():
    rng = np.random.default_rng(0)
    for _ in range(200):
        marginal = np.cumprod(rng.uniform(0.2, 0.95, 6))
        rho = {k: float(a) for k, a in enumerate(np.cumsum(rng.uniform(0, 0.4, 6)) + 1.1, start=1)}
        options = {0: 1.0} | {k: (1 + marginal[:k].sum()) / rho[k] for k in rho}
        found = stepcost.best_k(marginal, rho)
        assert options[found.k] == pytest.approx(max(options.values()))
        assert found.speedup == pytest.approx(options[found.k])


def test_measured_step_costs_give_a_best_k_of_two_or_three():
    """docs/design.md, sections 11 and 12: break-even of the default target by K, and the 48K drafter's curve."""
    rho = dict(zip(range(1, 6), (1.21, 1.19, 1.22, 1.27, 1.32), strict=True))
    ten = np.diff([1, 1.60, 1.90, 2.06, 2.15, 2.19])
    assert stepcost.best_k(ten, rho).k == 4  # many samples: deeper drafts still pay
    small = np.diff([1, 1.30, 1.39, 1.43, 1.44, 1.445])
    assert stepcost.best_k(small, rho).k in (2, 3)


def test_position_pays_iff_the_speedup_rises():
    rng = np.random.default_rng(1)
    for _ in range(300):
        length, m = rng.uniform(1.1, 4), rng.uniform(0, 0.9)
        rho = rng.uniform(1, 3)
        after = rho + rng.uniform(0, 0.5)
        assert stepcost.position_pays(m, length, rho, after) == ((length + m) / after > length / rho)


def test_extend_keeps_the_last_conditional():
    assert stepcost.extend([0.6, 0.3], 4) == pytest.approx([0.6, 0.3, 0.15, 0.075])
    assert stepcost.extend([0.6, 0.3], 1) == pytest.approx([0.6])
    assert stepcost.extend([0.0], 3) == pytest.approx([0, 0, 0])


def test_the_fit_recovers_a_line_and_covers_it():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(500):
        points = [(k, 1.1 + 0.07 * k + 0.02 * rng.standard_normal()) for k in (1, 2, 3, 5) for _ in range(2)]
        low, high = stepcost.fit(points).interval(4)
        hits += low <= 1.1 + 0.28 <= high
    assert 0.92 <= hits / 500 <= 0.98
    line = stepcost.fit([(1, 1.2), (3, 1.4), (5, 1.6)])
    assert (line.a, line.b) == (pytest.approx(1.1), pytest.approx(0.1))


def test_a_fit_without_repeats_says_that_it_knows_nothing():
    line = stepcost.fit([(1, 1.2), (3, 1.4)])
    assert line.at(2) == pytest.approx(1.3) and line.interval(2) == (-math.inf, math.inf)
    with pytest.raises(ValueError, match="two different K"):
        stepcost.fit([(3, 1.2), (3, 1.3)])


def test_step_cost_prefers_what_was_measured():
    cost = stepcost.StepCost([(1, 1.2), (3, 1.6), (3, 1.8)], "here")
    assert cost.at(3) == pytest.approx(math.sqrt(1.6 * 1.8))
    assert cost.at(2) == pytest.approx(cost.line.at(2))
    assert cost.at(6) is not None and cost.at(7) is None  # not far beyond what was measured
    assert stepcost.StepCost([(3, 1.5)], "one").known() == {3: 1.5}
    assert min(stepcost.StepCost([(3, 1.7), (5, 3.9)], "steep").known()) == 3  # the line is below 1 at K = 2


def test_table_shows_what_each_k_needs():
    rows = stepcost.table(stepcost.StepCost([(1, 1.2), (2, 1.3)], "here"), [0.5, 0.3])
    assert [row["k"] for row in rows] == [1, 2, 3, 4]
    assert rows[1]["speedup"] == pytest.approx(1.8 / 1.3) and rows[3]["speedup"] is None
    assert stepcost.length_at(rows[0]["needed_conditional"], 1) == pytest.approx(1.2)


def test_a_published_gap_is_split_into_acceptance_and_cost():
    """B089: 4.4x published, 1.5x here; B090: the same acceptance, so all of it is cost."""
    parts = stepcost.split(4.4, 6.0, 1.5, 3.0)
    assert parts.acceptance * parts.cost == pytest.approx(parts.total) == pytest.approx(4.4 / 1.5)
    assert parts.acceptance == 2 and parts.acceptance_share == pytest.approx(math.log(2) / math.log(4.4 / 1.5))
    assert stepcost.split(378, 5.39, 276, 5.36).acceptance_share == pytest.approx(0.018, abs=0.002)
