import io

import pytest
from rich.console import Console

import test_reportpage as pages
from breakeven import summary, tables

ROW = dict.fromkeys(tables.SUMMARY.names) | {"arm": "own", "engine": "vllm", "protocol": "quick", "verdict": "slower"}
PAY = [{"change": "K", "now": "3", "needed": "1", "note": "AL 1.60 at rho 1.10: 1.45x (arms of this run)"}]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cause": "integration", "fault": "layers-plus-1"}, ["integration (layers-plus-1): ", "check_drafter.py"]),
        ({"cause": "integration or distribution"}, ["check_drafter.py"]),
        ({"cause": "training"}, ["snakemake data_curve"]),
        ({"cause": "cost"}, ["an arm with k: 1 (AL 1.60", "snakemake step_cost"]),
        (
            {"cause": "mixed", "fault": "fc-skipped"},
            ["check_drafter.py", "data_curve", "an arm with k: 1", "step_cost"],
        ),
        ({"cause": "mixed"}, ["data_curve", "an arm with k: 1", "step_cost"]),
        ({"verdict": "undecided"}, ["max_passes"]),
        ({"verdict": "refused", "reason": "no-baseline: none"}, ["no-baseline: none"]),
        ({"verdict": "faster"}, []),
        ({"verdict": "baseline"}, []),
    ],
)
def test_next_steps_follow_from_the_cause(change, words):
    steps = summary.next_steps(ROW | change, {"pay": PAY})
    assert len(steps) == len(words) or len(words) == 2 and len(steps) == 1
    assert all(word in " ".join(steps) for word in words)


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
