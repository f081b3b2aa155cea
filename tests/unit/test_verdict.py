"""The decision table, and whether faults are found in counts that were drawn from them."""

from pathlib import Path

import numpy as np
import pytest

from breakeven import acceptance, artefacts, stepcost, verdict
from breakeven.verdict import Counts, Facts

DATA = artefacts.read_json(Path(__file__).parents[2] / "resources" / "expectations.json")
# Conditional acceptance at K = 3. as-built is that of the 48K drafter on the CPU (docs/design.md, section 11); the quiet
# faults lose as much as they did there, the loud ones next to everything, each in its own way.
CURVES = {
    "as-built": (0.60, 0.66, 0.75),
    "layers-minus-1": (0.53, 0.60, 0.68),
    "layers-plus-1": (0.56, 0.60, 0.71),
    "layers-reversed": (0.03, 0.10, 0.10),
    "fc-skipped": (0.015, 0.10, 0.10),
    "d2t-zero": (0.11, 0.15, 0.15),
    "d2t-absolute": (0.06, 0.10, 0.10),
    "theta-10000": (0.58, 0.57, 0.55),
    "norm-before-residual": (0.42, 0.30, 0.20),
    "norm-before-fc": (0.30, 0.25, 0.20),
    "norm-output": (0.60, 0.35, 0.25),
    "shift-by-one": (0.20, 0.12, 0.10),
    "target-head": (0.08, 0.30, 0.30),
}


def length(conditional):
    return 1 + float(np.cumprod(conditional).sum())


def expected(conditional, tokens):
    """The counts of a walk over so many tokens, without sampling error."""
    steps = round(tokens / length(conditional))
    return Counts(steps, tuple(int(round(steps * m)) for m in np.cumprod(conditional)))


def draw(rng, conditional, tokens, jitter=0.0):
    """Counts drawn step by step; jitter is the standard deviation of an engine's conditional acceptance at c = 1/2."""
    steps = left = round(tokens / length(conditional))
    accepted = []
    for c in conditional:
        left = int(rng.binomial(left, np.clip(c + 2 * jitter * np.sqrt(c * (1 - c)) * rng.standard_normal(), 0, 1)))
        accepted.append(left)
    return Counts(steps, tuple(accepted))


def matrix(tokens):
    return {name: expected(curve, tokens) for name, curve in CURVES.items()}


def found(truth, steps, n=100, jitter=0.0, seed=0):
    """(share of n runs that reject "as built", share that names the truth, alone or in a set, mean size of the set)."""
    rng = np.random.default_rng([seed, steps])
    tokens = steps * length(CURVES["as-built"])  # so many steps if nothing is wrong
    results = [verdict.integration(draw(rng, CURVES[truth], tokens, jitter), None, matrix(tokens)) for _ in range(n)]
    sizes = [len(r.faults) for r in results if r.faults]
    return (
        np.mean([r.rejected for r in results]),
        np.mean([truth in r.faults for r in results]),
        np.mean(sizes) if sizes else 0,
    )


# What these numbers of steps can and cannot show: a quiet fault needs 1,000 to 5,000 steps, a loud one 250.
LOUD = [name for name in CURVES if length(CURVES[name]) < 1.9 and name != "as-built"]
QUIET = ["layers-minus-1", "layers-plus-1", "theta-10000"]


@pytest.mark.parametrize("truth", LOUD)
def test_loud_faults_are_named_from_250_steps(truth):
    rejected, named, size = found(truth, 250)
    assert rejected == 1 and named >= 0.95 and size < 3


@pytest.mark.parametrize("truth", [name for name in CURVES if name not in ("as-built", "layers-plus-1")])
def test_faults_are_named_from_1000_steps(truth):
    _, named, size = found(truth, 1000)
    assert named >= 0.90 and size < 2.5


@pytest.mark.parametrize("truth", [name for name in CURVES if name != "as-built"])
def test_every_fault_is_named_from_5000_steps(truth):
    rejected, named, size = found(truth, 5000)
    assert rejected >= 0.99 and named >= 0.97 and size < 2


@pytest.mark.parametrize("steps", [250, 1000, 5000, 50_000])
@pytest.mark.parametrize("jitter", [0.0, acceptance.ENGINE_NUMERICS], ids=["exact", "engine-numerics"])
def test_no_fault_planted_none_named(steps, jitter):
    rng = np.random.default_rng(steps)
    tokens = steps * length(CURVES["as-built"])
    results = [
        verdict.integration(draw(rng, CURVES["as-built"], tokens, jitter), None, matrix(tokens)) for _ in range(300)
    ]
    assert np.mean([bool(r.faults) for r in results]) <= 0.05
    assert np.mean([r.rejected for r in results]) <= 0.05


@pytest.mark.parametrize("curve", [(0.2, 0.15, 0.1), (0.9, 0.9, 0.9), (0.02, 0.1, 0.1)])
def test_no_fault_is_named_for_weak_and_strong_drafters(curve):
    rng = np.random.default_rng(7)
    tokens = 1000 * length(curve)
    curves = matrix(tokens) | {"as-built": expected(curve, tokens)}
    named = [bool(verdict.integration(draw(rng, curve, tokens, 0.015), None, curves).faults) for _ in range(300)]
    assert np.mean(named) <= 0.05


def test_hypotheses_with_the_same_curve_are_a_set():
    tokens = 5000
    curves = matrix(tokens)
    curves["norm-before-fc"] = curves["shift-by-one"]
    served = expected(CURVES["shift-by-one"], tokens)
    result = verdict.integration(served, None, curves)
    assert set(result.faults) == {"norm-before-fc", "shift-by-one"}
    assert any("cannot be told apart" in sentence for sentence in result.evidence)
    judged = verdict.judge(Facts("slower", 3, served, hypotheses=curves, speedup=0.7, rho=1.7), DATA)
    assert judged.cause == "integration" and " or " in judged.fault


def test_a_hypothesis_without_effect_is_never_named():
    """The order of ids in the config does nothing in vLLM, which sorts: such a hypothesis equals "as built"."""
    curves = matrix(5000) | {"layers-reversed": matrix(5000)["as-built"]}
    result = verdict.integration(expected(CURVES["theta-10000"], 5000), None, curves)
    assert result.faults == ("theta-10000",)
    assert verdict.integration(expected(CURVES["as-built"], 5000), None, curves).faults == ()


def test_a_fault_outside_the_list_is_unknown():
    served = expected((0.35, 0.80, 0.90), 5000)
    result = verdict.integration(served, None, matrix(5000))
    assert result.rejected and result.faults == ()
    assert "none of the 12 hypotheses" in result.evidence[-1]
    assert verdict.judge(Facts("slower", 3, served, hypotheses=matrix(5000)), DATA).fault == "unknown"


def test_what_cannot_be_known_is_refused():
    few = expected(CURVES["fc-skipped"], 80)
    assert verdict.integration(few, None, matrix(80)).rejected is None
    assert "too few" in verdict.integration(few, None, matrix(80)).evidence[0]
    served = expected(CURVES["fc-skipped"], 5000)
    assert verdict.integration(served, None, {}).rejected is None
    assert verdict.integration(None, expected(CURVES["as-built"], 5000)).rejected is None
    other = verdict.integration(served, expected(CURVES["as-built"], 20_000))
    assert other.rejected is None and "not the same outputs" in other.evidence[0]
    with pytest.raises(ValueError, match="K = 3"):
        verdict.integration(served, Counts(2800, (1400, 800)))


def walked(rng, outputs, tokens, k, c=0.45):
    """(served, walk) of a faithful engine: the walk leaves out the steps that would draft past the end of an output."""
    served, walk = np.zeros(k + 1, int), np.zeros(k + 1, int)
    for _ in range(outputs):
        done = 1
        while done < tokens:
            accepted = np.arange(k + 1) <= min(rng.geometric(1 - c) - 1, k)  # the step itself first
            served += accepted
            walk += accepted * (done + k < tokens)
            done += int(accepted.sum())
    return tuple(Counts(int(counts[0]), tuple(counts[1:].tolist())) for counts in (served, walk))


def test_deep_drafts_on_short_outputs_are_judged():
    """K = 15 on outputs of 64 tokens: the walk covers four fifths of the tokens or less, and they are the same outputs."""
    rng = np.random.default_rng(0)
    found = [verdict.integration(*walked(rng, 5, 64, 15), outputs=5).rejected for _ in range(100)]
    assert None not in found and sum(found) <= 5
    served, walk = walked(rng, 5, 64, 15)
    assert verdict.integration(served, walk).rejected is None


def test_a_walk_over_more_than_was_served_is_of_other_outputs():
    """A walk leaves out up to K tokens of each output, and adds none."""
    few, many = (Counts(steps, (accepted, *[0] * 14)) for steps, accepted in ((200, 60), (300, 110)))
    assert (
        "covers 410 tokens, the served pass 260: not the same" in verdict.integration(few, many, outputs=10).evidence[0]
    )
    assert verdict.integration(many, few, outputs=10).rejected is not None


def test_without_a_what_if_matrix_integration_is_blamed_but_no_fault():
    result = verdict.integration(expected(CURVES["fc-skipped"], 5000), expected(CURVES["as-built"], 5000))
    assert result.rejected and result.faults == () and "no what-if matrix" in result.evidence[-1]


def test_impossible_counts_never_get_in():
    """B072: a rate above 1, an AL above K + 1."""
    with pytest.raises(acceptance.ImpossibleCounts):
        Counts(100, (120, 50, 10))
    judged = verdict.judge(Facts("refused", 3, reasons=["impossible-acceptance"]), DATA)
    assert judged.cause is None and "no cause" in judged.evidence[0]


# The decision table

GOOD, BAD = expected(CURVES["as-built"], 5000), expected(CURVES["fc-skipped"], 5000)
WEAK = expected((0.30, 0.30, 0.30), 5000)  # AL 1.42
TABLE = {
    "faster as predicted": (Facts("faster", 3, GOOD, as_built=GOOD, speedup=1.74, speedup_high=1.9, rho=1.33), None, None),
    "faster, but a fault": (
        Facts("faster", 3, expected(CURVES["theta-10000"], 5000), hypotheses=matrix(5000), speedup=1.5, rho=1.3),
        "integration",
        "theta-10000",
    ),
    "faster, but the step is dearer than measured": (
        Facts("faster", 3, GOOD, as_built=GOOD, speedup=1.15, speedup_high=1.2, rho=2.0, predicted_rho=1.33),
        "cost",
        None,
    ),
    "slower by a fault": (
        Facts("slower", 3, BAD, hypotheses=matrix(5000), speedup=0.7, rho=1.45),
        "integration",
        "fc-skipped",
    ),
    "a fault, and too dear anyway": (
        Facts("slower", 3, BAD, hypotheses=matrix(5000), speedup=0.3, rho=3.4),
        "mixed",
        "fc-skipped",
    ),
    "few samples at a low rho": (
        Facts("slower", 3, WEAK, as_built=WEAK, speedup=0.95, rho=1.49, samples=450),
        "training",
        None,
    ),
    "low for its own samples": (
        Facts("slower", 3, expected((0.05, 0.05, 0.05), 5000), as_built=expected((0.05, 0.05, 0.05), 5000),
              speedup=0.7, rho=1.5, samples=100_000),
        "training",
        None,
    ),
    "no drafter reaches rho": (
        Facts("slower", 3, GOOD, as_built=GOOD, speedup=0.68, rho=3.4, samples=48_000),
        "cost",
        None,
    ),
    "no drafter reaches rho, and training failed": (
        Facts("slower", 3, expected((0.05, 0.05, 0.05), 5000), as_built=expected((0.05, 0.05, 0.05), 5000),
              speedup=0.3, rho=3.5, samples=48_000),
        "mixed",
        None,
    ),
    "undecided": (Facts("undecided", 3, GOOD, as_built=GOOD, speedup=1.0, speedup_high=1.2, rho=2.3), None, None),
    "undecided, surely without a gain": (
        Facts("undecided", 3, GOOD, as_built=GOOD, speedup=1.0, speedup_high=1.02, rho=2.3),
        "cost",
        None,
    ),
    "refused for its machine, with a fault": (
        Facts("refused", 3, BAD, hypotheses=matrix(5000), reasons=["other-machine"]),
        "integration",
        "fc-skipped",
    ),
    "refused for loops": (Facts("refused", 3, BAD, hypotheses=matrix(5000), reasons=["degenerate-output"]), None, None),
    "nothing known": (Facts("slower", 3, speedup=0.7), None, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_decision_table(name):
    facts, cause, fault = TABLE[name]
    judged = verdict.judge(facts, DATA)
    assert (judged.cause, judged.fault) == (cause, fault), judged.evidence
    assert judged.evidence and all(isinstance(sentence, str) for sentence in judged.evidence)


def test_acceptance_fine_and_no_gain_is_cost_not_training():
    """B088: QwQ-32B, tau 2.5 at 59 against 61 tok/s."""
    judged = verdict.judge(Facts("slower", 4, length=2.5, speedup=59 / 61, rho=2.5 * 61 / 59), DATA)
    assert judged.cause == "cost"
    pay = {row["change"]: row for row in judged.pay}
    assert pay["acceptance length at K = 4"]["needed"] == "above 2.58"
    assert pay["step cost rho"]["needed"] == "below 2.50"


def test_acceptance_near_nothing_is_not_in_the_range_of_comparable_drafters():
    """A published drafter, whose samples nobody states: the lowest public report is the scale, AL 1.5."""
    judged = verdict.judge(Facts("slower", 3, length=1.11, speedup=1.11 / 1.38, rho=1.38), DATA)
    assert judged.cause == "training" and "more or better training can pay" in judged.evidence[-1]
    assert verdict.judge(Facts("slower", 3, length=1.11, speedup=1.11 / 3.4, rho=3.4), DATA).cause == "mixed"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("rho, cause", [(1.17, None), (4.1, "cost")])
def test_of_other_drafts_than_eagle3_no_comparable_ones_are_known(method, rho, cause):
    judged = verdict.judge(
        Facts("slower", 3, length=1.05, speedup=1.05 / rho, rho=rho, samples=5000, method=method), DATA
    )
    assert judged.cause == cause
    said = " ".join([*judged.evidence, *(row["note"] for row in judged.pay)])
    assert "1.05 against break-even" in said and "comparable" not in said and "train" not in said


def test_the_same_drafter_on_two_machines():
    """docs/design.md, section 11: 1.74x on two CPU cores, 0.67 to 0.75x on an H200, as predicted on both."""
    cpu = Facts("faster", 3, GOOD, as_built=GOOD, speedup=1.74, speedup_high=1.8, rho=2.31 / 1.74, samples=48_000)
    gpu = Facts("slower", 3, GOOD, as_built=GOOD, length=2.5, speedup=0.71, rho=2.5 / 0.71, samples=48_000)
    assert verdict.judge(cpu, DATA).cause is None
    judged = verdict.judge(gpu, DATA)
    assert judged.cause == "cost" and "more data cannot pay" in " ".join(judged.evidence)


def test_good_validation_and_low_serving_is_integration_or_distribution():
    """B052: held-out AL high, served AL low; without the walk it is one of two, with it, it is known which."""
    low = expected((0.25, 0.3, 0.3), 5000)
    facts = {"label": "slower", "k": 3, "served": low, "held_out_length": 2.66, "speedup": 0.9, "rho": low.length / 0.9}
    blind = verdict.judge(Facts(**facts), DATA)
    assert blind.cause == "integration or distribution" and "replay_served" in " ".join(blind.evidence)
    walked = verdict.judge(Facts(**facts, as_built=low), DATA)
    assert (walked.cause, walked.fault) == ("training", "distribution")
    lost = verdict.judge(Facts(**facts, as_built=GOOD), DATA)
    assert (lost.cause, lost.fault) == ("integration", "unknown")
    few = expected((0.25, 0.3, 0.3), 80)
    for served, words in (
        (few, "more prompts or longer outputs would tell"),
        (None, "acceptance per position would tell"),
    ):
        undecided = verdict.judge(Facts(**facts | {"served": served, "length": few.length}, as_built=few), DATA)
        assert undecided.cause == "integration or distribution" and words in undecided.evidence[-1]


@pytest.mark.parametrize(
    "accuracy, words",
    [([0.83, 0.78, 0.74], "from the first position on"), ([0.55, 0.70, 0.74], "first gap is at position 2")],
)
def test_training_accuracy_is_shown_beside_served_acceptance(accuracy, words):
    """B070: training accuracy 0.83, tau 1.94."""
    served = expected((0.52, 0.45, 0.40), 5000)
    judged = verdict.judge(Facts("slower", 3, served, held_out_accuracy=accuracy, speedup=0.9, rho=2.0), DATA)
    assert words in " ".join(judged.evidence)


@pytest.mark.parametrize("label, speedup", [("slower", 0.9), ("faster", 1.2)])
def test_the_number_of_samples_is_put_into_context(label, speedup):
    """B069: 5,000 samples."""
    judged = verdict.judge(Facts(label, 3, WEAK, as_built=WEAK, speedup=speedup, rho=1.5, samples=5000), DATA)
    assert "5,000 samples, fewer than any comparable run; 10,000 reach up to 2.06" in " ".join(judged.evidence)


def test_expectations_grow_with_samples_and_stay_within_the_runs():
    at = [verdict.expectation(DATA, 3, n) for n in (1000, 10_000, 20_000, 48_000, 500_000)]
    assert [round(e.high, 2) for e in at] == [2.06, 2.06, pytest.approx(2.33, abs=0.01), 2.66, 2.83]
    assert at[0].low is None and at[1].low == 1.5
    assert verdict.expectation(DATA, 5).potential == 3.46
    deep = verdict.expectation(DATA, 8)
    assert 3.46 <= deep.potential < 4 and "extended" in deep.potential_source


def test_what_would_pay_names_the_best_k():
    cost = stepcost.StepCost([(1, 1.5), (3, 2.6)], "step cost")
    judged = verdict.judge(Facts("slower", 3, GOOD, as_built=GOOD, speedup=0.88, rho=2.6, cost=cost), DATA)
    row = next(row for row in judged.pay if row["change"] == "K")
    assert row["needed"] == "1" and "1.07x" in row["note"] and "position 4 would not pay" in row["note"]
    assert not any(row["change"] == "CUDA graphs" for row in judged.pay)


def test_cuda_graphs_off_is_part_of_what_would_pay():
    """B090: 276 against 378 tok/s at the same acceptance length."""
    judged = verdict.judge(Facts("slower", 3, GOOD, as_built=GOOD, speedup=0.7, rho=3.3, graphs_off=True), DATA)
    row = next(row for row in judged.pay if row["change"] == "CUDA graphs")
    assert judged.cause == "cost" and "276 to 378" in row["note"]


def test_emulated_bfloat16_is_part_of_what_would_pay():
    facts = Facts("slower", 3, GOOD, as_built=GOOD, speedup=0.78, rho=2.71)
    assert not any(row["change"] == "bfloat16" for row in verdict.judge(facts, DATA).pay)
    facts.emulated = True
    row = next(row for row in verdict.judge(facts, DATA).pay if row["change"] == "bfloat16")
    assert row["needed"] == "AVX512-BF16 or AMX" and "2.71" in row["note"] and "1.29" in row["note"]


def test_out_of_reach_is_said():
    judged = verdict.judge(Facts("slower", 1, length=1.6, speedup=0.6, rho=1.6 / 0.6), DATA)
    assert "out of reach" in judged.pay[0]["note"] and judged.cause == "cost"
