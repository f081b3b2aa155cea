"""Whatever happens to a run, the next one mends it: harness.py says what is checked.

pytest tests/faults -m "not nightly"                 ten seeds
pytest tests/faults -m nightly --seeds 0-99          a hundred; BREAKEVEN_FAULT_TABLE=FOLDER keeps their table
"""

import pytest

pytestmark = [pytest.mark.workflow, pytest.mark.engines]


def test_a_fault_leaves_nothing_behind(hit, ci_seed):
    hit(ci_seed)


@pytest.mark.nightly
def test_a_fault_of_the_night_leaves_nothing_behind(hit, nightly_seed):
    hit(nightly_seed)
