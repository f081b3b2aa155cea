"""Jobs side by side get different GPUs, more jobs than GPUs are spread evenly, and a job's end gives its GPUs back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "on_gpus.py"
# Says which GPUs it sees, then lives until its input ends.
JOB = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); sys.stdin.read()"


@pytest.fixture
def start(tmp_path):
    job, jobs = tmp_path / "job.py", []
    job.write_text(JOB)

    def start(count, visible="0,1,2,3"):
        environment = {**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": visible}
        command = [sys.executable, SCRIPT, str(count), job]
        jobs.append(
            subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return jobs[-1], jobs[-1].stdout.readline().strip()

    yield start
    for process in jobs:
        process.communicate()


def test_jobs_side_by_side_get_different_gpus(start):
    _, first = start(1)
    second_job, second = start(2)
    _, third = start(1)
    assert (first, second, third) == ("0", "1,2", "3")
    second_job.kill()
    second_job.wait()
    assert start(1)[1] == "1" and start(1)[1] == "2"
    # All are taken: the next jobs share them evenly.
    assert [start(1)[1] for _ in range(5)] == ["0", "1", "2", "3", "0"]


def test_what_a_cluster_gave_is_left_alone(start):
    assert start(2, "5,7")[1] == start(2, "5,7")[1] == "5,7"


def test_a_job_without_gpus_sees_what_it_saw(start):
    assert start(0)[1] == "0,1,2,3"
