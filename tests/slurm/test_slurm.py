"""The small experiment through a real Slurm: every stage is a job of its own, and what was cancelled continues.

    bash tests/slurm/slurm-up.sh && python -m pytest -m slurm tests/slurm

Minutes on two cores, so not among the default tests. Needs snakemake-executor-plugin-slurm beside Snakemake.
"""

import importlib.util
import os
import shutil
import subprocess
import time

import pytest

from project import SMALL, copy_project

pytestmark = pytest.mark.slurm

SUBMITTED = (
    "fetch_target", "curate_prompts", "select_prompts", "generate_responses", "extract_hidden_states", "build_vocabulary",
    "train_drafter", "evaluate_drafter", "check_drafter", "benchmark", "replay_served", "compare", "report",
)  # fmt: skip


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Skips where there is no Slurm: this file is asked for by its marker."""
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        pytest.skip("snakemake-executor-plugin-slurm is not installed beside Snakemake")
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode != 0:
        pytest.skip("no Slurm answers; run tests/slurm/slurm-up.sh")


def command(*arguments: str) -> list[str]:
    # The node of a test is small: less memory than a cluster is asked for.
    memory = [f"{rule}:mem_mb=2500" for rule in SUBMITTED]
    resources = ["--set-resources", *memory, "benchmark:machine=600", "benchmark:slurm_extra='--exclusive'"]
    profile = ["--workflow-profile", "profiles/slurm", "--slurm-keep-successful-logs"]
    return ["snakemake", "--configfile", SMALL, *profile, *resources, *arguments]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("a path with spaces") / "break even")


def unfinished(work) -> list[str]:
    """Outputs without the manifest that is written last, and temporary files of atomic writes."""
    data = [*work.glob("results/responses/*.parquet"), *work.glob("results/hidden_states/*.safetensors")]
    torn = [str(p) for p in data if not p.with_name(p.name.split(".")[0] + ".manifest.json").is_file()]
    return torn + [str(p) for p in work.glob("results/**/.*.tmp")]


def test_a_cancelled_job_leaves_nothing_half_written(work):
    """Cancelled while it generates; the run fails, and the next test continues it."""
    running = subprocess.Popen(
        command("--retries", "0"), cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and running.poll() is None:
        # The plugin writes the rule into the job's comment.
        jobs = [line.split(maxsplit=1) for line in slurm("squeue", "-h", "-t", "R", "-o", "%A %k").splitlines()]
        chosen = [job for job, comment in jobs if "generate_responses" in comment]
        if chosen:
            slurm("scancel", chosen[0])
            break
        time.sleep(1)
    else:
        pytest.fail("no job of generate_responses was seen")
    assert running.wait(timeout=900) != 0
    assert unfinished(work) == []
    assert not (work / "results/report/index.html").exists()


def test_the_small_experiment_runs_through_slurm(work):
    done = subprocess.run(command(), cwd=work, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert (work / "results/report/index.html").is_file() and unfinished(work) == []
    logs = {path.name.removeprefix("rule_") for path in (work / ".snakemake/slurm_logs").iterdir()}
    assert set(SUBMITTED) <= logs
    again = subprocess.run(command("--dry-run"), cwd=work, capture_output=True, text=True)
    assert "Nothing to be done" in again.stdout + again.stderr
    assert slurm("squeue", "-h", "-u", str(os.getuid())) == ""
