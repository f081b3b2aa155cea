"""The law on synthetic truths: it is found again, its intervals hold the truth, and the sentences follow from it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from breakeven import artefacts, scaling, tables
from breakeven.cli import UserError
from breakeven.stepcost import StepCost

ROOT = Path(__file__).parents[2]
SAMPLES = [10_000, 20_000, 44_000, 88_000]
K = 3


def truth(samples, a=3.2, b=40.0, c=0.35):
    return a - b * samples**-c


def walks(seed=0, conversations=400, samples=SAMPLES, k=K, law=truth):
    """Counts per sequence as evaluate_drafter.py writes them; conversations differ, alike at every point."""
    draw = np.random.default_rng(seed)
    easy = draw.normal(0, 0.25, conversations)
    found = {}
    for n in samples:
        share = np.clip((law(n) - 1) / k + easy * 0.3, 0.01, 0.99)
        steps = draw.integers(40, 120, conversations)
        accepted = draw.binomial(steps * k, share)
        per_position = [[int(total - (k - 1) * (total // k)), *[int(total // k)] * (k - 1)] for total in accepted]
        columns = {"sequence": range(conversations), "conversation": range(conversations), "k": k, "steps": steps}
        found[n] = pd.DataFrame(columns | {"accepted_per_position": per_position})
    return found


def test_an_exact_law_is_found_again():
    law = scaling.fit(SAMPLES, truth(np.array(SAMPLES, dtype=float)), K)
    assert law.a == pytest.approx(3.2, abs=0.02) and law.c == pytest.approx(0.35, rel=0.03)
    assert law.at(176_000) == pytest.approx(truth(176_000), abs=0.003)
    assert law.crossing(2.5) == pytest.approx((40 / 0.7) ** (1 / 0.35), rel=0.02)
    assert law.crossing(3.5) == np.inf


def test_the_limit_stays_at_or_below_k_plus_1_and_a_falling_curve_is_flat():
    rising = scaling.fit(SAMPLES, np.array([1.5, 2.3, 3.2, 3.9]), K)
    assert rising.a == 4 and np.isfinite(rising.at(1e9)) and rising.at(1e9) <= 4
    falling = scaling.fit(SAMPLES, np.array([2.0, 1.9, 1.8, 1.7]), K)
    assert falling.b == 0 and falling.a == pytest.approx(1.85)


def test_intervals_hold_the_truth():
    """95 % over 60 experiments: fewer than 51 hits would be a 1 in 10,000 chance."""
    inside = {"forecast": 0, "largest": 0}
    for seed in range(60):
        found = scaling.curve(walks(seed, conversations=150), K, resamples=300)
        _, low, high = found.forecast(176_000)
        inside["forecast"] += low <= truth(176_000) <= high
        low, high = found.interval(found.resampled[:, -1])
        inside["largest"] += low <= truth(88_000) <= high
    assert min(inside.values()) >= 51, inside


def test_two_points_are_refused():
    with pytest.raises(UserError, match="2 points do not determine"):
        scaling.curve(walks(samples=SAMPLES[:2]), K)
    with pytest.raises(ValueError, match="there are 2"):
        scaling.fit([1, 2, 2], np.array([1.0, 2.0, 2.0]), K)


def test_points_of_other_sequences_are_refused():
    points = walks()
    points[SAMPLES[1]]["sequence"] += 1
    with pytest.raises(UserError, match="20000 samples walked other held-out sequences"):
        scaling.curve(points, K)


def test_a_k_that_was_not_walked_and_too_few_conversations_are_refused():
    with pytest.raises(UserError, match="not walked with K = 7"):
        scaling.curve(walks(), 7)
    with pytest.raises(UserError, match="4 held-out conversations"):
        scaling.curve(walks(conversations=4), K)


def test_sequences_of_one_conversation_count_as_one():
    """Each conversation four times: a resample of sequences would halve the interval."""
    points = walks(conversations=60)
    fourfold = {}
    for n, table in points.items():
        fourfold[n] = pd.concat([table] * 4, ignore_index=True)
        fourfold[n]["sequence"] = range(len(fourfold[n]))
    once, again = scaling.curve(points, K), scaling.curve(fourfold, K)
    assert again.conversations == 60 and np.allclose(again.resampled, once.resampled)


@pytest.fixture(scope="module")
def found():
    return scaling.curve(walks(), K)


@pytest.mark.parametrize(
    "rho, words",
    [
        (2.0, "no more data is needed to cross break-even at this step cost (vllm, rho = 2.00)"),
        (2.6, "more data will cross break-even at this step cost (vllm, rho = 2.60)"),
        (3.9, "more data will not cross break-even at this step cost (vllm, rho = 3.90)"),
        (3.05, "more data may cross break-even at this step cost (vllm, rho = 3.05)"),
        (None, "no step cost is known here"),
    ],
)
def test_the_sentence_follows_from_the_law(found, rho, words):
    assert words in scaling.sentence(found, rho, "vllm"), scaling.sentence(found, rho, "vllm")


def test_the_crossing_is_told_with_its_interval(found):
    told = scaling.sentence(found, 2.6, "vllm")
    low, high = (int(part.replace(",", "")) for part in told.split("95 %: ")[2].rstrip(").").split(" to "))
    assert 88_000 <= low <= (40 / 0.6) ** (1 / 0.35) <= high <= 880_000


def test_a_step_cost_table_goes_before_measured_arms():
    measured = {"vllm": pd.DataFrame({"k": [1, 3, 3], "concurrency": [1, 1, 4], "rho": [1.2, 1.4, 9.0]})}
    arms = {"engine": ["vllm", "sglang", "sglang", "sglang"], "drafter": ["own", "own-10000", "other", "own"], "k": 3}
    summary = pd.DataFrame(arms | {"concurrency": [1, 4, 1, 32], "rho": [5.0, 2.0, 7.0, 9.0], "verdict": "slower"})
    found = scaling.step_costs(measured, summary, ["own", "own-10000"])
    assert found["vllm"].at(3) == 1.4 and found["sglang"].at(3) == 2.0
    assert scaling.step_costs({}, None, ["own"]) == {}


def test_rows_hold_points_law_and_forecast(found):
    made = scaling.rows(found, "own", {("own-20000", K): 1.9})
    assert [row["kind"] for row in made] == ["measured"] * 4 + ["forecast"]
    assert made[1]["served_acceptance_length"] == 1.9 and made[0]["served_acceptance_length"] is None
    assert made[4]["samples"] == 176_000 and made[4]["low"] <= made[4]["fitted"] <= made[4]["high"]
    text = scaling.summary([found], made, {"vllm": StepCost([(3, 3.9)], "random drafter")})
    assert "will not cross break-even at this step cost (vllm, random drafter, rho = 3.90)" in text


def write_points(folder, points):
    for n, table in points.items():
        artefacts.write_table(folder / f"{n}.parquet", table.to_dict("records"), tables.OFFLINE_BY_SEQUENCE)
    return [f"{n}={folder / f'{n}.parquet'}" for n in points]


def run(*words):
    command = [sys.executable, str(ROOT / "scripts/data_curve.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_script_writes_table_text_and_figure(tmp_path):
    out, style = tmp_path / "out/curve.parquet", ROOT / "report/style.mplstyle"
    points = write_points(tmp_path, walks())
    done = run("--drafter", "own", "--points", *points, "--k", K, "--style", style, "--out", out)
    assert done.returncode == 0, done.stderr
    table = artefacts.read_table(out, tables.DATA_CURVE).to_pylist()
    assert len(table) == 5 and table[0]["drafter"] == "own-10000"
    assert "no step cost is known here" in out.with_suffix(".txt").read_text()
    assert out.with_suffix(".svg").read_text().startswith("<?xml")
    assert artefacts.read_manifest(tmp_path / "out/curve.manifest.json", "data_curve")["counts"]["conversations"] == 400


def test_an_arm_with_further_options_is_no_point_of_the_curve(tmp_path):
    """A tree of the same drafter and K accepts more, and a step of it costs more."""
    measured = {"vllm-own-k3": (1.7, 1.2), "sglang-own-k3-tree": (2.4, 3.0)}
    rows = [
        dict.fromkeys(tables.SUMMARY.names)
        | {"arm": name, "engine": name.partition("-")[0], "drafter": "own-20000", "k": K, "concurrency": 1}
        | {"acceptance_length": length, "rho": rho, "verdict": "faster"}
        for name, (length, rho) in measured.items()
    ]
    artefacts.write_table(tmp_path / "summary.parquet", rows, tables.SUMMARY)
    details = {"vllm-own-k3": {"options": {}}, "sglang-own-k3-tree": {"options": {"speculative-eagle-topk": 4}}}
    artefacts.write_manifest(tmp_path / "summary.manifest.json", "comparison", parameters={}, arms=details)
    points, out = write_points(tmp_path, walks()), tmp_path / "out/curve.parquet"
    done = run("--drafter", "own", "--points", *points, "--k", K, "--style", ROOT / "report/style.mplstyle", "--out", out,
               "--summary", tmp_path / "summary.parquet")  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = artefacts.read_table(out, tables.DATA_CURVE).to_pylist()
    assert [row["served_acceptance_length"] for row in table] == [None, 1.7, None, None, None]
    text = out.with_suffix(".txt").read_text()
    assert "rho = 1.20" in text and "sglang" not in text


def test_the_script_refuses_two_points_and_leaves_nothing(tmp_path):
    points = write_points(tmp_path, walks(samples=SAMPLES[:2]))
    style = ROOT / "report/style.mplstyle"
    done = run("--drafter", "own", "--points", *points, "--k", K, "--style", style, "--out", tmp_path / "out/c.parquet")
    assert done.returncode == 1 and "2 points do not determine" in done.stderr and not (tmp_path / "out").exists()
