"""A finished run of the small experiment, shared by all tests that need one."""

import os
from pathlib import Path

import pytest

import project


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A copy of the project in which the small experiment has run, every stage on real parts.

    BREAKEVEN_FINISHED names one that an earlier session made, to save the minutes while tests are being written.
    """
    if os.environ.get("BREAKEVEN_FINISHED"):
        return Path(os.environ["BREAKEVEN_FINISHED"])
    work = project.copy_project(tmp_path_factory.mktemp("a path with spaces") / "break even")
    done = project.snakemake(work)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return work
