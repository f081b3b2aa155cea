"""Fixtures of tests that work on the project's own config."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_the_root(monkeypatch):
    """The config names its files from the project's root."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config():
    return yaml.safe_load((ROOT / "config.yaml").read_text())
