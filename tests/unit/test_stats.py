import numpy as np
import pytest

from breakeven import stats


def experiments(n, prompts, passes, effect, heterogeneity, noise, drift, seed):
    """Rates of n simulated experiments: (arm, baseline), each [n, prompts, passes]."""
    rng = np.random.default_rng(seed)
    level = np.log(30) + 0.2 * rng.standard_normal((n, prompts, 1))

    def rates(shift):
        passes_effect = drift * rng.standard_normal((n, 1, passes))
        return np.exp(level + shift + passes_effect + noise * rng.standard_normal((n, prompts, passes)))

    gain = effect + heterogeneity * rng.standard_normal((n, prompts, 1))
    return rates(gain), rates(0)


@pytest.mark.parametrize("prompts", [5, 20])
@pytest.mark.parametrize("heterogeneity, noise", [(0.08, 0.03), (0.02, 0.05)])
def test_coverage_of_the_interval(prompts, heterogeneity, noise):
    truth = np.log(1.3)
    arm, baseline = experiments(1000, prompts, 3, truth, heterogeneity, noise, drift=0, seed=prompts)
    result = stats.compare(arm, baseline)
    coverage = np.mean((np.log(result.low) <= truth) & (truth <= np.log(result.high)))
    assert 0.92 <= coverage <= 0.97


@pytest.mark.parametrize("prompts", [5, 20])
@pytest.mark.parametrize("noise, drift", [(0.03, 0.0), (0.01, 0.03), (0.02, 0.01)], ids=["noise", "drift", "both"])
def test_identical_servers_are_undecided(prompts, noise, drift):
    arm, baseline = experiments(1000, prompts, 3, 0.0, 0.0, noise, drift, seed=3)
    assert np.mean(stats.compare(arm, baseline).verdict == "undecided") >= 0.95


def test_a_plain_percentile_interval_would_fail():
    """Why the interval is corrected: without it, 5 prompts give about 83 %."""
    truth = 0.3
    arm, baseline = experiments(1000, 5, 3, truth, 0.08, 0.03, drift=0, seed=5)
    values = stats.log_ratios(arm, baseline)
    rng = np.random.default_rng(0)
    means = values @ (rng.multinomial(5, [0.2] * 5, size=2000) / 5).T
    low, high = np.quantile(means, [0.025, 0.975], axis=-1)
    assert np.mean((low <= truth) & (truth <= high)) < 0.90


@pytest.mark.parametrize("effect, word", [(np.log(1.4), "faster"), (np.log(0.66), "slower")])
def test_real_effects_are_found(effect, word):
    arm, baseline = experiments(200, 5, 3, effect, 0.08, 0.03, drift=0.01, seed=4)
    assert np.mean(stats.compare(arm, baseline).verdict == word) > 0.95


def test_speedup_is_the_geometric_mean_over_prompts_of_pass_averages():
    baseline = np.array([[10.0, 10], [20, 20], [10, 40], [8, 8], [5, 5]])
    arm = baseline * np.array([[2.0], [0.5], [1], [1], [4]])
    assert stats.compare(arm, baseline).speedup == pytest.approx(4 ** (1 / 5))


def test_common_drift_of_passes_is_seen_by_the_floor_only():
    """All prompts of one pass slow down together: the interval over prompts is blind to it, the floor is not."""
    baseline = np.full((6, 3), 30.0) * np.exp(np.linspace(0, 0.05, 6))[:, None]
    arm = baseline * np.array([1.0, 1.0, 1.12])
    result = stats.compare(arm, baseline)
    assert result.low > 1 and result.verdict == "undecided"


def test_too_little_data_is_never_decided():
    arm, baseline = np.full((4, 3), 60.0), np.full((4, 3), 30.0)
    assert stats.compare(arm, baseline).verdict == "undecided"  # four prompts
    arm, baseline = np.full((5, 1), 60.0), np.full((5, 1), 30.0)
    assert stats.compare(arm, baseline).verdict == "undecided"  # no pass was repeated
    thrice = np.full((5, 3), 30.0)
    assert stats.compare(arm, thrice).verdict == stats.compare(thrice, arm).verdict == "undecided"  # one was not
    assert stats.compare(np.full((5, 2), 60.0), np.full((5, 2), 30.0)).verdict == "faster"


def test_bad_arguments():
    with pytest.raises(ValueError, match="not paired"):
        stats.compare(np.ones((5, 3)), np.ones((4, 3)))
    with pytest.raises(ValueError, match="positive"):
        stats.compare(np.zeros((5, 3)), np.ones((5, 3)))
    with pytest.raises(ValueError, match="two values"):
        stats.bootstrap_interval(np.array([1.0]))


@pytest.mark.parametrize("prompts", [5, 20])
@pytest.mark.parametrize("noise, drift", [(0.03, 0.0), (0.01, 0.03), (0.02, 0.01)], ids=["noise", "drift", "both"])
def test_looking_after_every_pass_stays_below_five_percent(prompts, noise, drift):
    """Identical servers, six passes, stopped at the first decision and then judged by `compare`."""
    wrong = 0
    arms, baselines = experiments(400, prompts, 6, 0.0, 0.0, noise, drift, seed=9)
    for arm, baseline in zip(arms, baselines, strict=True):
        passes = next((n for n in range(1, 6) if stats.enough(arm[:, :n], baseline[:, :n])), 6)
        wrong += stats.compare(arm[:, :passes], baseline[:, :passes]).verdict != "undecided"
    assert wrong / 400 <= 0.05


def test_a_plain_rule_at_every_look_would_err_too_often():
    """Why the interim looks are stricter."""
    arms, baselines = experiments(400, 20, 6, 0.0, 0.0, 0.01, 0.03, seed=9)
    decided = np.zeros(400, bool)
    for n in range(2, 7):
        decided |= stats.compare(arms[..., :n], baselines[..., :n]).verdict != "undecided"
    assert decided.mean() > 0.06


def test_a_clear_effect_stops_early_and_an_unclear_one_goes_on():
    arms, baselines = experiments(50, 5, 6, np.log(1.5), 0.03, 0.01, 0.005, seed=1)
    early = [stats.enough(a[:, :3], b[:, :3]) for a, b in zip(arms, baselines, strict=True)]
    assert np.mean(early) > 0.9
    arm, baseline = experiments(1, 5, 6, 0.0, 0.03, 0.03, 0.01, seed=2)
    assert not stats.enough(arm[0, :, :5], baseline[0, :, :5])


def test_one_pass_or_few_prompts_are_never_enough_early():
    assert not stats.enough(np.full((5, 1), 60.0), np.full((5, 1), 30.0))
    assert not stats.enough(np.full((4, 2), 60.0), np.full((4, 2), 30.0))
