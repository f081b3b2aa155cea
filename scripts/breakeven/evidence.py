"""What the verdict on an arm is made of, beside its passes: offline walks, what-if matrices, step costs, drafters' manifests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven import acceptance, artefacts, stepcost, tables, verdict
from breakeven.arms import Arm
from breakeven.cli import UserError


def read_offline(paths: Mapping[str, Path | str]) -> dict[str, pd.DataFrame]:
    """The offline walks, tables.OFFLINE as data frames, by the name of an arm or of a drafter."""
    return {name: artefacts.read_table(path, tables.OFFLINE).to_pandas() for name, path in paths.items()}


def read_places(paths: Mapping[str, Path | str]) -> dict[str, list[dict[str, Any]]]:
    """Acceptance by place in the output (places.table) of the offline walks, which stands in the manifests beside them."""
    manifests = {name: artefacts.manifest_path(path) for name, path in paths.items()}
    return {
        name: artefacts.read_manifest(manifest, "offline").get("by_output_position", [])
        for name, manifest in manifests.items()
        if manifest.is_file()
    }


def _walks_of(arm: Arm, found: Mapping[str, Any]) -> list[Any]:
    """Of what is known by the name of an arm or of a drafter: for the arm itself, then for its drafter.

    Only a walk on the served outputs has the same prompts; the drafter's held-out walk says less.
    """
    return [found[name] for name in (arm.name, arm.parameters.get("drafter")) if name in found]


def places_of(arm: Arm, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of places.table for an arm at its K, from the walk that it is compared with (offline_walk)."""
    for walk in _walks_of(arm, found):
        rows = [{"arm": arm.name, **row} for row in walk if row["k"] == arm.k]
        if rows:
            return rows
    return []


def offline_walk(arm: Arm, offline: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """The offline walk to compare an arm with, by position, at its K: on its own served outputs, else the drafter's."""
    for walk in _walks_of(arm, offline):
        if (walk["k"] == arm.k).any():
            return walk[walk["k"] == arm.k].set_index("position").sort_index()
    return None


@dataclass
class WhatIf:
    """A what-if matrix (tables.WHAT_IF), and per hypothesis and prompt the counts of its walk, where they were kept."""

    rows: pd.DataFrame
    by_output: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)


def read_what_if(paths: Mapping[str, Path | str]) -> dict[str, WhatIf]:
    """The what-if matrices, by the name of an arm; the counts by output stand in the manifest beside the table."""
    found = {}
    for name, path in paths.items():
        rows = artefacts.read_table(path, tables.WHAT_IF).to_pandas()
        if rows.empty:  # of an arm that was not served
            continue
        unknown = set(rows["hypothesis"]) - {verdict.AS_BUILT, *verdict.FAULTS}
        if unknown:
            raise UserError(f"{path}: hypothesis {min(unknown)!r} is not known; known: {', '.join(verdict.FAULTS)}")
        if verdict.AS_BUILT not in set(rows["hypothesis"]):
            raise UserError(f"{path}: there is no row of hypothesis {verdict.AS_BUILT!r}; make the table again")
        manifest = artefacts.manifest_path(path)
        kept = artefacts.read_manifest(manifest, "what_if").get("by_output", {}) if manifest.is_file() else {}
        found[name] = WhatIf(rows, kept)
    return found


@dataclass
class Measured:
    """A step-cost table (tables.STEP_COST) and the manifest that says where it was measured."""

    rows: pd.DataFrame
    manifest: dict[str, Any]


def read_step_cost(paths: Mapping[str, Path | str]) -> dict[str, Measured]:
    """The step-cost tables with their manifests, by engine; an impossible rho is a UserError."""
    found = {}
    for engine, path in paths.items():
        rows = artefacts.read_table(path, tables.STEP_COST).to_pandas()
        rows = rows[rows["engine"] == engine]
        if rows.empty:
            raise UserError(f"{path}: no row for engine {engine!r}; name the engine whose step cost it holds")
        odd = rows[~((rows["k"] >= 1) & (rows["rho"] > 0) & np.isfinite(rows["rho"]))]
        if len(odd):
            raise UserError(f"{path}: K {odd['k'].iloc[0]} has rho {odd['rho'].iloc[0]}; measure the step cost again")
        manifest_path = artefacts.manifest_path(path)
        manifest = artefacts.read_manifest(manifest_path, "stepcost")
        for key in ("machine", "versions", "parameters"):
            if not isinstance(manifest.get(key), dict):
                raise UserError(f"{manifest_path}: key {key!r} is missing; measure the step cost again")
        found[engine] = Measured(rows, manifest)
    return found


def step_cost_of(
    arm: Arm, step_cost: Mapping[str, Measured], drafters: Mapping[str, Mapping[str, Any]]
) -> tuple[stepcost.StepCost | None, list[str]]:
    """rho(K) as measured apart from the arms, on the arm's machine, version and flags; else None and why.

    It is that of a chain of EAGLE-3 drafts; nothing is said of an arm that drafts otherwise. drafters: manifests by drafter.
    """
    measured, draft = step_cost.get(arm.parameters["engine"]), arm.draft
    if measured is None or draft["method"] != "eagle3" or draft["options"].get("topk", 1) != 1:
        return None, []
    mine, manifest = arm.identity, measured.manifest
    sizes = [
        (of.get("parameters") or {}).get("draft_vocab_size") for of in (drafters.get(draft["drafter"]) or {}, manifest)
    ]
    other = {
        "machine": (mine["other-machine"], manifest["machine"].get("fingerprint")),
        "version": (mine["other-version"], manifest["versions"]),
        "flags or environment": (
            mine["other-flags"],
            {key: manifest["parameters"].get(key) or {} for key in ("flags", "environment")},
        ),
        "draft vocabulary": sizes if None not in sizes else (None, None),  # unknown for a drafter from elsewhere
    }
    differ = [name for name, (a, b) in other.items() if a != b]
    if differ:
        return None, [f"the step cost was measured with another {' and '.join(differ)}, so no speed-up is predicted"]
    rows = measured.rows[measured.rows["concurrency"] == arm.concurrency]
    if rows.empty:
        return None, [f"the step cost was not measured at concurrency {arm.concurrency}, so no speed-up is predicted"]
    return stepcost.StepCost(list(zip(rows["k"], rows["rho"], strict=True)), "step cost"), []


def read_drafters(paths: Mapping[str, Path | str]) -> dict[str, dict[str, Any]]:
    """The manifests of trained drafters, by name."""
    return {name: artefacts.read_manifest(path, "drafter") for name, path in paths.items()}


def facts_of(
    arm: Arm,
    row: Mapping[str, Any],
    alike: Sequence[Mapping[str, Any]],
    reasons: Sequence[str],
    offline: Mapping[str, pd.DataFrame],
    what_if: Mapping[str, WhatIf],
    step_cost: Mapping[str, Measured],
    drafters: Mapping[str, Mapping[str, Any]],
) -> verdict.Facts:
    """What the verdict on one arm is made of. row: the arm's; alike: rows of all arms that draft as it does (Arm.draft);
    reasons: ids of why it is refused."""
    drafter = arm.parameters.get("drafter")
    sound = not set(reasons) & verdict.NO_ACCEPTANCE
    served_walk = offline.get(arm.name)
    held_out = offline.get(drafter)
    matrix = what_if.get(arm.name)
    hypotheses = {}
    if matrix is not None:
        groups = matrix.rows[matrix.rows["k"] == arm.k].groupby("hypothesis")
        hypotheses = {name: counts_of(rows, f"hypothesis {name} of arm {arm.name}") for name, rows in groups}
    as_built = None
    if served_walk is not None and (served_walk["k"] == arm.k).any():
        as_built = counts_of(served_walk[served_walk["k"] == arm.k], f"offline walk of arm {arm.name}")
    length = None
    if held_out is not None and (held_out["k"] == arm.k).any():
        length = finite(held_out[held_out["k"] == arm.k]["acceptance_length"].iloc[0])
    manifest = drafters.get(drafter) or {}
    counts = manifest.get("counts") or {}
    flags = {str(key).replace("_", "-") for key, value in (arm.parameters.get("flags") or {}).items() if value}
    cost, _ = step_cost_of(arm, step_cost, drafters)
    machine = arm.manifest["machine"]
    return verdict.Facts(
        label=row["verdict"],
        k=arm.k,
        served=served_counts(arm) if sound else None,
        length=row["acceptance_length"],
        as_built=as_built,
        hypotheses=hypotheses,
        by_output=fits_by_output(arm, matrix) if sound and matrix is not None else None,
        outputs=len(arm.first_pass),
        held_out_length=length,
        held_out_accuracy=(manifest.get("held_out") or {}).get("accuracy"),
        speedup=row["speedup"],
        speedup_high=row["speedup_high"],
        rho=row["rho"],
        cost=cost or cost_from_arms(row, alike),
        predicted_rho=row["predicted_rho"],
        samples=counts.get("training_sequences"),
        response_tokens=counts.get("training_response_tokens"),
        graphs_off=bool(flags & {"enforce-eager", "disable-cuda-graph"}) and bool(machine.get("gpu")),
        emulated=machine.get("cpu_bfloat16") is False
        and arm.parameters.get("hardware") == "cpu"
        and (arm.parameters.get("flags") or {}).get("dtype", "auto") in ("auto", "bfloat16"),
        reasons=reasons,
        method=arm.draft["method"],
    )


def served_counts(arm: Arm) -> verdict.Counts | None:
    """Acceptance counts of the arm's first pass, the one that is walked offline; None where none were recorded."""
    first = arm.first_pass
    rows = first[first["steps"].notna() & first["accepted_per_position"].notna()]
    if rows.empty or not arm.k or len(rows) < len(first):
        return None
    accepted = [sum(int(row[i]) for row in rows["accepted_per_position"] if i < len(row)) for i in range(arm.k)]
    return verdict.Counts(int(rows["steps"].sum()), tuple(accepted))


def fits_by_output(arm: Arm, matrix: WhatIf) -> list[verdict.Fitness] | None:
    """Every hypothesis against the arm's first pass, output by output; None where counts of an output are missing."""
    first = arm.first_pass
    walked = set.intersection(*(set(outputs) for outputs in matrix.by_output.values())) if matrix.by_output else set()
    if not walked.issuperset(first["prompt_id"]) or first["accepted_per_position"].isna().any():
        return None
    served = [
        verdict.Counts(int(steps), tuple(int(n) for n in accepted))
        for steps, accepted in zip(first["steps"], first["accepted_per_position"], strict=True)
    ]
    walks = {
        name: [verdict.Counts(outputs[prompt][0], tuple(outputs[prompt][1:])) for prompt in first["prompt_id"]]
        for name, outputs in matrix.by_output.items()
    }
    return verdict.paired(served, walks)


def counts_of(rows: pd.DataFrame, what: str) -> verdict.Counts:
    """Counts of one walk (rows of one K and hypothesis, one per position); impossible ones are a UserError."""
    rows = rows.sort_values("position")
    if rows["position"].tolist() != list(range(1, int(rows["k"].iloc[0]) + 1)) or rows["steps"].nunique() != 1:
        raise UserError(f"{what}: there must be one row for each position 1 to K, all with the same steps")
    try:
        return verdict.Counts(int(rows["steps"].iloc[0]), tuple(int(n) for n in rows["accepted"]))
    except acceptance.ImpossibleCounts as error:
        raise UserError(f"{what}: {error}; make the table again") from None


def cost_from_arms(row: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> stepcost.StepCost | None:
    """rho by K from the arms that draft as this one does and share its baseline; None where no rho is known."""
    points = [(other["k"], other["rho"]) for other in alike if other["rho"] and other["baseline"] == row["baseline"]]
    return stepcost.StepCost(points, "arms of this run") if points and row["rho"] else None


def finite(value: Any) -> float | None:
    """A float, or None for nan, infinities and missing values, which are null in a table."""
    return None if value is None or pd.isna(value) or not math.isfinite(value) else float(value)
