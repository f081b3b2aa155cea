"""Running and planning the workflow in a copy of the project, at a path with a space in it."""

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = "tests/workflow/small.yaml"
ARMS = "vllm-shipped-k5"  # left out of the small experiment: one server less


def copy_project(folder: Path, every_arm: bool = False) -> Path:
    """The files that git tracks (or would), with the environments linked in; without the arms ARMS unless asked for."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    config = folder / "config.yaml"
    if not every_arm:
        config.write_text("".join(line for line in config.read_text().splitlines(True) if ARMS not in line))
    (folder / ".envs").symlink_to(ROOT / ".envs")
    return folder


def linked_copy(finished: Path, work: Path) -> Path:
    """A finished run to change: hard links for results, which no test edits, copies of everything else."""

    def link(source, destination):
        if "/results/" in source and not source.endswith(".json"):
            os.link(source, destination)
        else:
            shutil.copy2(source, destination)

    return shutil.copytree(finished, work, symlinks=True, copy_function=link)


def snakemake(work: Path, *arguments: str, config: str | list[str] | None = SMALL) -> subprocess.CompletedProcess:
    overlays = [config] if isinstance(config, str) else config or []
    command = ["snakemake", *(["--configfile", *overlays] if overlays else []), *arguments]
    return subprocess.run(command, cwd=work, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def planned(work: Path, *arguments: str, config: str | list[str] | None = SMALL) -> dict[str, int]:
    """Jobs by rule of a dry run, without the target rule `all`."""
    done = snakemake(work, "--dry-run", *arguments, config=config)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    table = re.search(r"Job stats:\n.*?\n-+.*?\n(.*?)\ntotal", output, re.S)
    if table is None:
        assert "Nothing to be done" in output, output
        return {}
    jobs = Counter({rule: int(n) for rule, n in (line.split() for line in table[1].splitlines())})
    jobs.pop("all", None)
    return dict(jobs)


def planned_files(work: Path, config: str | list[str] | None = SMALL) -> set[str]:
    """Outputs of the jobs of a dry run."""
    done = snakemake(work, "--dry-run", config=config)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^    output: (.*)$", done.stdout + done.stderr, re.M)
    return {path for line in lines for path in line.split(", ")}
