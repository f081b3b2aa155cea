"""A finished run of the small experiment, shared by all tests that need one."""

import pytest

import project


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A copy of the project in which the small experiment has run, every stage on real parts."""
    work = project.copy_project(tmp_path_factory.mktemp("a path with spaces") / "break even")
    done = project.snakemake(work)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return work
