import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import project  # noqa: E402


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A copy of the project in which the small experiment has run, every stage on real parts."""
    work = project.copy_project(tmp_path_factory.mktemp("a path with spaces") / "break even")
    done = project.snakemake(work)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return work
