"""Faults in a finished run of the small experiment: drawn from a seed, applied, and what is left afterwards.

`draw(seed, ...)` says what happens to which job at which moment. `Work.apply` does it in a copy of the finished run and
checks three things: no process is left, nothing half-written stands under the name of a result, and the next run ends with
the same bytes as an undisturbed one. Jobs run with the very command that Snakemake would use, alone or under Snakemake.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from breakeven import artefacts
from project import SMALL, linked_copy, planned, snakemake

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
DAMAGES = ["flipped byte", "truncated"]
KINDS = ["rule, SIGKILL", "flipped byte", "full disk", "rule, SIGTERM", "truncated", "rule, SIGINT"]
SNAKEMAKE_KINDS = ["Snakemake, SIGKILL", "rule, SIGKILL", "Snakemake, SIGTERM", "flipped byte", "Snakemake, SIGINT"]
SERVER_KINDS = [
    "rule, SIGKILL", "engine, SIGKILL", "engine's child, SIGKILL", "port taken", "rule, SIGTERM", "engine, SIGTERM",
    "engine's child, SIGTERM", "rule, SIGINT",
]  # fmt: skip
# Of a hundred seeds, how many for each way to run a job and each stage; those with an engine take minutes.
SHARES = {
    ("script", "select_prompts"): (5, KINDS), ("script", "curate_prompts"): (4, KINDS),
    ("script", "extract_hidden_states"): (11, KINDS), ("script", "build_vocabulary"): (9, KINDS),
    ("script", "train_drafter"): (17, KINDS), ("script", "evaluate_drafter"): (8, KINDS),
    ("script", "check_drafter"): (5, KINDS), ("script", "replay_served"): (6, KINDS), ("script", "compare"): (7, KINDS),
    ("script", "report"): (6, KINDS), ("script", "benchmark"): (8, SERVER_KINDS),
    ("script", "generate_responses"): (2, ["rule, SIGKILL", "rule, SIGTERM"]),
    ("snakemake", "select_prompts"): (2, SNAKEMAKE_KINDS), ("snakemake", "evaluate_drafter"): (2, SNAKEMAKE_KINDS[2:]),
    ("snakemake", "train_drafter"): (4, SNAKEMAKE_KINDS), ("snakemake", "compare"): (2, SNAKEMAKE_KINDS[3:]),
    ("snakemake", "report"): (2, SNAKEMAKE_KINDS[1:]),
}  # fmt: skip
TARGET_FILES = {
    "config.json": ("select_prompts", "extract_hidden_states", "train_drafter", "evaluate_drafter", "replay_served"),
    "tokenizer.json": ("curate_prompts", "build_vocabulary", "generate_responses", "benchmark"),
    "model.safetensors": (
        "generate_responses", "extract_hidden_states", "train_drafter", "evaluate_drafter", "replay_served", "benchmark",
    ),
}  # fmt: skip
# Differs from run to run by its nature: speed, and seconds in what was measured.
VOLATILE = ("speed.json",)
SOONEST_S = 0.05  # before a job can have done anything
GONE_S = 90  # processes may take this long to end: a server gets a grace period


@dataclass(frozen=True)
class Fault:
    """What happens: how the job is run (script | snakemake), to which stage, what, and when (a share of its time)."""

    seed: int
    how: str
    stage: str
    kind: str
    moment: float
    place: float  # which file, which byte, how large the disk is

    @property
    def name(self) -> str:
        return f"{self.seed}-{self.how}-{self.stage}-{self.kind}".replace(", ", "-").replace(" ", "-").replace("'", "")


def deck() -> list[tuple[str, str, str]]:
    """(how, stage, kind) of seeds 0 to 99, in an order that mixes stages."""
    cards = []
    for number, ((how, stage), (n, kinds)) in enumerate(SHARES.items()):
        cards += [(how, stage, kinds[(number * (kinds is KINDS) + i) % len(kinds)]) for i in range(n)]
    random.Random(0).shuffle(cards)
    return cards


DECK = deck()


def draw(seed: int) -> Fault:
    """The fault of a seed, the same in every session; seed + 100 is the same kind at another moment."""
    dice = random.Random(seed)
    return Fault(seed, *DECK[seed % len(DECK)], dice.random(), dice.random())


@dataclass
class Job:
    """A job as Snakemake would run it."""

    rule: str
    inputs: list[str]
    outputs: list[str]
    log: str
    command: str

    @property
    def folder(self) -> str:
        """The folder that its outputs lie in, or for a checkpoint the one above, where its partial state lies too."""
        folder = os.path.dirname(self.outputs[0])
        return os.path.dirname(folder) if folder.endswith("/checkpoint") else folder


def jobs(finished: Path) -> dict[str, Job]:
    """One job of each rule (the last shard, the plain arm) with the command that a dry run shows."""
    done = snakemake(finished, "--dry-run", "--forceall", "--printshellcmds")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for block in re.split(r"\n(?=rule |localrule )", done.stdout + done.stderr):
        rule, command = re.match(r"(?:local)?rule (\w+):", block), re.search(r"^Shell command: (.+)$", block, re.M)
        if not rule or not command or "    log: " not in block:
            continue
        listed = {name: re.search(rf"^    {name}: (.+)$", block, re.M) for name in ("input", "output", "log")}
        lists = {name: match[1].split(", ") if match else [] for name, match in listed.items()}
        if rule[1] == "benchmark" and "vllm-plain" not in lists["output"][0]:
            continue
        # Often enough that a run of seconds has a state to resume from.
        words = command[1].replace(" --out ", " --save-every 0.5 --out ", rule[1] == "train_drafter")
        found[rule[1]] = Job(rule[1], lists["input"], lists["output"], lists["log"][0], words)
    return found


@dataclass
class Usual:
    """An undisturbed run of a job: its seconds and the sha256 of what it wrote."""

    seconds: float
    sha256: dict[str, str]


@dataclass
class Outcome:
    """What became of a fault, for the table."""

    fault: Fault
    happened: str = ""  # how the disturbed run ended
    recovered: str = ""  # what the next run did
    failed: str = ""  # which guarantee did not hold

    def row(self) -> dict[str, str]:
        fault = self.fault
        return {
            "seed": str(fault.seed), "how": fault.how, "stage": fault.stage, "kind": fault.kind,
            "moment": f"{fault.moment:.3f}", "happened": self.happened, "next run": self.recovered,
            "outcome": f"FAILED: {self.failed}" if self.failed else "held",
        }  # fmt: skip


@dataclass
class Faults:
    """A finished run, its jobs, and their undisturbed results, measured when first needed."""

    finished: Path
    jobs: dict[str, Job]
    usual: dict[str, Usual] = field(default_factory=dict)

    def usual_of(self, rule: str, folder: Path) -> Usual:
        """Seconds and results of an undisturbed run, made once for a finished run and a number of cores.

        Not the finished run's own results: on one core training rounds otherwise than on two.
        """
        if rule not in self.usual:
            cores = len(os.sched_getaffinity(0))
            known = self.finished / "logs" / "undisturbed" / f"{rule}-{cores}-cores.json"
            if not known.is_file():
                work, job = Work(self, folder / "undisturbed"), self.jobs[rule]
                work.clear(job)
                started = time.monotonic()
                code = work.start(job).wait()
                assert code == 0, work.log(job)
                artefacts.write_json(known, {"seconds": time.monotonic() - started, "sha256": work.results(job)})
                shutil.rmtree(work.folder)
            self.usual[rule] = Usual(**artefacts.read_json(known))
        return self.usual[rule]

    def apply(self, fault: Fault, folder: Path, outcome: Outcome) -> None:
        """Apply a fault in a copy of the finished run; an AssertionError says which guarantee does not hold."""
        usual = self.usual_of(fault.stage, folder)
        work, job = Work(self, folder / "a work folder"), self.jobs[fault.stage]
        work.clear(job)
        with work.ended():
            if fault.how == "snakemake":
                under_snakemake(work, job, fault, usual, outcome)
            elif fault.kind in DAMAGES:
                damaged_input(work, job, fault, outcome)
            elif fault.kind == "full disk":
                full_disk(work, job, fault, outcome)
            else:
                killed(work, job, fault, usual, outcome)
        shutil.rmtree(work.folder)


class Work:
    """A copy of the finished run in which a fault happens."""

    def __init__(self, faults: Faults, folder: Path):
        self.faults, self.folder = faults, linked_copy(faults.finished, folder)

    def clear(self, job: Job) -> None:
        """Remove a job's outputs and log, as Snakemake does before it runs it."""
        for name in [*job.outputs, job.log]:
            (self.folder / name).unlink(missing_ok=True)

    def start(self, job: Job) -> subprocess.Popen:
        """Run a job's command as a rule does."""
        for name in [*job.outputs, job.log]:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        command = ["bash", "-c", f"set -euo pipefail; exec {job.command}"]
        return subprocess.Popen(command, cwd=self.folder, start_new_session=True, stdin=subprocess.DEVNULL)

    def results(self, job: Job) -> dict[str, str]:
        """sha256 of the outputs that are there; where an engine wrote them, of what is the same in every run.

        A benchmark's seconds differ, and so may bf16 responses: a resumed shard batches what is missing.
        """
        paths = {name: self.folder / name for name in job.outputs if not name.endswith(VOLATILE)}
        columns = FIXED.get(job.rule)
        if columns:
            table = paths[job.outputs[0]]
            return {job.outputs[0]: chosen_columns(table, columns)} if table.is_file() else {}
        return {name: artefacts.sha256(path) for name, path in paths.items() if path.is_file()}

    def log(self, job: Job) -> str:
        path = self.folder / job.log
        return path.read_text(errors="replace") if path.is_file() else ""

    def processes(self) -> list[psutil.Process]:
        """Everything that runs in this folder."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                inside = process.cwd().startswith(str(self.folder))
                if inside and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found

    @contextlib.contextmanager
    def ended(self) -> Iterator[None]:
        """Whatever the test found, nothing of it goes on running."""
        try:
            yield
        finally:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def nothing_runs(self) -> None:
        deadline = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"still running: {[process.cmdline()[:3] for process in left]}"

    def nothing_is_half_written(self, job: Job, usual: dict[str, str]) -> None:
        """What stands under the name of a result is whole: the bytes that an undisturbed run writes."""
        for name, found in self.results(job).items():
            assert found == usual[name], f"{name} is there and differs from an undisturbed run's"

    def same_results(self, job: Job, usual: dict[str, str]) -> None:
        found = self.results(job)
        wrong = [name for name, wanted in usual.items() if found.get(name) != wanted]
        assert not wrong, f"after the next run {wrong} differ from an undisturbed run's"

    def run_again(self, job: Job, outcome: Outcome, usual: dict[str, str]) -> None:
        code = self.start(job).wait()
        assert code == 0, f"the next run ended with {code}: {self.log(job)[-600:]}"
        self.same_results(job, usual)
        resumed = re.search(r"resuming.*", self.log(job))
        outcome.recovered = f"same results ({resumed[0]})" if resumed else "same results"
        if job.rule == "generate_responses":
            mine, theirs = (read_responses(folder / job.outputs[0]) for folder in (self.folder, self.faults.finished))
            same = sum(a == b for a, b in zip(mine, theirs, strict=True))
            outcome.recovered += f", {same} of {len(mine)} texts identical"
        self.nothing_runs()


FIXED = {
    "benchmark": ("prompt_id", "prompt_token_ids", "output_token_ids"),
    "generate_responses": ("prompt_id", "sample", "prompt_token_ids"),
}


def chosen_columns(path: Path, columns: tuple[str, ...]) -> str:
    return artefacts.fingerprint([[row[name] for name in columns] for row in artefacts.read_table(path).to_pylist()])


def read_responses(path: Path) -> list[list[int]]:
    return artefacts.read_table(path)["response_token_ids"].to_pylist()


def error_of(text: str) -> str:
    """The one-sentence error of a log, or that there is none."""
    found = re.search(r"^error: (.*)", text, re.M)
    return found[1] if found else "no error line"


# Kinds


def killed(work: Work, job: Job, fault: Fault, usual: Usual, outcome: Outcome) -> None:
    """A signal to the rule's process, the engine or its child; or another server on the engine's port."""
    process = work.start(job)
    target, _, name = fault.kind.partition(", ")
    if fault.kind == "port taken":
        with taken_port(process):
            code = process.wait()
        outcome.happened = f"exit {code}: {error_of(work.log(job)).splitlines()[0][:120]}"
        assert code == 1 and "Traceback" not in work.log(job).partition("error: ")[0], work.log(job)[-600:]
    else:
        for at in earlier(fault.moment * usual.seconds):
            time.sleep(at)
            receiver = chosen(process, target)
            with contextlib.suppress(psutil.Error):
                receiver.send_signal(SIGNALS[name])
            code = process.wait()
            if code:
                break
            work.nothing_runs()
            work.clear(job)
            process = work.start(job)
        outcome.happened = f"{name} to {receiver_name(receiver, process)} after {at:.1f} s, exit {code}"
        assert code, "the job was always done before the signal came"
    work.nothing_runs()
    work.nothing_is_half_written(job, usual.sha256)
    work.run_again(job, outcome, usual.sha256)


def earlier(moment_s: float) -> Iterator[float]:
    """Moments for a signal: the drawn one, and earlier ones for when the job was done before it."""
    while moment_s > SOONEST_S:
        yield moment_s
        moment_s /= 2
    yield SOONEST_S


def chosen(process: subprocess.Popen, target: str) -> psutil.Process:
    """The process that a signal goes to; where there is no engine yet, the rule's."""
    rule = psutil.Process(process.pid)
    with contextlib.suppress(psutil.Error):
        children = rule.children()
        if target == "engine" and children:
            return children[0]
        if target == "engine's child" and children:
            return max(children[0].children(), key=lambda child: child.memory_info().rss, default=children[0])
    return rule


def receiver_name(receiver: psutil.Process, process: subprocess.Popen) -> str:
    return "the rule's process" if receiver.pid == process.pid else "a process of the engine"


@contextlib.contextmanager
def taken_port(process: subprocess.Popen, patience_s: float = 60) -> Iterator[None]:
    """Bind the port of the engine that `process` starts before the engine does: it stands still meanwhile."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.Error, StopIteration):
            engine = next(p for p in psutil.Process(process.pid).children() if "--port" in p.cmdline())
            engine.suspend()
            words = engine.cmdline()
            with socket.socket() as other:
                other.bind(("127.0.0.1", int(words[words.index("--port") + 1])))
                other.listen()
                engine.resume()
                yield
            return
        time.sleep(0.01)
    raise AssertionError("no engine was started")


def damage(path: Path, kind: str, place: float) -> None:
    """Flip the lowest bit of one byte, or cut the file off there; size and time stay as after a fault of the disk."""
    content, times = bytearray(path.read_bytes()), path.stat()
    at = int(place * len(content))
    if kind == "truncated":
        del content[at:]
    else:
        content[at] ^= 1
    path.unlink()  # a hard link to the finished run's
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def inputs(work: Work, job: Job) -> list[str]:
    """The artefacts that a job reads: its inputs, and the files of the target that it reads."""
    found = [name for name in job.inputs if name.startswith("results/")]
    found += [f"results/target/{name}" for name, rules in TARGET_FILES.items() if job.rule in rules]
    return sorted(name for name in found if (work.folder / name).is_file() and not name.endswith(VOLATILE))


def damaged_input(work: Work, job: Job, fault: Fault, outcome: Outcome) -> None:
    """A damaged input is named, or was not read: then the results are the same."""
    usual = work.faults.usual[job.rule].sha256
    names = inputs(work, job)
    name = names[int(fault.moment * len(names))]
    damage(work.folder / name, fault.kind, fault.place)
    code = work.start(job).wait()
    work.nothing_runs()
    said = error_of(work.log(job))
    if code == 0:
        outcome.happened = f"{name}: not read, or without a meaning"
        work.same_results(job, usual)
    else:
        outcome.happened = f"{name}: exit {code}: {said.replace(name, '...')[:90]}"
        assert code in (1, 2) and Path(name).name in said, f"{name} damaged: exit {code}: {work.log(job)[-600:]}"
        assert "Traceback" not in work.log(job), work.log(job)[-600:]
        work.nothing_is_half_written(job, usual)
    (work.folder / name).unlink()
    shutil.copy2(work.faults.finished / name, work.folder / name)
    work.run_again(job, outcome, usual)


def full_disk(work: Work, job: Job, fault: Fault, outcome: Outcome) -> None:
    """The outputs' folder on a file system that holds a part of them; then one that holds all."""
    usual = work.faults.usual[job.rule].sha256
    folder, aside = work.folder / job.folder, work.folder / "aside"
    folder.rename(aside)
    folder.mkdir()
    needed = sum(pages(work.faults.finished / name) for name in job.outputs)
    there = sum(pages(path) for path in aside.rglob("*") if path.is_file())
    free = int(fault.place * needed)
    size = max(1, there + free) * PAGE
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        raise NotPossible("mounting a file system is not allowed")
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True)
        code = work.start(job).wait()
        work.nothing_runs()
        said = error_of(work.log(job))
        outcome.happened = f"room for {free} of {needed} pages: exit {code}" + (f": {said[:60]}" if code else "")
        if code:
            assert code == 1 and ("disk is full" in said or "are free" in said), work.log(job)[-600:]
            assert "Traceback" not in work.log(job), work.log(job)[-600:]
        work.nothing_is_half_written(job, usual)
        subprocess.run(["mount", "-o", f"remount,size={1 << 30}", folder], check=True)
        work.run_again(job, outcome, usual)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


PAGE = 4096


def pages(path: Path) -> int:
    return -(-path.stat().st_size // PAGE)


class NotPossible(Exception):
    """A fault that this machine does not let a test make."""


def under_snakemake(work: Work, job: Job, fault: Fault, usual: Usual, outcome: Outcome) -> None:
    """The same with Snakemake around it: the next `snakemake` mends everything, and nothing else runs again but
    what reads an input that was made again."""
    finished = everything(work.faults.finished)
    name = None
    if fault.kind in DAMAGES:
        names = inputs(work, job)
        name = names[int(fault.moment * len(names))]
        damage(work.folder / name, fault.kind, fault.place)
    # Its own outputs are asked for: of what is missing, Snakemake makes only what a target needs.
    command = ["snakemake", "--configfile", SMALL, "--", job.outputs[0]]
    target, _, signal_name = fault.kind.partition(", ")
    for at in earlier(fault.moment * usual.seconds):
        output = open(work.folder / "snakemake.log", "w")  # noqa: SIM115
        process = subprocess.Popen(
            command, cwd=work.folder, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        hit = not signal_name
        if signal_name:
            rule = waited_for(lambda: running(work, f"scripts/{job.rule}.py"), process)
            time.sleep(at)
            receiver = psutil.Process(process.pid) if target == "Snakemake" else rule
            with contextlib.suppress(psutil.Error):
                hit = receiver.status() != psutil.STATUS_ZOMBIE
                receiver.send_signal(SIGNALS[signal_name])
        code = process.wait()  # 0 also where Snakemake tried a killed job again
        work.nothing_runs()
        if hit:
            break
        work.clear(job)
    assert hit, "the job was always done before the signal came"
    outcome.happened = f"exit {code}" + (f", signal after {at:.1f} s" if signal_name else "")
    if name:
        said = error_of(work.log(job))
        outcome.happened = f"{name}: exit {code}: {said.replace(name, '...')[:90]}"
        if code:
            assert Path(name).name in said, f"{name} damaged: {work.log(job)[-600:]}"
            (work.folder / name).unlink()
        else:  # it was not read
            (work.folder / name).unlink()
            shutil.copy2(work.faults.finished / name, work.folder / name)
    done = snakemake(work.folder, "--", job.outputs[0])
    outcome.recovered = "same results"
    if "--unlock" in done.stdout + done.stderr and done.returncode:
        assert snakemake(work.folder, "--unlock").returncode == 0
        outcome.recovered = "same results after --unlock"
        done = snakemake(work.folder, "--", job.outputs[0])
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    same_everything(work, finished)
    others = planned(work.folder)
    if others:  # an input that was made again has other readers than this job
        assert code and name, f"{others} would run again"
        assert not others.keys() & {"benchmark", "generate_responses", "extract_hidden_states", "train_drafter"}, others
        done = snakemake(work.folder)
        assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
        same_everything(work, finished)
        assert planned(work.folder) == {}, "something would run again without end"
    work.nothing_runs()


def same_everything(work: Work, finished: dict[str, str]) -> None:
    found = everything(work.folder)
    wrong = sorted(path for path in finished.keys() | found.keys() if finished.get(path) != found.get(path))
    assert not wrong, f"after the next snakemake {wrong} differ from an undisturbed run's"


def waited_for(find: Callable, process: subprocess.Popen, patience_s: float = 60):
    deadline = time.monotonic() + patience_s
    while process.poll() is None and time.monotonic() < deadline:
        found = find()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("the job was not started")


def running(work: Work, script: str) -> psutil.Process | None:
    """The process of a rule's script, not the shell around it."""
    for process in work.processes():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if len(words) > 1 and words[1] == script:
                return process
    return None


def everything(folder: Path) -> dict[str, str]:
    """sha256 of every result of a run, less what differs from run to run."""
    found = {}
    for path in sorted((folder / "results").rglob("*")):
        if path.is_file() and "/cache/" not in str(path) and path.name not in VOLATILE:
            found[str(path.relative_to(folder))] = _sum(path)
    return found


_sums: dict[tuple[int, int, int], str] = {}


def _sum(path: Path) -> str:
    stat = path.stat()
    key = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if key not in _sums:
        _sums[key] = artefacts.sha256(path)
    return _sums[key]
