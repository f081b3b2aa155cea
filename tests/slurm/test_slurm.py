"""The small experiment through a real Slurm: every stage is a job of its own, and what was cancelled, failed or had no node
continues, to the results of a run without Slurm.

    tests/slurm/run

Minutes on two cores, so not among the default tests. The tests build on each other, in the order of this file.
"""

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from project import SMALL, copy_project, planned

pytestmark = pytest.mark.slurm

SUBMITTED = {
    "fetch_target", "curate_prompts", "select_prompts", "generate_responses", "extract_hidden_states", "build_vocabulary",
    "train_drafter", "evaluate_drafter", "check_drafter", "benchmark", "replay_served", "compare", "report",
}  # fmt: skip
PROFILE = ("--workflow-profile", "profiles/slurm")
BROKEN = 'raise SystemExit("a fault of the test")\n'


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Skips where there is no Slurm: this file is asked for by its marker."""
    python = Path(shutil.which("snakemake") or "snakemake").with_name("python")
    if subprocess.run([python, "-c", "import snakemake_executor_plugin_slurm"], capture_output=True).returncode != 0:
        pytest.skip("snakemake-executor-plugin-slurm is not beside snakemake; start this with tests/slurm/run")
    if shutil.which("sinfo") is None or subprocess.run(["sinfo"], capture_output=True).returncode != 0:
        pytest.skip("no Slurm answers; run tests/slurm/slurm-up.sh")
    yield
    subprocess.run(["scontrol", "update", f"nodename={node()}", "state=resume"], capture_output=True)


def node() -> str:
    return slurm("sinfo", "-h", "-N", "-o", "%N").split()[0]


def start(work: Path, *arguments: str) -> subprocess.Popen:
    """Snakemake with the shipped profile; only asks sooner whether jobs have ended. Its output goes on in output.txt."""
    command = ["snakemake", "--configfile", SMALL, *PROFILE, "--slurm-init-seconds-before-status-checks", "5"]
    return subprocess.Popen(
        [*command, *arguments],
        cwd=work,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=(work / "output.txt").open("a"),
        stderr=subprocess.STDOUT,
    )


def jobs(work: Path) -> list[dict[str, str]]:
    """Jobs of this project that Slurm remembers, in the order of their submission; rule and wildcards are the comment."""
    lines = slurm("scontrol", "show", "jobs", "--oneliner", "--details").splitlines()
    found = [
        dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|$)", line)) | {"line": line}
        for line in lines
        if "Comment=rule_" in line
    ]
    return sorted((job for job in found if str(work) in job["line"]), key=lambda job: int(job["JobId"]))


def wait_for(running: subprocess.Popen, condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 900
    while time.monotonic() < deadline and running.poll() is None:
        if found := condition():
            return found
        time.sleep(0.2)
    pytest.fail(f"{what} was not seen")


def state(work: Path, rule: str, wanted: str) -> list[dict[str, str]]:
    return [job for job in jobs(work) if job["Comment"].startswith(f"rule_{rule}") and job["JobState"] == wanted]


def minutes(job: dict[str, str]) -> int:
    days, _, clock = job["TimeLimit"].rpartition("-")
    hours, mins, _ = map(int, clock.split(":"))
    return (int(days or 0) * 24 + hours) * 60 + mins


def megabytes(job: dict[str, str]) -> float:
    amount, unit = re.fullmatch(r"([\d.]+)([MG])", job["MinMemoryNode"]).groups()
    return float(amount) * {"M": 1, "G": 1024}[unit]


def unfinished(work: Path) -> list[str]:
    """Outputs without the manifest that is written last, and temporary files of atomic writes."""
    data = [*work.glob("results/responses/*.parquet"), *work.glob("results/hidden_states/*.safetensors")]
    torn = [str(p) for p in data if not p.with_name(p.name.split(".")[0] + ".manifest.json").is_file()]
    return torn + [str(p) for p in work.glob("results/**/.*.tmp")]


def processes(work: Path) -> list[str]:
    """What still runs in the project's folder, engines and their workers included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(work):
                found.append(process.name())
    return found


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("a path with spaces") / "break even")


def test_a_cancelled_job_is_tried_again_with_more_and_a_failing_one_stops_the_run(work):
    script = work / "scripts/build_vocabulary.py"
    script.write_text(BROKEN + script.read_text())
    running = start(work, "--retries", "0")

    def generating():
        for job in state(work, "generate_responses", "RUNNING"):
            shard = job["Comment"].rsplit("_", 1)[1]
            log = work / f"logs/generate_responses/shard-{shard}.log"
            if log.is_file() and log.stat().st_size:
                return job["JobId"], shard

    job, shard = wait_for(running, generating, "a running job of generate_responses")
    slurm("scancel", job)
    wait_for(running, lambda: state(work, "generate_responses", "CANCELLED"), "the end of the cancelled job")
    assert not list(work.glob(f"results/responses/shard-{shard}.parquet"))
    assert running.wait(timeout=900) != 0
    output = (work / "output.txt").read_text()
    assert "logs/build_vocabulary/own.log" in output, output[-4000:]
    assert "a fault of the test" in (work / "logs/build_vocabulary/own.log").read_text()
    assert unfinished(work) == [] and not (work / "results/drafters/own/vocabulary.safetensors").exists()
    assert slurm("squeue", "-h") == "" and processes(work) == []

    first, second = (j for j in jobs(work) if j["Comment"] == f"rule_generate_responses_wildcards_{shard}")
    assert (first["JobState"], second["JobState"]) == ("CANCELLED", "COMPLETED")
    assert minutes(second) == 2 * minutes(first) and megabytes(second) == 2 * megabytes(first)
    script.write_text(script.read_text().removeprefix(BROKEN))


def test_a_rerun_continues_and_waits_for_a_drained_node(work):
    shards = {path: path.stat().st_mtime_ns for path in work.glob("results/*/shard-*")}
    assert len(shards) == 8
    running = start(work)
    wait_for(running, lambda: state(work, "train_drafter", "RUNNING"), "the training")
    slurm("scontrol", "update", f"nodename={node()}", "state=drain", "reason=test")
    try:
        # What runs there is let finish; what comes after it waits.
        wait_for(running, lambda: state(work, "train_drafter", "COMPLETED"), "the end of the training")
        [waiting] = wait_for(running, lambda: state(work, "evaluate_drafter", "PENDING"), "a waiting job")
        time.sleep(5)
        assert state(work, "evaluate_drafter", "PENDING") and running.poll() is None
    finally:
        slurm("scontrol", "update", f"nodename={node()}", "state=resume")
    assert running.wait(timeout=900) == 0, (work / "output.txt").read_text()[-8000:]
    assert (work / "results/report/index.html").is_file() and unfinished(work) == []
    assert {path: path.stat().st_mtime_ns for path in shards} == shards
    assert planned(work, *PROFILE) == {} and slurm("squeue", "-h") == ""

    output = (work / "output.txt").read_text()
    assert set(re.findall(r"^Job \d+ has been submitted .*/slurm_logs/rule_(\w+)/", output, re.M)) == SUBMITTED


def test_a_measuring_job_has_its_node_for_itself(work):
    measured = state(work, "benchmark", "COMPLETED")
    assert len(measured) == 2
    for job in measured:
        assert job["OverSubscribe"] == "NO"
        beside = [j for j in jobs(work) if j["StartTime"] < job["EndTime"] and job["StartTime"] < j["EndTime"]]
        assert beside == [job]


def test_the_results_are_those_of_a_run_without_slurm(work, finished):
    names = [str(path.relative_to(work)) for path in work.glob("results/*/shard-*")]
    for name in [*names, "results/prompts/pool.parquet", "results/drafters/own/checkpoint/model.safetensors"]:
        assert (work / name).read_bytes() == (finished / name).read_bytes(), name


def test_gpus_are_asked_of_slurm(work):
    """The node's GPUs are empty files (slurm-up.sh): scheduled, not used."""
    if "gpu" not in slurm("sinfo", "-h", "-o", "%G"):
        pytest.skip("the node has no GPUs")
    shard = "results/hidden_states/shard-000000.safetensors"
    before = (work / shard).read_bytes()
    running = start(
        work, shard, "--force", "--set-resources", "extract_hidden_states:gpu=2", "extract_hidden_states:gpu_model=h200"
    )
    assert running.wait(timeout=900) == 0, (work / "output.txt").read_text()[-8000:]
    assert "JOB_GRES=gpu:h200:2" in jobs(work)[-1]["line"] and (work / shard).read_bytes() == before
