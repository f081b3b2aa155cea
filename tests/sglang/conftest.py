"""Tests of envs/sglang-cpu, in SGLang's CPU environment: .envs/sglang-cpu/bin/python -m pytest tests/sglang"""

import sys
from pathlib import Path

import pytest

STAND_IN = Path(__file__).parents[2] / "envs" / "sglang-cpu"
sys.path.insert(0, str(STAND_IN))


@pytest.fixture
def stand_in():
    return STAND_IN
