"""The paired likelihood: faults that leave the mean alone are named output by output, and arithmetic alone is not."""

import numpy as np
import pytest

from breakeven import verdict
from breakeven.verdict import Counts

OUTPUTS, STEPS, K = 16, 50, 3


def outputs(taken):
    """taken [outputs, steps]: draft tokens accepted in each step."""
    return [Counts(STEPS, tuple(int((row >= i).sum()) for i in range(1, K + 1))) for row in taken]


def pooled(counts):
    return Counts(sum(c.steps for c in counts), tuple(np.sum([c.accepted for c in counts], axis=0).tolist()))


def draw(rng):
    """Accepted tokens of each step by a drafter with conditional acceptance 0.5."""
    return np.minimum(rng.geometric(0.5, (OUTPUTS, STEPS)) - 1, K)


def disturbed(rng, taken, share):
    """The same steps, of which a share turns out anew."""
    return np.where(rng.random(taken.shape) < share, draw(rng), taken)


def judge(served, walks):
    walks = {name: outputs(taken) for name, taken in walks.items()}
    served = outputs(served)
    by_output = verdict.paired(served, walks)
    return verdict.integration(pooled(served), None, {n: pooled(c) for n, c in walks.items()}, by_output)


def experiment(seed, served_as):
    """As built, and two faults that change a fifth of all steps but not the acceptance; numerics change 1.5 %."""
    rng = np.random.default_rng(seed)
    built = draw(rng)
    walks = {"as-built": built, "theta-10000": disturbed(rng, built, 0.2), "layers-minus-1": disturbed(rng, built, 0.2)}
    return judge(disturbed(rng, walks[served_as], 0.015), walks)


def test_a_fault_with_the_same_acceptance_is_named():
    named = [experiment(seed, "theta-10000") for seed in range(100)]
    assert all(set(found.faults) <= {"theta-10000", "layers-minus-1"} for found in named)
    assert sum(found.faults == ("theta-10000",) for found in named) >= 90


def test_pooled_counts_alone_do_not_see_it():
    rng = np.random.default_rng(0)
    built = draw(rng)
    other = disturbed(rng, built, 0.2)
    counts = {"as-built": pooled(outputs(built)), "theta-10000": pooled(outputs(other))}
    assert verdict.integration(counts["theta-10000"], None, counts).rejected is False


def test_nothing_is_named_where_nothing_is_wrong():
    assert sum(experiment(seed, "as-built").rejected for seed in range(200)) <= 2


def test_a_fault_outside_the_list_is_not_named():
    rng = np.random.default_rng(3)
    built = draw(rng)
    found = judge(disturbed(rng, built, 0.8), {"as-built": built, "theta-10000": disturbed(rng, built, 0.2)})
    assert found.rejected is True and found.faults == ()
    assert "none of the 1 hypotheses explains" in found.evidence[-1]


def test_outputs_must_be_the_same_ones():
    with pytest.raises(ValueError):
        verdict.paired([Counts(10, (5,))], {"as-built": [Counts(10, (5,)), Counts(10, (4,))]})
