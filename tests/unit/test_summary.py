import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import factory
import test_reportpage as pages
from breakeven import summary, tables

ROOT = Path(__file__).parents[2]
ROW = dict.fromkeys(tables.SUMMARY.names) | {
    "arm": "own", "engine": "vllm", "drafter": "own", "k": 3, "protocol": "quick", "baseline": "none", "verdict": "slower",
}  # fmt: skip
PAY = [{"change": "K", "now": "3", "needed": "1", "note": "AL 1.60 at rho 1.10: 1.45x (arms of this run)"}]


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"cause": "integration", "fault": "layers-plus-1"},
            ["integration (layers-plus-1): python scripts/check_drafter"],
        ),
        ({"cause": "integration or distribution"}, ["check_drafter.py", "replay_served"]),
        ({"cause": "training"}, ["more data may pay; name samples under data_curve"]),
        ({"cause": "training", "fault": "distribution"}, ["train on data like the served prompts"]),
        ({"cause": "cost"}, ["an arm with k: 1 (AL 1.60", "snakemake step_cost"]),
        (
            {"cause": "mixed", "fault": "fc-skipped"},
            ["check_drafter.py", "an arm with k: 1", "step_cost"],
        ),
        ({"cause": "mixed"}, ["cannot pay before a step is cheaper", "an arm with k: 1", "step_cost"]),
        ({"verdict": "undecided"}, ["max_passes"]),
        ({"verdict": "refused", "reason": "no-baseline: none"}, ["no-baseline: none"]),
        (
            {"verdict": "refused", "reason": "other-sampling: x", "cause": "integration"},
            ["check_drafter.py", "other-sampling: x"],
        ),
        ({"verdict": "faster"}, []),
        ({"verdict": "baseline"}, []),
    ],
)
def test_next_steps_follow_from_the_cause(change, words):
    steps = summary.next_steps(ROW | change, {"pay": PAY})
    assert len(steps) == len(words)
    assert all(word in " ".join(steps) for word in words)
    assert ("more data may pay" in " ".join(steps)) == (change == {"cause": "training"})


@pytest.mark.parametrize(
    "because, remedy",
    [
        ("noise", "undecided: more prompts, or max_passes"),
        ("few-prompts", "undecided: more prompts in the protocol"),
        ("single-pass", "undecided: more passes"),
        ("apart", "delete results/benchmarks/own and results/benchmarks/none"),
    ],
)
def test_the_remedy_of_an_undecided_arm_follows_from_why_it_is(because, remedy):
    row = ROW | {"verdict": "undecided"}
    steps = summary.next_steps(row, {"undecided_because": because})
    assert len(steps) == 1 and remedy in steps[0]
    blamed = summary.next_steps(row | {"cause": "training"}, {"undecided_because": because})
    assert any(remedy in step for step in blamed) == (because != "noise")


def test_what_makes_every_step_dear_is_named_before_the_vocabulary():
    graphs = {"change": "CUDA graphs", "now": "off", "needed": "on", "note": "measure both arms again"}
    steps = summary.next_steps(ROW | {"cause": "cost"}, {"pay": [*PAY, graphs]})
    assert "cost: CUDA graphs: off, needed: on (measure both arms again)" in steps


@pytest.mark.parametrize("engine, version", [("vllm", "0.32.0"), ("sglang", "0.5.12")])
@pytest.mark.parametrize("options, code", [({}, 0), ({"method": "eagle", "algorithm": "EAGLE"}, 1)])
def test_the_printed_check_runs_and_finds_the_wrong_algorithm(tmp_path, engine, version, options, code):
    drafter, target = factory.good(tmp_path, "llama")
    flag = {"vllm": "max-model-len", "sglang": "context-length"}[engine]
    details = {"method": "eagle3", "options": options, "versions": {engine: version}}
    details |= {"flags": {flag: 2048, "chat-template-options": {"a": [1]}, "enforce-eager": True}, "allow": []}
    (step,) = summary.next_steps(ROW | {"engine": engine, "cause": "integration"}, details)
    command = re.search(r"python (scripts/check_drafter.py .*) \(FOLDER", step)[1]
    words = shlex.split(command.replace("FOLDER", str(drafter)).replace("results/target", str(target)))
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("algorithm" in done.stdout) == bool(code)


def test_the_best_k_is_only_named_where_it_is_another_one():
    for needed in ("3", "none", "unknown"):
        steps = summary.next_steps(ROW | {"cause": "cost"}, {"pay": [PAY[0] | {"needed": needed}]})
        assert len(steps) == 1 and "step_cost" in steps[0]


def test_it_shows_verdicts_next_steps_and_the_page(tmp_path):
    arms = pages.specs()
    arms[1]["parameters"]["arm"] = "vllm-[bold]own"
    pages.compare(tmp_path, arms)
    out = io.StringIO()
    summary.show(tmp_path / "comparison", tmp_path / "report/index.html", Console(file=out, width=140))
    text = out.getvalue()
    for word in ("vllm-[bold]own", "faster", "slower", "refused", "What to try next", "other-sampling"):
        assert word in text
    assert f"The page: {tmp_path / 'report/index.html'}" in text
