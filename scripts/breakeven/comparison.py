"""Pair every arm with its baseline, refuse what cannot be compared, and write the comparison tables.

The baseline of an arm (arms.py) is the arm without speculation of the same engine, protocol, machine, versions, flags and
environment. A comparison that would mislead is refused with a reason (refusals.py), and its speed-up stays null; its own
measurements and its acceptance are still shown. What the verdict needs besides is in evidence.py.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven import acceptance, artefacts, evidence, load, places, refusals, stats, stepcost, tables, verdict
from breakeven.arms import Arm, is_random, read_arm
from breakeven.cli import UserError
from breakeven.indecision import because

EXPECTATIONS = Path(__file__).parents[2] / "resources" / "expectations.json"

FULL_SHARE = 0.5  # of a pass under load with all requests in flight; a smaller one is remarked on


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ (the shorter length if one is a prefix); None if equal."""
    for i, (a, b) in enumerate(zip(ids, other, strict=False)):
        if a != b:
            return i
    return None if len(ids) == len(other) else min(len(ids), len(other))


def losslessness(arm: Arm, baseline: Arm) -> dict[str, Any] | None:
    """Greedy outputs beside the baseline's, against the A/A control of baseline passes; None if sampled.

    identical: share of (prompt, pass) pairs with the same token ids in the same pass of both arms.
    control: the same share between different passes of the baseline; None with a single pass.
    first_difference: by prompt, the smallest index at which an output differed.
    """
    if arm.protocol.get("temperature") != 0:
        return None
    mine, other = arm.outputs, baseline.outputs

    def share(pairs) -> float | None:
        return float(np.mean([d is None for d in pairs])) if pairs else None

    indices: dict[str, int] = {}
    pairs = []
    for number in sorted(set(mine) & set(other)) if arm is not baseline else []:
        for prompt in sorted(set(mine[number]) & set(other[number])):
            at = first_difference(mine[number][prompt], other[number][prompt])
            pairs.append(at)
            if at is not None:
                indices[prompt] = min(at, indices.get(prompt, at))
    control = [
        first_difference(other[a][prompt], other[b][prompt])
        for a in other
        for b in other
        if a < b
        for prompt in sorted(set(other[a]) & set(other[b]))
    ]
    return {"identical": share(pairs), "control": share(control), "first_difference": indices}


@dataclass
class Comparison:
    """The result: rows of the three tables, and by arm what the summary's columns cannot hold."""

    summary: list[dict[str, Any]]
    acceptance: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    details: dict[str, dict[str, Any]]
    between_engines: list[dict[str, Any]] = field(default_factory=list)
    under_load: list[dict[str, Any]] = field(default_factory=list)


def compare(
    arms: Sequence[Arm],
    offline: Mapping[str, pd.DataFrame] | None = None,
    what_if: Mapping[str, evidence.WhatIf] | None = None,
    step_cost: Mapping[str, evidence.Measured] | None = None,
    drafters: Mapping[str, Mapping[str, Any]] | None = None,
    expectations: Mapping[str, Any] | None = None,
    by_place: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Comparison:
    """Compare arms; pure, so that it can be called on measurements from anywhere.

    offline, what_if: by arm (offline also by drafter). step_cost: by engine. drafters: manifests by drafter.
    expectations: resources/expectations.json, read there if not given. by_place: see evidence.read_places.
    """
    expectations = expectations or artefacts.read_json(EXPECTATIONS)
    result = Comparison([], [], [], {})
    for arm in arms:
        if not arm.served:
            result.summary.append(_unserved_row(arm))
            result.details[arm.name] = {"reasons": ["preflight"], "warnings": []} | _details(arm)
            continue
        walk = evidence.offline_walk(arm, offline or {})
        baseline, reasons, warnings, speedup, why = None, [], [], None, None
        if not arm.speculates:
            label, lossless = "baseline", losslessness(arm, arm)
            warnings += refusals.own_reasons(arm)  # a baseline is never refused itself, the arms paired with it are
        else:
            baseline, reasons = refusals.reasons(arm, arms)
            label, lossless = "refused", losslessness(arm, baseline) if baseline is not None else None
        if arm.speculates and not reasons:
            prompts = sorted(set(arm.requests["prompt_id"]))
            speedup = stats.compare(arm.rates(prompts), baseline.rates(prompts))
            label = "undecided" if refusals.apart(arm, baseline) else str(speedup.verdict)
            why = because(arm, baseline, speedup) if label == "undecided" else None
        cost, remarks = evidence.step_cost_of(arm, step_cost or {}, drafters or {})
        by_output_position = evidence.places_of(arm, by_place or {})
        fall = places.fall(by_output_position)
        warnings += warnings_of(arm, baseline, lossless) + remarks + ([fall] if fall else [])
        row = _summary_row(arm, baseline, speedup, walk, lossless, label, reasons)
        if why == "apart":
            row["rho"] = None  # what a step costs follows from speeds of the same time
        row["predicted_rho"] = cost.at(arm.k) if cost else None
        if row["predicted_rho"] and row["offline_acceptance_length"]:
            row["predicted_speedup"] = stepcost.predicted_speedup(
                row["offline_acceptance_length"], row["predicted_rho"]
            )
        result.summary.append(row)
        if not is_random(arm):
            result.acceptance += _acceptance_rows(arm, walk)
        result.requests += _request_rows(arm, baseline, refused=bool(reasons))
        result.details[arm.name] = {
            "reasons": refusals.ids(reasons),
            "warnings": warnings,
            "undecided_because": why,
            "noise_floor": evidence.finite(math.expm1(speedup.floor)) if speedup else None,
            "cached_share": arm.cached_share,
            "full_share": evidence.finite(arm.in_flight["full_share"]),
            "degenerate_share": arm.degenerate_share,
            "lossless": lossless,
            "by_output_position": by_output_position,
        } | _details(arm)
    for arm, row in zip(arms, result.summary, strict=True):
        if not arm.served:
            continue
        row |= {"cause": None, "fault": None, "predicted_speedup": row.get("predicted_speedup")}
        if arm.speculates:
            facts = evidence.facts_of(
                arm,
                row,
                [of for other, of in zip(arms, result.summary, strict=True) if other.draft == arm.draft],
                result.details[arm.name]["reasons"],
                offline or {},
                what_if or {},
                step_cost or {},
                drafters or {},
            )
            found = verdict.judge(facts, expectations)
            row |= {"cause": found.cause, "fault": found.fault}
            allowed = [
                f"measured although the preflight found {finding['id']}: {finding['message']}"
                for finding in arm.findings
                if finding["level"] == "ERROR" and finding["allowed"]
            ]
            result.details[arm.name] |= {
                "evidence": allowed + list(found.evidence),
                "pay": found.pay,
                "hypotheses": [{key: _finite_or(value) for key, value in fit.items()} for fit in found.hypotheses],
            }
        del row["predicted_rho"]
    result.between_engines = between_engines(arms)
    result.under_load = under_load(arms, result.summary)
    return result


def under_load(arms: Sequence[Arm], summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How the speed-up changes with the load: an entry for each set of arms that differ in their concurrency alone.

    points: from the rows of the summary and of their baselines, by concurrency. crossing, between, estimate: see
    load.crossing.
    """
    by_arm = {row["arm"]: row for row in summary}
    series: dict[str, dict[int, dict[str, Any]]] = {}
    for arm, row in zip(arms, summary, strict=True):
        if not arm.speculates:
            continue
        passes = ("name", "concurrency", "requests", "passes", "max_passes")
        same = arm.identity | {"other-sampling": {k: v for k, v in arm.protocol.items() if k not in passes}}
        same |= {key: arm.parameters.get(key) for key in ("engine", "drafter", "method", "k", "options", "allow")}
        shown = ("arm", "verdict", "speedup", "speedup_low", "speedup_high", "acceptance_length", "rho")
        speeds = ("tokens_per_second", "server_tokens_per_second")
        plain = by_arm.get(row["baseline"]) or {}
        series.setdefault(json.dumps(same, sort_keys=True), {}).setdefault(
            arm.concurrency,
            {"concurrency": arm.concurrency}
            | {name: row[name] for name in (*shown, *speeds)}
            | {f"plain_{name}": plain.get(name) for name in speeds},
        )
    found = []
    for by_concurrency in series.values():
        points = [by_concurrency[n] for n in sorted(by_concurrency)]
        if len(points) > 1:
            crossing = load.crossing([(p["concurrency"], p["verdict"], p["speedup"]) for p in points])
            row = by_arm[points[0]["arm"]]
            label = f"{row['engine']}, {row['drafter'] or 'no drafter model'}, K = {row['k']}"
            if label in [other["label"] for other in found]:  # they differ in flags or sampling
                label += f" (as {row['arm']})"
            found.append(
                {"label": label, "crossing": crossing.sentence, "between": crossing.between}
                | {"estimate": crossing.estimate, "points": points}
            )
    return found


def between_engines(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Acceptance of the same drafts on different engines: one entry per pair of arms alike in all but the engine.

    Speeds are not compared: engines differ in more than speculation. p_value: see `acceptance.agreement`; the pair has
    the same prompts and, where greedy, nearly the same texts. Over the first passes, as repeats of greedy outputs are
    copies.
    """

    def draft(arm: Arm) -> str:
        """What an arm drafts with."""
        p = arm.parameters
        same = (p.get("drafter"), p.get("method"), arm.k, {k: v for k, v in arm.protocol.items() if k != "passes"})
        return json.dumps(same, sort_keys=True)

    # Trees and n-gram look-ups are left out: there the engines' settings mean different things.
    chains = [
        arm
        for arm in arms
        if arm.served
        and arm.parameters.get("method") in ("eagle3", "draft_model")
        and not arm.parameters.get("options")
        and not set(refusals.ids(refusals.own_reasons(arm))) & verdict.NO_ACCEPTANCE
    ]
    known = {arm.name: evidence.served_counts(arm) for arm in chains}
    chains = [arm for arm in chains if known[arm.name]]
    found = []
    for first, second in itertools.combinations(chains, 2):
        if first.parameters["engine"] == second.parameters["engine"] or draft(first) != draft(second):
            continue
        a, b = known[first.name], known[second.name]
        result = acceptance.agreement((a.steps, a.accepted), (b.steps, b.accepted))
        found.append(
            {
                "arms": [first.name, second.name],
                "steps": [a.steps, b.steps],
                "acceptance_length": [a.length, b.length],
                "marginal": [acceptance.marginal(c.steps, c.accepted).tolist() for c in (a, b)],
                "agree": result.agree,
                "p_value": result.p_value,
            }
        )
    return found


def undecided(arms: Sequence[Arm]) -> list[str]:
    """Arms, of those that share engine and protocol, whose verdict further passes may change, and their baselines.

    A comparison that stays refused whatever is measured asks for no pass.
    """
    needed = set()
    for arm in arms:
        if not arm.served or not arm.speculates:
            continue
        baseline, reasons = refusals.reasons(arm, arms)
        if refusals.lasting(arm, reasons):
            continue
        prompts = sorted(set(arm.requests["prompt_id"]))
        if reasons or refusals.apart(arm, baseline) or not stats.enough(arm.rates(prompts), baseline.rates(prompts)):
            needed |= {arm.name, baseline.name}
    return [arm.name for arm in arms if arm.name in needed]


def _details(arm: Arm) -> dict[str, Any]:
    """What an arm's manifests say that the page shows."""
    return {
        "method": arm.parameters.get("method"),
        "options": arm.parameters.get("options") or {},
        "flags": arm.parameters.get("flags") or {},
        "protocol": arm.protocol,
        "versions": arm.manifest["versions"],
        "machine": dict(arm.manifest["machine"]),
        "findings": arm.findings,
        "allow": arm.parameters.get("allow") or [],
    }


def _unserved_row(arm: Arm) -> dict[str, Any]:
    """The summary's row of an arm that the preflight refused."""
    errors = [finding for finding in arm.findings if finding["level"] == "ERROR" and not finding["allowed"]]
    return dict.fromkeys(tables.SUMMARY.names) | {
        "arm": arm.name,
        "engine": arm.parameters["engine"],
        "drafter": arm.parameters.get("drafter"),
        "k": arm.k,
        "protocol": arm.protocol["name"],
        "concurrency": arm.concurrency,
        "prompts": 0,
        "passes": 0,
        "verdict": "refused",
        "cause": "integration",
        "fault": ", ".join(sorted({finding["id"] for finding in errors})),
        "reason": "preflight: "
        + "; ".join(f"{finding['id']}: {finding['message']}; mend: {finding['mend']}" for finding in errors),
    }


def _finite_or(value: Any) -> Any:
    return evidence.finite(value) if isinstance(value, float) else value


def warnings_of(arm: Arm, baseline: Arm | None, lossless: Mapping[str, Any] | None) -> list[str]:
    """What a reader must know although the comparison stands."""
    warnings = []
    prompts = arm.requests["prompt_id"].nunique()
    if arm.speculates and prompts < stats.MINIMUM_PROMPTS:
        warnings.append(f"{prompts} prompts: an interval needs at least {stats.MINIMUM_PROMPTS}")
    single = [one.name for one in (arm, baseline) if one is not None and len(one.manifests) == 1]
    if arm.speculates and single:
        warnings.append(f"a single pass of {' and '.join(single)}: no A/A noise floor, so the verdict stays undecided")
    gap = refusals.apart(arm, baseline) if baseline is not None else None
    if gap:
        warnings.append(
            f"measured {gap / 60:.0f} minutes apart from {baseline.name}: the passes do not show how the machine's speed"
            f" changed meanwhile, so the verdict stays undecided; to measure both again, delete"
            f" results/benchmarks/{arm.name} and results/benchmarks/{baseline.name}"
        )
    if arm.per_pass:
        warnings.append(
            "this engine reports no acceptance per request, and counters mix requests that run at once: acceptance is known"
            " per pass only"
        )
    full = arm.in_flight["full_share"]
    if full < FULL_SHARE:
        warnings.append(
            f"all {arm.concurrency} requests were in flight for {full:.0%} of the time only; raise `requests` of the protocol"
        )
    if 0 < arm.degenerate_share <= refusals.DEGENERATE_SHARE:
        warnings.append(refusals.degenerate_outputs(arm))
    if arm.speculates and not arm.total("steps"):
        warnings.append("the engine reported no verification step: acceptance and break-even are unknown")
    elif arm.speculates and not arm.total("accepted"):
        warnings.append("not one drafted token was accepted: suspect the integration, not the training")
    if baseline is not None and (arm.cached_share is None) != (baseline.cached_share is None):
        warnings.append("cached prompt tokens are known for only one of the two arms")
    unequal = refusals.unequal_cache(arm, baseline) if baseline is not None else None
    if unequal and arm.concurrency == 1:
        warnings.append(
            f"decode speed leaves the prefill out, but TTFT and end-to-end speed cannot be compared: {unequal}"
        )
    if lossless and lossless["identical"] is not None:
        control = lossless["control"]
        if lossless["identical"] < (1.0 if control is None else control):
            at = min(lossless["first_difference"].values())
            against = "no A/A control" if control is None else f"{control:.0%} between passes of the baseline"
            warnings.append(
                f"{lossless['identical']:.0%} of the greedy outputs equal the baseline's ({against});"
                f" the first difference is at token {at}"
            )
    return warnings


def _mean_over_prompts(arm: Arm, column: str) -> float | None:
    return evidence.finite(arm.requests.groupby("prompt_id")[column].mean().mean())


def _summary_row(arm, baseline, speedup, walk, lossless, label, reasons) -> dict[str, Any]:
    length = None if is_random(arm) else evidence.finite(arm.acceptance_length)
    ratio = 1.0 if label == "baseline" else evidence.finite(speedup.speedup) if speedup else None
    bounded = speedup is not None and math.isfinite(speedup.high)
    if label == "baseline":
        identical = lossless["control"] if lossless else None
    else:
        identical = lossless["identical"] if lossless else None
    return {
        "arm": arm.name,
        "engine": arm.parameters["engine"],
        "drafter": arm.parameters.get("drafter"),
        "k": arm.k,
        "protocol": arm.protocol["name"],
        "concurrency": arm.concurrency,
        "baseline": baseline.name if baseline is not None else arm.name if label == "baseline" else None,
        "prompts": arm.requests["prompt_id"].nunique(),
        "passes": len(arm.manifests),
        "tokens_per_second": _mean_over_prompts(arm, "rate"),
        "tokens_per_second_e2e": _mean_over_prompts(arm, "rate_e2e"),
        "server_tokens_per_second": evidence.finite(arm.in_flight["tokens_per_second"]),
        "ttft_s": _mean_over_prompts(arm, "ttft_s"),
        "speedup": ratio,
        "speedup_low": 1.0 if label == "baseline" else float(speedup.low) if bounded else None,
        "speedup_high": 1.0 if label == "baseline" else float(speedup.high) if bounded else None,
        "acceptance_length": length,
        "offline_acceptance_length": None if walk is None else evidence.finite(walk["acceptance_length"].iloc[0]),
        "rho": length / ratio if length and ratio and arm.speculates else None,
        "identical_outputs": identical,
        "verdict": label,
        "reason": "; ".join(reasons) or None,
    }


def _acceptance_rows(arm: Arm, walk: pd.DataFrame | None) -> list[dict[str, Any]]:
    steps, counts = arm.total("steps"), arm.accepted_per_position
    if not (arm.speculates and steps and counts) or refusals.impossible_acceptance(arm):
        return []
    low, high = acceptance.wilson(counts, steps)
    rows = []
    for i, (m, c) in enumerate(
        zip(acceptance.marginal(steps, counts), acceptance.conditional(steps, counts), strict=True)
    ):
        row = {
            "arm": arm.name,
            "k": arm.k,
            "position": i + 1,
            "steps": steps,
            "accepted": counts[i],
            "marginal": float(m),
            "conditional": evidence.finite(c),
            "low": float(low[i]),
            "high": float(high[i]),
        }
        if walk is not None and i + 1 in walk.index:
            known = walk.loc[i + 1]
            offline_low, offline_high = acceptance.wilson(known["accepted"], known["steps"])
            row |= {
                "offline_prompts": known["prompts"],
                "offline_steps": int(known["steps"]),
                "offline_marginal": evidence.finite(known["marginal"]),
                "offline_low": float(offline_low),
                "offline_high": float(offline_high),
            }
        rows.append(row)
    return rows


def _request_rows(arm: Arm, baseline: Arm | None, refused: bool) -> list[dict[str, Any]]:
    speedups: dict[str, float] = {}
    if baseline is not None and not refused:
        prompts = sorted(set(arm.requests["prompt_id"]))
        ratios = stats.log_ratios(arm.rates(prompts), baseline.rates(prompts))
        speedups = dict(zip(prompts, np.exp(ratios), strict=True))
    others = baseline.outputs if baseline is not None else {}
    rows = []
    for row in arm.requests.to_dict("records"):
        other = others.get(row["pass_number"], {}).get(row["prompt_id"])
        steps = evidence.finite(row["steps"])
        rows.append(
            {name: _none(row[name]) for name in tables.REQUESTS.names if name in tables.BENCHMARK.names}
            | {
                "protocol": arm.protocol["name"],
                "baseline": baseline.name if baseline is not None else None,
                "tokens_per_second": evidence.finite(row["rate"]),
                "speedup": evidence.finite(speedups.get(row["prompt_id"])),
                "acceptance_length": 1 + row["accepted"] / steps if steps and arm.speculates else None,
                "first_difference": None if other is None else first_difference(row["output_token_ids"], other),
                "degenerate": _none(row["degenerate"]),
            }
        )
    return rows


def _none(value: Any) -> Any:
    """pandas' missing values as None, whole numbers that pandas turned into floats as integers."""
    if value is None or (np.isscalar(value) and pd.isna(value)):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def run(
    benchmarks: Path | str,
    names: Sequence[str],
    offline: Mapping[str, Path | str],
    summary: Path | str,
    acceptance_out: Path | str,
    requests: Path | str,
    passes: Mapping[str, int] | None = None,
    what_if: Mapping[str, Path | str] | None = None,
    step_cost: Mapping[str, Path | str] | None = None,
    drafters: Mapping[str, Path | str] | None = None,
    expectations: Path | str = EXPECTATIONS,
) -> Comparison:
    """Read the arms, compare them, write the three tables and, beside the summary, its manifest.

    The summary has the arms engine by engine, baselines before what is compared with them, else in the order of `names`.
    """
    if len(set(names)) != len(names):
        raise UserError(f"--arms: an arm is named twice in {' '.join(names)}; name each once")
    what_if, step_cost, drafters = what_if or {}, step_cost or {}, drafters or {}
    unknown = set(what_if) - set(names)
    if unknown:
        raise UserError(f"--what-if {min(unknown)}: no such arm; the arms are {', '.join(names)}")
    arms = [read_arm(benchmarks, name, (passes or {}).get(name)) for name in names]
    engines = list(dict.fromkeys(arm.parameters["engine"] for arm in arms))
    arms.sort(key=lambda arm: (engines.index(arm.parameters["engine"]), arm.speculates))  # an overlay's arms come first
    result = compare(
        arms,
        evidence.read_offline(offline),
        evidence.read_what_if(what_if),
        evidence.read_step_cost(step_cost),
        evidence.read_drafters(drafters),
        artefacts.read_json(expectations),
        evidence.read_places(offline),
    )
    artefacts.write_table(requests, result.requests, tables.REQUESTS)
    artefacts.write_table(acceptance_out, result.acceptance, tables.ACCEPTANCE)
    artefacts.write_table(summary, result.summary, tables.SUMMARY)
    labels = [row["verdict"] for row in result.summary]
    artefacts.write_manifest(
        artefacts.manifest_path(summary),
        "comparison",
        parameters={
            "arms": list(names),
            "length_drift": refusals.LENGTH_DRIFT,
            "cache_drift": refusals.CACHE_DRIFT,
            "degenerate_share": refusals.DEGENERATE_SHARE,
        },
        inputs={"expectations": expectations}
        | {f"offline/{name}": path for name, path in offline.items()}
        | {f"what-if/{name}": path for name, path in what_if.items()}
        | {f"stepcost/{name}": path for name, path in step_cost.items()}
        | {f"drafter/{name}": path for name, path in drafters.items()}
        | {name: path for arm in arms for name, path in arm.files.items()},
        counts={"arms": len(arms)} | {label: labels.count(label) for label in sorted(set(labels))},
        arms=result.details,
        between_engines=result.between_engines,
        under_load=result.under_load,
        files=artefacts.hashes(summary, acceptance_out, requests),
    )
    return result
