import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import benchmark_files as files
from breakeven import artefacts, comparison, evidence, refusals, tables
from breakeven.arms import read_arm
from breakeven.cli import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def specs():
    """A baseline at 30 tok/s and an arm at K = 3, 1.4 times as fast."""
    return files.default(), files.default("vllm-own-k3", k=3, drafter="own", rate=42.0)


def compared(folder, *specs, offline=None):
    for spec in specs:
        files.write(folder, spec)
    arms = [read_arm(folder, spec["parameters"]["arm"]) for spec in specs]
    result = comparison.compare(arms, evidence.read_offline(offline or {}))
    return {row["arm"]: row for row in result.summary}, result


def test_an_arm_measured_long_after_its_baseline_is_not_decided(tmp_path, specs):
    """Passes at 10, 20, 30 minutes; the arm's begin 15 minutes later, then 25: between, and after the baseline's last."""
    base, arm = specs
    beside, _ = compared(tmp_path / "beside", base, arm | {"sent_at": base["sent_at"] + 900})
    assert beside["vllm-own-k3"]["verdict"] == "faster"
    rows, result = compared(tmp_path / "later", base, arm | {"sent_at": base["sent_at"] + 1500})
    assert rows["vllm-own-k3"]["verdict"] == "undecided" and rows["vllm-own-k3"]["speedup"] > 1.3
    assert rows["vllm-own-k3"]["rho"] is None and result.details["vllm-own-k3"]["pay"] == []
    assert beside["vllm-own-k3"]["rho"] > 0
    assert result.details["vllm-own-k3"]["undecided_because"] == "apart"
    warning = next(w for w in result.details["vllm-own-k3"]["warnings"] if "apart" in w)
    assert warning.startswith("measured 4 minutes apart from vllm-none") and "results/benchmarks/vllm-none" in warning
    arms = [read_arm(tmp_path / "later", name) for name in ("vllm-none", "vllm-own-k3")]
    assert comparison.undecided(arms) == ["vllm-none", "vllm-own-k3"]  # a further pass of both would decide
    once, _ = compared(tmp_path / "once", base | {"passes": [1]}, arm | {"passes": [1], "sent_at": 1.9e9})
    assert "too-few-passes" in once["vllm-own-k3"]["reason"]


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rate": 30.0}, "noise"),
        ({"prompts": files.PROMPTS[:3]}, "few-prompts"),
        ({"passes": [1]}, "single-pass"),
        ({}, None),
    ],
)
def test_it_is_kept_why_an_arm_is_undecided(tmp_path, specs, changes, reason):
    for spec in specs:
        spec |= changes
        spec["parameters"]["protocol"]["passes"] = len(spec["passes"])
    rows, result = compared(tmp_path, *specs)
    assert (rows["vllm-own-k3"]["verdict"] == "undecided") == (reason is not None)
    assert result.details["vllm-own-k3"]["undecided_because"] == reason
    assert result.details["vllm-none"]["undecided_because"] is None


def test_a_sound_comparison(tmp_path, specs):
    offline = {"own": files.write_offline(tmp_path / "offline.parquet")}
    rows, result = compared(tmp_path, *specs, offline=offline)
    base, arm = rows["vllm-none"], rows["vllm-own-k3"]
    assert (base["verdict"], base["baseline"], base["speedup"], base["acceptance_length"]) == (
        "baseline", "vllm-none", 1.0, None,
    )  # fmt: skip
    assert (arm["verdict"], arm["reason"], arm["baseline"]) == ("faster", None, "vllm-none")
    assert arm["speedup_low"] < 1.4 < arm["speedup_high"]
    assert arm["speedup"] == pytest.approx(1.4, abs=0.08)
    assert base["tokens_per_second"] == pytest.approx(30 * 1.2, rel=0.03)  # prompts at 30, 33, ..., 42
    assert arm["tokens_per_second_e2e"] < arm["tokens_per_second"]
    assert arm["rho"] == pytest.approx(arm["acceptance_length"] / arm["speedup"])
    assert arm["offline_acceptance_length"] == pytest.approx(1 + 0.6 + 0.396 + 0.297)
    assert arm["identical_outputs"] == 1.0 and result.details["vllm-own-k3"]["warnings"] == []
    assert 0 < result.details["vllm-own-k3"]["noise_floor"] < 0.05
    assert [row["position"] for row in result.acceptance] == [1, 2, 3]
    for row in result.acceptance:
        assert row["low"] < row["marginal"] < row["high"]
        assert row["offline_prompts"] == "quick" and abs(row["offline_marginal"] - row["marginal"]) < 0.1
    assert len(result.requests) == 30
    ratios = {row["prompt_id"]: row["speedup"] for row in result.requests if row["speedup"]}
    assert math.prod(ratios.values()) ** (1 / 5) == pytest.approx(arm["speedup"])


def test_an_arm_that_the_preflight_refused_has_a_row_that_says_why(tmp_path, specs):
    base, arm = specs
    wrong = files.default("vllm-wrong-k3", k=3, drafter="wrong")
    wrong["unmeasured"] = dict.fromkeys((1, 2, 3), "preflight")
    wrong["findings"] = [
        files.finding("layer-ids"),
        files.finding("dtype", "WARN"),
        files.finding("rope-theta", allowed=True),
    ]
    rows, result = compared(tmp_path, base, arm, wrong)
    assert list(rows) == ["vllm-none", "vllm-own-k3", "vllm-wrong-k3"] and rows["vllm-own-k3"]["verdict"] == "faster"
    row = rows["vllm-wrong-k3"]
    assert (row["verdict"], row["cause"], row["fault"]) == ("refused", "integration", "layer-ids")
    assert row["reason"] == "preflight: layer-ids: layer-ids is wrong: 1, not 2; mend: mend layer-ids"
    assert row["speedup"] is row["acceptance_length"] is row["tokens_per_second"] is None
    assert not [r for r in result.requests + result.acceptance if r["arm"] == "vllm-wrong-k3"]
    assert result.details["vllm-wrong-k3"]["findings"] == wrong["findings"]


def test_the_evidence_begins_with_what_was_allowed_against_the_preflight(tmp_path, specs):
    base, arm = specs
    arm["findings"] = [files.finding("algorithm", allowed=True), files.finding("dtype", "WARN")]
    _, result = compared(tmp_path, base, arm)
    first, *others = result.details["vllm-own-k3"]["evidence"]
    assert first == "measured although the preflight found algorithm: algorithm is wrong: 1, not 2"
    assert not any("dtype" in sentence for sentence in others)


def test_further_passes_are_for_undecided_arms_and_their_baseline(tmp_path):
    base = files.default()
    clear = files.default("vllm-clear", k=3, drafter="own", rate=60.0)
    level = files.default("vllm-level", k=3, drafter="own", rate=30.1)
    refused = files.default("vllm-refused", k=3, drafter="own", rate=30.1) | {"tokens": 20}
    for spec in (base, clear, level, refused):
        files.write(tmp_path, spec)
    arms = [read_arm(tmp_path, spec["parameters"]["arm"], 3) for spec in (base, clear, level, refused)]
    assert comparison.undecided(arms) == ["vllm-none", "vllm-level"]
    assert comparison.undecided([arms[0], arms[1], arms[3]]) == []
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/further_pass.py", "--benchmarks", tmp_path, "--number", "4"]
        + ["--arms", "vllm-none", "vllm-clear", "vllm-level", "--out", tmp_path / "further.json"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "further.json").read_text())["arms"] == ["vllm-none", "vllm-level"]


@pytest.mark.parametrize("temperature, needed", [(0.6, ["vllm-none", "vllm-own-k3"]), (0, [])])
@pytest.mark.parametrize("change", [{"tokens": 112}, {"output": [7] * 128}])
def test_a_refusal_over_sampled_texts_may_change_with_further_passes(tmp_path, specs, temperature, needed, change):
    base, arm = specs
    for spec in (base, arm | change):
        spec["parameters"]["protocol"]["temperature"] = temperature
        files.write(tmp_path, spec)
    arms = [read_arm(tmp_path, spec["parameters"]["arm"]) for spec in specs]
    assert comparison.compare(arms).summary[1]["verdict"] == "refused"
    assert comparison.undecided(arms) == needed


def test_another_cached_share_is_a_warning_single_stream(tmp_path, specs):
    """As vLLM's prefix caching makes it with EAGLE: the prefill is no part of decode speed, but of a server's under load."""
    base, arm = specs
    base["cached"] = 32
    rows, result = compared(tmp_path / "single", base, arm)
    assert rows["vllm-own-k3"]["verdict"] == "faster"
    (warning,) = result.details["vllm-own-k3"]["warnings"]
    assert "0% of the prompt tokens were cached against 76% in baseline vllm-none" in warning
    assert "no-enable-prefix-caching: true of vLLM" in warning and "decode speed leaves the prefill out" in warning
    less_cached_under_load(base, arm)
    for spec in specs:
        spec["parameters"]["protocol"]["temperature"] = 0.6
    rows, result = compared(tmp_path / "load", base, arm)
    assert rows["vllm-own-k3"]["reason"].startswith("unequal-cache: 0% of the prompt tokens were cached against 76%")
    assert not any("cached" in warning for warning in result.details["vllm-own-k3"]["warnings"])
    arms = [read_arm(tmp_path / "load", name) for name in rows]
    assert comparison.undecided(arms) == []  # no further pass would change it


@pytest.mark.parametrize("once", [0, 1])
def test_a_single_pass_of_either_arm_is_undecided(tmp_path, specs, once):
    specs[once]["passes"] = [1]
    specs[once]["parameters"]["protocol"]["passes"] = 1
    rows, result = compared(tmp_path, *specs)
    assert rows["vllm-own-k3"]["verdict"] == "undecided" and rows["vllm-own-k3"]["reason"] is None
    name = specs[once]["parameters"]["arm"]
    assert f"a single pass of {name}: no A/A noise floor" in " ".join(result.details["vllm-own-k3"]["warnings"])


def test_a_spared_pass_is_neither_missing_nor_counted(tmp_path, specs):
    base, arm = specs
    base["passes"] = arm["passes"] = [1, 2, 3, 4]
    arm["unmeasured"] = {4: "decided"}
    for spec in (base, arm):
        files.write(tmp_path, spec)
    arms = [read_arm(tmp_path, spec["parameters"]["arm"], 4) for spec in (base, arm)]
    rows = {row["arm"]: row for row in comparison.compare(arms).summary}
    assert (rows["vllm-own-k3"]["verdict"], rows["vllm-own-k3"]["passes"]) == ("faster", 3)
    assert rows["vllm-none"]["passes"] == 4


def test_engines_are_compared_by_acceptance_alone(tmp_path):
    def of(engine, name, conditional=(0.6, 0.66, 0.75), **parameters):
        spec = files.default(name, k=3, drafter="own", rate=10.0) | {"conditional": list(conditional)}
        spec["parameters"] |= {"engine": engine} | parameters
        spec["prompts"] = [f"p{i}" for i in range(20)]
        return spec

    same = compared(tmp_path / "a", of("vllm", "v"), of("sglang", "s"), of("sglang", "tree", options={"topk": 4}))[1]
    (pair,) = same.between_engines
    assert pair["arms"] == ["v", "s"] and pair["agree"] and pair["p_value"] > 0.05
    assert pair["steps"][0] > 500 and abs(pair["acceptance_length"][0] - pair["acceptance_length"][1]) < 0.2
    wrong = compared(tmp_path / "b", of("vllm", "v"), of("sglang", "s", (0.3, 0.3, 0.3)))[1]
    assert not wrong.between_engines[0]["agree"]
    assert compared(tmp_path / "c", of("vllm", "v"), of("sglang", "s", method="ngram"))[1].between_engines == []


def test_rates_and_break_even_are_exact(tmp_path, specs):
    """Decode speed leaves out the first token and its time; AL 2.5 at 59 against 61 tok/s is a rho of 2.585."""

    def timed(rate, **counts):
        def change_row(row):
            row.update(completion_tokens=101, ttft_s=0.5, e2e_s=0.5 + 100 / rate, **counts)

        return change_row

    base, arm = specs
    rows(timed(61.0))(None, base)
    rows(timed(59.0, steps=40, drafted=120, accepted=60, accepted_per_position=[30, 20, 10]))(None, arm)
    found, result = compared(tmp_path, base, arm)
    slow = found["vllm-own-k3"]
    assert found["vllm-none"]["tokens_per_second"] == pytest.approx(61)
    assert slow["tokens_per_second"] == pytest.approx(59)
    assert slow["tokens_per_second_e2e"] == pytest.approx(101 / (0.5 + 100 / 59))
    assert slow["ttft_s"] == 0.5
    assert slow["acceptance_length"] == 2.5 and slow["rho"] == pytest.approx(2.5 * 61 / 59)
    assert [row["conditional"] for row in result.acceptance] == pytest.approx([30 / 40, 20 / 30, 10 / 20])
    assert slow["verdict"] == "slower"


def baseline_changes(key, value):
    def change(base, arm):
        base[key] |= value

    return change


def protocol(**changes):
    def change(base, arm):
        arm["parameters"]["protocol"] |= changes

    return change


def rows(change_row):
    def change_rows(rows):
        for row in rows:
            change_row(row)
        return rows

    return lambda base, arm: arm.update(change_rows=change_rows)


def too_long(row):
    row["completion_tokens"] = int(row["completion_tokens"] * 1.2)


def too_many_accepted(row):
    row.update(accepted=row["steps"] * 3 + 1, accepted_per_position=None, drafted=None)


def increasing(row):
    row["accepted_per_position"] = row["accepted_per_position"][::-1]


def other_template(row):
    row["prompt_token_ids"] = [1, *row["prompt_token_ids"]]


def less_cached_under_load(base, arm):
    base["cached"] = 32
    for spec in (base, arm):
        spec["parameters"]["protocol"]["concurrency"] = 2


def all_at_once(row):
    row["e2e_s"] = row["ttft_s"]


def improbable(*prompts):
    return {
        prompt: {"mean_log_probability": -9.7, "problem": "improbable text: mean log-probability -9.7"}
        for prompt in prompts
    }


FAULTS = {
    "no-baseline": [protocol(name="other"), lambda base, arm: base["parameters"].update(engine="sglang")],
    "other-sampling": [protocol(temperature=0.6), protocol(max_tokens=256), protocol(top_p=0.9)],
    "other-machine": [baseline_changes("machine", {"fingerprint": "decaf"})],
    "other-version": [baseline_changes("versions", {"vllm": "0.31.0"})],
    "other-flags": [
        baseline_changes("parameters", {"flags": {"enforce-eager": True}}),
        baseline_changes("parameters", {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}}),
    ],
    "too-few-passes": [lambda base, arm: arm.update(passes=[1, 2]), lambda base, arm: base.update(passes=[2])],
    "inconsistent-passes": [
        lambda base, arm: arm.update(change_rows=lambda rows: rows[: -1 if rows[0]["pass_number"] == 2 else None])
    ],
    "other-prompts": [
        lambda base, arm: arm.update(prompts=[*files.PROMPTS[:4], "another"]),
        rows(other_template),
    ],
    "output-length": [rows(too_long)],
    "unequal-cache": [less_cached_under_load],
    "degenerate-output": [
        lambda base, arm: arm.update(output=[7] * 128),
        lambda base, arm: base.update(output=[1, 2, 3] * 42),
        lambda base, arm: arm.update(sanity=improbable(*files.PROMPTS[:2])),
    ],
    "random-prompts": [protocol(workload="random"), protocol(workload={"kind": "random"})],
    "impossible-acceptance": [rows(too_many_accepted), rows(increasing)],
    "no-decode-time": [rows(all_at_once)],
}


def test_every_reason_is_tested():
    assert set(FAULTS) | {"preflight"} == set(refusals.REASONS)  # tested above: it has no measurement


@pytest.mark.parametrize("reason, fault", [(reason, fault) for reason, faults in FAULTS.items() for fault in faults])
def test_a_faulty_comparison_is_refused(tmp_path, specs, reason, fault):
    fault(*specs)
    found, result = compared(tmp_path, *specs)
    arm = found["vllm-own-k3"]
    assert arm["verdict"] == "refused"
    assert reason in result.details["vllm-own-k3"]["reasons"]
    assert f"{reason}: " in arm["reason"]
    for column in ("speedup", "speedup_low", "speedup_high", "rho"):
        assert arm[column] is None
    assert all(row["speedup"] is None for row in result.requests)
    shown = reason not in ("random-prompts",)
    assert (arm["acceptance_length"] is not None) == shown


def test_changes_between_passes_are_refused(tmp_path, specs):
    compared(tmp_path, *specs)
    path = tmp_path / "vllm-own-k3" / "pass-2.manifest.json"
    manifest = artefacts.read_json(path)
    manifest["machine"]["fingerprint"] = "decaf"
    artefacts.write_json(path, manifest)
    arms = [read_arm(tmp_path, spec["parameters"]["arm"]) for spec in specs]
    assert "inconsistent-passes: pass 2 of arm vllm-own-k3 differs" in comparison.compare(arms).summary[1]["reason"]


def test_the_matching_baseline_is_chosen_among_several(tmp_path, specs):
    base, arm = specs
    other = files.default("vllm-none-eager", rate=20)
    other["parameters"]["flags"] = {"enforce-eager": True}
    rows, _ = compared(tmp_path, other, base, arm)
    assert rows["vllm-own-k3"]["baseline"] == "vllm-none"


def test_a_slower_and_an_undecided_arm(tmp_path, specs):
    base, arm = specs
    same = files.default("vllm-own-k1", k=1, drafter="own", rate=30.0)
    arm["rate"] = 20.0
    rows, _ = compared(tmp_path, base, arm, same)
    assert rows["vllm-own-k3"]["verdict"] == "slower"
    assert rows["vllm-own-k1"]["verdict"] == "undecided"
    assert rows["vllm-own-k3"]["rho"] > rows["vllm-own-k3"]["acceptance_length"]


def test_a_lossy_arm_is_warned_about_not_refused(tmp_path, specs):
    base, arm = specs

    def change_rows(rows):
        rows[0]["output_token_ids"][40] += 1
        return rows

    arm["change_rows"] = change_rows
    found, result = compared(tmp_path, base, arm)
    assert found["vllm-own-k3"]["verdict"] == "faster"
    assert found["vllm-own-k3"]["identical_outputs"] == pytest.approx(0.8)
    assert found["vllm-none"]["identical_outputs"] == 1.0
    lossless = result.details["vllm-own-k3"]["lossless"]
    assert lossless["first_difference"] == {"reference-0": 40} and lossless["control"] == 1.0
    assert any("token 40" in warning for warning in result.details["vllm-own-k3"]["warnings"])


def test_sampled_outputs_are_not_compared_token_by_token(tmp_path, specs):
    for spec in specs:
        spec["parameters"]["protocol"]["temperature"] = 0.6
    rows, _ = compared(tmp_path, *specs)
    assert rows["vllm-own-k3"]["verdict"] == "faster" and rows["vllm-own-k3"]["identical_outputs"] is None


def test_a_single_loop_is_a_warning(tmp_path, specs):
    base, arm = specs

    def change_rows(rows):
        rows[0]["output_token_ids"] = [7] * 128
        return rows

    base["change_rows"] = arm["change_rows"] = change_rows
    rows, result = compared(tmp_path, base, arm)
    assert rows["vllm-own-k3"]["verdict"] == "faster"
    assert any("3 of 15 outputs repeat themselves" in w for w in result.details["vllm-own-k3"]["warnings"])


def test_a_single_improbable_text_is_a_warning(tmp_path, specs):
    base, arm = specs
    arm["sanity"] = improbable(files.PROMPTS[0])
    rows, result = compared(tmp_path, base, arm)
    assert rows["vllm-own-k3"]["verdict"] == "faster"
    warning = "3 of 15 outputs are improbable (prompt reference-0: improbable text: mean log-probability -9.7)"
    assert warning in result.details["vllm-own-k3"]["warnings"]


def test_loops_and_improbable_texts_are_refused_together(tmp_path, specs):
    """One prompt in five of each kind: a fifth alone would be a warning."""
    base, arm = specs
    arm["sanity"] = improbable(files.PROMPTS[1])

    def change_rows(rows):
        rows[0]["output_token_ids"] = [7] * 128
        return rows

    arm["change_rows"] = change_rows
    reason = compared(tmp_path, base, arm)[0]["vllm-own-k3"]["reason"]
    assert "3 of 15 outputs repeat themselves and 3 of 15 outputs are improbable (prompt reference-0: token 7" in reason


def test_four_prompts_have_no_interval_and_no_verdict(tmp_path, specs):
    for spec in specs:
        spec["prompts"] = files.PROMPTS[:4]
    rows, _ = compared(tmp_path, *specs)
    arm = rows["vllm-own-k3"]
    assert arm["verdict"] == "undecided" and arm["speedup_low"] is None and arm["speedup"] > 1.2


def test_an_engine_that_reports_no_steps(tmp_path, specs):
    base, arm = specs

    def change_row(row):
        row.update(steps=None, drafted=None, accepted=None, accepted_per_position=None)

    rows(change_row)(base, arm)
    found, result = compared(tmp_path, base, arm)
    assert found["vllm-own-k3"]["verdict"] == "faster"
    assert found["vllm-own-k3"]["acceptance_length"] is None and found["vllm-own-k3"]["rho"] is None
    assert any("no verification step" in warning for warning in result.details["vllm-own-k3"]["warnings"])


def test_the_walk_on_served_outputs_comes_before_the_held_out_one(tmp_path, specs):
    held_out = files.write_offline(tmp_path / "offline.parquet", prompts="held-out")
    served = files.write_offline(tmp_path / "served.parquet", prompts="served")
    _, result = compared(tmp_path, *specs, offline={"own": held_out})
    assert {row["offline_prompts"] for row in result.acceptance} == {"held-out"}
    _, result = compared(tmp_path, *specs, offline={"own": held_out, "vllm-own-k3": served})
    assert {row["offline_prompts"] for row in result.acceptance} == {"served"}
    other_k = {"own": files.write_offline(tmp_path / "k2.parquet", k=2)}
    _, result = compared(tmp_path, *specs, offline=other_k)
    assert {row.get("offline_marginal") for row in result.acceptance} == {None}


def test_a_walk_without_a_step_leaves_the_offline_columns_null(tmp_path, specs):
    nothing = {"steps": 0, "accepted": 0, "marginal": None, "conditional": None, "acceptance_length": None}
    rows = [{"prompts": "served", "k": 3, "position": i} | nothing for i in (1, 2, 3)]
    artefacts.write_table(tmp_path / "offline.parquet", rows, tables.OFFLINE)
    found, result = compared(tmp_path, *specs, offline={"vllm-own-k3": tmp_path / "offline.parquet"})
    assert found["vllm-own-k3"]["offline_acceptance_length"] is None
    assert {row["offline_marginal"] for row in result.acceptance} == {None}


def test_script_writes_the_contract(tmp_path, specs):
    for spec in specs:
        files.write(tmp_path / "benchmarks", spec)
    offline = files.write_offline(tmp_path / "offline.parquet")
    out = tmp_path / "comparison"
    command = [
        sys.executable, ROOT / "scripts/compare.py", "--benchmarks", tmp_path / "benchmarks",
        "--arms", "vllm-none", "vllm-own-k3", "--offline", f"own={offline}", "--out", out / "summary.parquet",
        "--acceptance", out / "acceptance.parquet", "--requests", out / "requests.parquet",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert artefacts.read_table(out / "summary.parquet").schema.equals(tables.SUMMARY)
    assert artefacts.read_table(out / "acceptance.parquet").schema.equals(tables.ACCEPTANCE)
    assert artefacts.read_table(out / "requests.parquet").schema.equals(tables.REQUESTS)
    manifest = artefacts.read_manifest(out / "summary.manifest.json", "comparison")
    assert manifest["counts"] == {"arms": 2, "baseline": 1, "faster": 1}
    before = [(out / name).read_bytes() for name in ("summary.parquet", "summary.manifest.json")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert before == [(out / name).read_bytes() for name in ("summary.parquet", "summary.manifest.json")]
    command[command.index("vllm-own-k3")] = "vllm-own-k9"
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and "vllm-own-k9" in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize("section, key", [("machine", "fingerprint"), ("parameters", "protocol"), ("versions", None)])
def test_an_incomplete_manifest_names_the_key(tmp_path, specs, section, key):
    files.write(tmp_path, specs[0])
    path = tmp_path / "vllm-none" / "pass-1.manifest.json"
    manifest = artefacts.read_json(path)
    del (manifest[section] if key else manifest)[key or section]
    artefacts.write_json(path, manifest)
    with pytest.raises(UserError, match=key or section):
        read_arm(tmp_path, "vllm-none")


def test_a_prompt_measured_twice_is_an_error(tmp_path, specs):
    specs[0]["change_rows"] = lambda rows: rows + rows[:1]
    files.write(tmp_path, specs[0])
    with pytest.raises(UserError, match="measured twice"):
        read_arm(tmp_path, "vllm-none")


# The verdict's cause


def long(spec, prompts=20):
    """So many prompts that a pass has enough verification steps."""
    spec["prompts"] = [f"prompt-{i}" for i in range(prompts)]
    return spec


def judged(folder, base, arm, conditional, hypotheses=None, **more):
    """Compare two arms with a served walk of this conditional acceptance; the arm's row and details."""
    for spec in (base, arm):
        files.write(folder, spec)
    arms = [read_arm(folder, spec["parameters"]["arm"]) for spec in (base, arm)]
    served = evidence.served_counts(arms[1])
    name = arms[1].name

    def walk(curve):
        marginal = np.cumprod(curve)
        steps = round(served.tokens / (1 + marginal.sum()))
        return steps, [int(steps * m) for m in marginal]

    walks = {"as-built": walk(conditional)} | {key: walk(curve) for key, curve in (hypotheses or {}).items()}
    offline = {name: files.write_walk(folder / "walk.parquet", {"as-built": walks["as-built"]}, tables.OFFLINE)}
    what_if = {name: files.write_walk(folder / "what-if.parquet", walks)} if hypotheses else {}
    result = comparison.compare(arms, evidence.read_offline(offline), evidence.read_what_if(what_if), **more)
    return result.summary[1], result.details[name]


FAST = (0.60, 0.66, 0.75)


def test_as_built_and_faster_is_nobodys_fault(tmp_path, specs):
    base, arm = map(long, specs)
    row, details = judged(
        tmp_path, base, arm, FAST, {"theta-10000": (0.58, 0.40, 0.35), "fc-skipped": (0.02, 0.1, 0.1)}
    )
    assert (row["verdict"], row["cause"], row["fault"]) == ("faster", None, None)
    assert details["evidence"][0].startswith("served as built") and len(details["hypotheses"]) == 3


def test_a_planted_fault_is_named(tmp_path, specs):
    base, arm = map(long, specs)
    arm |= {"conditional": [0.02, 0.1, 0.1], "rate": 24.0}
    row, details = judged(tmp_path, base, arm, FAST, {"theta-10000": (0.58, 0.5, 0.5), "fc-skipped": (0.02, 0.1, 0.1)})
    assert (row["verdict"], row["cause"], row["fault"]) == ("slower", "integration", "fc-skipped")
    assert details["pay"] and any("fc is skipped" in sentence for sentence in details["evidence"])
    json.dumps(details, allow_nan=False)


def test_only_the_first_pass_counts_as_evidence(tmp_path, specs):
    """Greedy passes are copies: three of them are not three times the steps."""
    base, arm = map(long, specs)
    files.write(tmp_path, arm)
    whole = read_arm(tmp_path, arm["parameters"]["arm"])
    assert evidence.served_counts(whole).steps < 0.4 * whole.total("steps")


def test_prediction_needs_a_step_cost_of_the_same_machine(tmp_path, specs):
    base, arm = map(long, specs)
    path = files.write_step_cost(tmp_path / "vllm.parquet", {1: 1.2, 3: 1.5}, base)
    cost = evidence.read_step_cost({"vllm": path})
    row, _ = judged(tmp_path, base, arm, FAST, step_cost=cost)
    assert row["predicted_speedup"] == pytest.approx((1 + 0.6 + 0.396 + 0.297) / 1.5, rel=0.01)
    other = base["machine"] | {"fingerprint": "another"}
    path = files.write_step_cost(tmp_path / "other.parquet", {1: 1.2, 3: 1.5}, base, machine=other)
    row, details = judged(tmp_path, base, arm, FAST, step_cost=evidence.read_step_cost({"vllm": path}))
    assert row["predicted_speedup"] is None and "another machine" in " ".join(details["warnings"])
    row, _ = judged(tmp_path, base, arm, FAST)
    assert row["predicted_speedup"] is None


@pytest.mark.parametrize("change", [{"method": "ngram"}, {"method": "draft_model"}, {"options": {"topk": 4}}])
def test_a_step_cost_of_chains_says_nothing_of_other_drafts(tmp_path, specs, change):
    base, arm = map(long, specs)
    arm["parameters"] |= change
    cost = evidence.read_step_cost({"vllm": files.write_step_cost(tmp_path / "vllm.parquet", {1: 1.1, 3: 1.2}, base)})
    row, details = judged(tmp_path, base, arm, FAST, step_cost=cost)
    assert (row["verdict"], row["cause"], row["predicted_speedup"]) == ("faster", None, None)
    assert "step cost" not in " ".join(details["warnings"])
    arm["parameters"]["options"] = {"topk": 1}
    row, _ = judged(
        tmp_path, base, arm | {"parameters": arm["parameters"] | {"method": "eagle3"}}, FAST, step_cost=cost
    )
    assert row["predicted_speedup"] and row["cause"] == "cost"


@pytest.mark.parametrize("size, predicted", [(8192, True), (None, True), (32_000, False)])
def test_a_step_cost_of_another_draft_vocabulary_is_not_used(tmp_path, specs, size, predicted):
    base, arm = map(long, specs)
    cost = evidence.read_step_cost({"vllm": files.write_step_cost(tmp_path / "vllm.parquet", {3: 1.2}, base)})
    drafters = {"own": {"parameters": {"draft_vocab_size": size} if size else {}}}
    row, details = judged(tmp_path, base, arm, FAST, step_cost=cost, drafters=drafters)
    assert (row["predicted_speedup"] is not None) == predicted
    assert ("another draft vocabulary" in " ".join(details["warnings"])) != predicted


def test_arms_that_draft_otherwise_do_not_tell_the_best_k(tmp_path, specs):
    base, arm = map(long, specs)
    shallow = long(files.default("vllm-ngram-k1", k=1, rate=42.0))
    shallow["parameters"]["method"], arm["parameters"] = "ngram", arm["parameters"] | {"drafter": None}
    arm["parameters"]["method"], arm["rate"] = "draft_model", 24.0
    _, result = compared(tmp_path, base, arm, shallow)
    row = next(row for row in result.details["vllm-own-k3"]["pay"] if row["change"] == "K")
    assert row["note"] == "rho at other K was not measured"


def test_the_best_k_comes_from_the_arms_where_nothing_else_is_known(tmp_path, specs):
    base, arm = map(long, specs)
    shallow = long(files.default("vllm-own-k1", k=1, drafter="own", rate=42.0))
    arm["rate"] = 24.0
    for spec in (base, arm, shallow):
        files.write(tmp_path, spec)
    arms = [read_arm(tmp_path, spec["parameters"]["arm"]) for spec in (base, arm, shallow)]
    result = comparison.compare(arms)
    row = next(row for row in result.details["vllm-own-k3"]["pay"] if row["change"] == "K")
    assert row["needed"] == "1" and "arms of this run" in row["note"]


@pytest.mark.parametrize(
    ("hardware", "computes", "dtype", "said"),
    [
        ("cpu", False, "bfloat16", True),
        ("cpu", False, None, True),
        ("cpu", False, "float32", False),
        ("cpu", True, "bfloat16", False),
        ("cuda", False, "bfloat16", False),
    ],
)
def test_a_cpu_that_emulates_bfloat16_is_part_of_what_would_pay(tmp_path, specs, hardware, computes, dtype, said):
    base, arm = map(long, specs)
    arm["rate"] = 24.0
    for spec in (base, arm):
        spec["machine"]["cpu_bfloat16"] = computes
        spec["parameters"]["hardware"] = hardware
        spec["parameters"]["flags"] |= {"dtype": dtype} if dtype else {}
        files.write(tmp_path, spec)
    result = comparison.compare([read_arm(tmp_path, spec["parameters"]["arm"]) for spec in (base, arm)])
    assert any(row["change"] == "bfloat16" for row in result.details["vllm-own-k3"]["pay"]) is said


def test_training_data_is_read_from_the_drafters_manifest(tmp_path, specs):
    base, arm = map(long, specs)
    arm |= {"conditional": [0.3, 0.2, 0.2], "rate": 28.0}
    manifest = {
        "counts": {"training_sequences": 450, "training_response_tokens": 63_000},
        "held_out": {"accuracy": [0.35, 0.3, 0.2]},
    }
    row, details = judged(tmp_path, base, arm, (0.3, 0.2, 0.2), drafters={"own": manifest})
    text = " ".join(details["evidence"])
    assert row["cause"] == "training"
    assert "450 samples" in text and "63,000 response tokens" in text and "0.35, 0.30, 0.20" in text


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda walks: walks.update({"my-own": walks["as-built"]}), "hypothesis 'my-own' is not known"),
        (lambda walks: walks.update({"theta-10000": walks.pop("as-built")}), "no row of hypothesis 'as-built'"),
    ],
)
def test_a_bad_what_if_table_is_an_error(tmp_path, change, message):
    walks = {"as-built": (100, [60, 40, 30])}
    change(walks)
    with pytest.raises(UserError, match=message):
        evidence.read_what_if({"a": files.write_walk(tmp_path / "what-if.parquet", walks)})


def test_impossible_walks_and_step_costs_are_errors(tmp_path, specs):
    base, arm = map(long, specs)
    with pytest.raises(UserError, match="position 2 accepted more often"):
        rows = pd.DataFrame({"k": [2, 2], "position": [1, 2], "steps": [10, 10], "accepted": [3, 4]})
        evidence.counts_of(rows, "walk")
    with pytest.raises(UserError, match="one row for each position"):
        evidence.counts_of(rows[:1], "walk")
    path = files.write_step_cost(tmp_path / "vllm.parquet", {1: -1.0}, base)
    with pytest.raises(UserError, match="rho -1.0"):
        evidence.read_step_cost({"vllm": path})
    with pytest.raises(UserError, match="no row for engine 'sglang'"):
        evidence.read_step_cost({"sglang": path})


def test_script_with_what_if_and_step_cost(tmp_path, specs):
    base, arm = map(long, specs)
    arm |= {"conditional": [0.02, 0.1, 0.1], "rate": 24.0}
    judged(tmp_path, base, arm, FAST, {"fc-skipped": (0.02, 0.1, 0.1)})
    files.write_step_cost(tmp_path / "vllm.parquet", {1: 1.2, 3: 1.5}, base)
    command = [
        sys.executable, ROOT / "scripts" / "compare.py", "--benchmarks", tmp_path, "--arms", "vllm-none", "vllm-own-k3",
        "--offline", f"vllm-own-k3={tmp_path / 'walk.parquet'}", "--what-if", f"vllm-own-k3={tmp_path / 'what-if.parquet'}",
        "--stepcost", f"vllm={tmp_path / 'vllm.parquet'}", "--out", tmp_path / "summary.parquet",
        "--acceptance", tmp_path / "acceptance.parquet", "--requests", tmp_path / "requests.parquet",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "cause: integration (fc-skipped)" in done.stderr
    row = artefacts.read_table(tmp_path / "summary.parquet", tables.SUMMARY).to_pylist()[1]
    assert (row["cause"], row["fault"]) == ("integration", "fc-skipped") and row["predicted_speedup"] > 1
    manifest = artefacts.read_manifest(tmp_path / "summary.manifest.json", "comparison")
    assert {"what-if/vllm-own-k3", "stepcost/vllm"} <= set(manifest["inputs"])
    assert manifest["arms"]["vllm-own-k3"]["evidence"]
    command[command.index("--what-if") + 1] = "nobody=file"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: --what-if nobody: no such arm")
