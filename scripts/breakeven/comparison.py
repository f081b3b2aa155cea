"""Pair every arm with its baseline, refuse what cannot be compared, and write the comparison tables.

An arm is a folder `{benchmarks}/{arm}` with `pass-N.parquet` (tables.BENCHMARK) and `pass-N.manifest.json`. Its
baseline is the arm without speculation of the same engine, protocol, machine, versions, flags and environment. A
comparison that would mislead is refused with a reason, "id: sentence", and its speed-up stays null; its own
measurements and its acceptance are still shown.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven import acceptance, artefacts, load, places, stats, stepcost, tables, verdict
from breakeven.cli import UserError
from breakeven.sanity import degenerate

EXPECTATIONS = Path(__file__).parents[2] / "resources" / "expectations.json"

LENGTH_DRIFT = 0.10  # mean output lengths may differ by this share
CACHE_DRIFT = 0.05  # shares of cached prompt tokens may differ by this much
FULL_SHARE = 0.5  # of a pass under load with all requests in flight; a smaller one is remarked on
DEGENERATE_SHARE = 0.20  # this share of outputs may be degenerate; a small greedy model loops now and then

REASONS = {
    "preflight": "the preflight found that the drafter would be served wrong, so no server was started",
    "random-prompts": "prompts of random tokens say nothing about acceptance on text",
    "inconsistent-passes": "the passes of one arm were not run alike",
    "too-few-passes": "fewer passes than the protocol asks for",
    "impossible-acceptance": "acceptance counts that no run can produce",
    "degenerate-output": "outputs are loops, which any drafter guesses",
    "no-baseline": "no arm without speculation for this engine and protocol",
    "other-sampling": "other sampling settings than the baseline",
    "other-machine": "another machine than the baseline",
    "other-version": "another engine version than the baseline",
    "other-flags": "other server flags or environment than the baseline",
    "other-prompts": "other prompts than the baseline",
    "output-length": "output lengths drift apart",
    "unequal-cache": "another share of cached prompt tokens than the baseline",
    "no-decode-time": "a request without a measurable decode time",
}
"""Every reason to refuse a comparison, by id."""


@dataclass
class Arm:
    """One arm: what its manifests say, and its requests, one row each, sorted by prompt and pass.

    Under load a prompt may be asked several times in a pass; the first of them stays the first.
    """

    name: str
    manifests: dict[int, dict[str, Any]]  # by pass number
    requests: pd.DataFrame  # tables.BENCHMARK plus rate, rate_e2e (tokens per second) and degenerate
    files: dict[str, Path] = field(default_factory=dict)
    wanted: int = 1  # passes asked for

    @property
    def manifest(self) -> dict[str, Any]:
        """That of the first pass; what it says of settings, versions and machine is the same in all."""
        return next(iter(self.manifests.values()))

    @property
    def parameters(self) -> dict[str, Any]:
        return self.manifest["parameters"]

    @property
    def protocol(self) -> dict[str, Any]:
        return self.parameters["protocol"]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """What the preflight found about the arm's drafter; none for an arm without one."""
        return self.manifest.get("findings", [])

    @property
    def served(self) -> bool:
        """False where the preflight let no server start; then there are no requests."""
        return not any(manifest.get("unmeasured") == "preflight" for manifest in self.manifests.values())

    @property
    def k(self) -> int:
        return int(self.parameters.get("k") or 0)

    @property
    def speculates(self) -> bool:
        return self.k > 0 or bool(self.parameters.get("drafter"))

    @property
    def identity(self) -> dict[str, Any]:
        """What an arm shares with its baseline, by the id of the reason that applies if it does not."""
        return {
            "other-sampling": {"concurrency": 1, "requests": None}
            | {k: v for k, v in self.protocol.items() if k != "passes"},
            "other-machine": self.manifest["machine"]["fingerprint"],
            "other-version": dict(self.manifest["versions"]),
            "other-flags": {key: self.parameters.get(key) or {} for key in ("flags", "environment")},
        }

    @property
    def concurrency(self) -> int:
        """Requests in flight at once."""
        return load.concurrency(self.protocol)

    def rates(self, prompts: Sequence[str]) -> np.ndarray:
        """Decode tokens per second, float64 [prompts, passes]; of a prompt asked several times in a pass, over all of it."""
        decoded = self.requests["completion_tokens"] - 1
        seconds = self.requests["e2e_s"] - self.requests["ttft_s"]
        sums = (
            pd.DataFrame({"decoded": decoded, "seconds": seconds})
            .groupby([self.requests["prompt_id"], self.requests["pass_number"]])
            .sum()
        )
        return (sums["decoded"] / sums["seconds"]).unstack().loc[list(prompts)].to_numpy()

    @property
    def in_flight(self) -> dict[str, float]:
        """tokens_per_second of the server, all requests together, while one was in flight, and the share of that time with
        all of them in flight; over all passes."""
        spans = []
        for _, rows in self.requests.groupby("pass_number"):
            spans.append(load.in_flight(rows["sent_at"], rows["sent_at"] + rows["e2e_s"], self.concurrency))
        busy, full = (sum(values) for values in zip(*spans, strict=True))
        if not busy:
            return {"tokens_per_second": math.nan, "full_share": math.nan}
        return {"tokens_per_second": self.total("completion_tokens") / busy, "full_share": full / busy}

    @property
    def per_pass(self) -> list[dict[str, Any]] | None:
        """Counters of the passes, where acceptance is known from them alone: under load, nothing reported per request."""
        if self.k == 0 or self.requests["steps"].notna().any():
            return None
        counters = [(manifest.get("server") or {}).get("counters") or {} for manifest in self.manifests.values()]
        return counters if all(of_pass.get("steps") for of_pass in counters) else None

    @property
    def first_pass(self) -> pd.DataFrame:
        """The requests of the first pass, of each prompt the first one: what `replay_served` walks along."""
        first = self.requests[self.requests["pass_number"] == min(self.manifests)]
        return first.drop_duplicates("prompt_id")

    def total(self, column: str) -> int | None:
        """Sum over all requests; None where nothing was recorded."""
        if column in ("steps", "drafted", "accepted") and self.per_pass:
            return sum(of_pass[column] for of_pass in self.per_pass)
        values = self.requests[column].dropna()
        return int(values.sum()) if len(values) else None

    @property
    def accepted_per_position(self) -> list[int] | None:
        """Sums over all requests, padded to K positions; None where nothing was recorded."""
        rows = [row for row in self.requests["accepted_per_position"] if row is not None]
        if self.per_pass:
            rows = [of_pass["accepted_per_position"] for of_pass in self.per_pass]
        if not rows:
            return None
        width = max(self.k, *(len(row) for row in rows))
        return [int(sum(row[i] for row in rows if i < len(row))) for i in range(width)]

    @property
    def acceptance_length(self) -> float | None:
        steps, accepted = self.total("steps"), self.total("accepted")
        return acceptance.acceptance_length(steps, accepted or 0) if self.speculates and steps else None

    @property
    def cached_share(self) -> float | None:
        cached, prompt = self.total("cached_tokens"), self.total("prompt_tokens")
        return None if cached is None or not prompt else cached / prompt

    @property
    def window(self) -> tuple[float, float]:
        """When the arm was measured, first request sent to last token received, seconds since the epoch."""
        sent = self.requests["sent_at"]
        return float(sent.min()), float((sent + self.requests["e2e_s"]).max())

    @property
    def outputs(self) -> dict[int, dict[str, list[int]]]:
        """Output token ids by pass and prompt, the first of a prompt asked several times."""
        first = self.requests.drop_duplicates(["prompt_id", "pass_number"])
        return {
            int(number): dict(zip(rows["prompt_id"], map(list, rows["output_token_ids"]), strict=True))
            for number, rows in first.groupby("pass_number")
        }


def read_arm(benchmarks: Path | str, name: str, passes: int | None = None) -> Arm:
    """Read passes 1 ... `passes` of an arm (None: all that are there, and the protocol says how many it wants).

    Passes that were spared because the arm was decided before are left out. A missing file, an empty or inconsistent one is a UserError.
    """
    folder = Path(benchmarks) / name
    paths = {}
    for path in folder.glob("pass-*.parquet"):
        number = re.fullmatch(r"pass-(\d+)\.parquet", path.name)
        if number and (passes is None or int(number[1]) <= passes):
            paths[int(number[1])] = path
    if not paths:
        raise UserError(f"{folder}: no pass-*.parquet there; run the benchmark of arm {name!r} first")
    manifests, frames, files, spared = {}, [], {}, 0
    for number, path in sorted(paths.items()):
        manifest_path = artefacts.manifest_path(path)
        manifests[number] = manifest = artefacts.read_manifest(manifest_path, "benchmark")
        _check_manifest(manifest_path, manifest)
        files |= {f"{name}/{path.name}": path, f"{name}/{manifest_path.name}": manifest_path}
        if manifest.get("unmeasured") == "decided":
            del manifests[number]
            spared += 1
            continue
        table = artefacts.read_table(path, tables.BENCHMARK)
        if not table.num_rows and "unmeasured" not in manifest:
            raise UserError(f"{path}: no request in it; delete the file and run the benchmark again")
        rows = table.to_pandas()
        repeated = rows["prompt_id"][rows["prompt_id"].duplicated()]
        if len(repeated) and load.concurrency(manifest["parameters"]["protocol"]) == 1:
            raise UserError(f"{path}: prompt {repeated.iloc[0]!r} was measured twice in one pass; run the pass again")
        frames.append(rows.assign(pass_number=number))
    # Sorting by several columns is stable.
    requests = pd.concat(frames, ignore_index=True).sort_values(["prompt_id", "pass_number"], ignore_index=True)
    tokens = requests["completion_tokens"].to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        decode = (requests["e2e_s"] - requests["ttft_s"]).to_numpy(float)
        requests["rate"] = np.where((tokens > 1) & (decode > 0), (tokens - 1) / decode, np.nan)
        end_to_end = requests["e2e_s"].to_numpy(float)
        requests["rate_e2e"] = np.where(end_to_end > 0, tokens / end_to_end, np.nan)
    requests["degenerate"] = [degenerate(ids) for ids in requests["output_token_ids"]]
    wanted = passes or int(manifest["parameters"]["protocol"].get("passes") or 1)
    return Arm(name, manifests, requests, files, wanted - spared)


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """The keys this module relies on; a missing one is a UserError that names it."""
    needed = {"parameters": ("engine", "protocol", "k"), "machine": ("fingerprint",), "versions": ()}
    for section, keys in needed.items():
        found = manifest.get(section)
        if not isinstance(found, dict):
            raise UserError(f"{path}: key {section!r} is missing; run the benchmark again")
        for key in keys:
            if key not in found:
                raise UserError(f"{path}: key {section}.{key} is missing; run the benchmark again")
    if not isinstance(manifest["parameters"]["protocol"], dict) or "name" not in manifest["parameters"]["protocol"]:
        raise UserError(f"{path}: key parameters.protocol.name is missing; run the benchmark again")


def own_reasons(arm: Arm) -> list[str]:
    """Why this arm's measurement cannot enter any comparison, each "id: sentence"."""
    reasons = []
    if is_random(arm):
        reasons.append("random-prompts: the prompts are random tokens, on which acceptance and speed mean nothing")
    for number, manifest in arm.manifests.items():
        changed = [
            key for key in ("machine", "versions", "parameters") if _stable(manifest, key) != _stable(arm.manifest, key)
        ]
        if changed:
            reasons.append(f"inconsistent-passes: pass {number} differs from the first in {', '.join(changed)}")
            break
    prompts = arm.requests.groupby("pass_number")["prompt_id"].agg(frozenset)
    if prompts.nunique() > 1:
        reasons.append("inconsistent-passes: the passes did not measure the same prompts")
    if len(arm.manifests) < arm.wanted:
        reasons.append(f"too-few-passes: {len(arm.manifests)} of {arm.wanted} passes of arm {arm.name} are there")
    impossible = impossible_acceptance(arm)
    if impossible:
        reasons.append(f"impossible-acceptance: {impossible}")
    share = arm.requests["degenerate"].notna().mean()
    if share > DEGENERATE_SHARE:
        row = arm.requests[arm.requests["degenerate"].notna()].iloc[0]
        reasons.append(
            f"degenerate-output: {share:.0%} of the outputs of arm {arm.name} are loops"
            f" (prompt {row['prompt_id']}: {row['degenerate']})"
        )
    if arm.requests["rate"].isna().any():
        row = arm.requests[arm.requests["rate"].isna()].iloc[0]
        reasons.append(
            f"no-decode-time: prompt {row['prompt_id']} of arm {arm.name} has {row['completion_tokens']} output tokens"
            f" in {row['e2e_s'] - row['ttft_s']:.3f} s after the first"
        )
    return reasons


def _stable(manifest: Mapping[str, Any], key: str) -> Any:
    """The part of a manifest that must be the same in all passes of an arm."""
    if key == "machine":
        return manifest["machine"]["fingerprint"]
    return {k: v for k, v in manifest[key].items() if k != "pass"}


def is_random(arm: Arm) -> bool:
    """Does the protocol say that its prompts are random tokens (vLLM's and SGLang's `random` data sets)?"""
    said = [where.get(key) for where in (arm.protocol, arm.parameters) for key in ("workload", "dataset", "prompts")]
    kinds = [value.get("kind") if isinstance(value, dict) else value for value in said]
    return any(isinstance(kind, str) and kind.startswith("random") for kind in kinds)


def impossible_acceptance(arm: Arm) -> str | None:
    """What is impossible about an arm's acceptance counts, in any request or in total; None if nothing is."""
    if not arm.speculates:
        return None
    for row in arm.requests.itertuples():
        if pd.isna(row.steps) or pd.isna(row.accepted):
            continue
        steps, accepted = int(row.steps), int(row.accepted)
        drafted = None if pd.isna(row.drafted) else int(row.drafted)
        positions = row.accepted_per_position
        found = [] if positions is None else acceptance.impossible(steps, list(positions), accepted, drafted)
        if positions is not None and len(positions) > arm.k:
            found.append(f"{len(positions)} positions at K = {arm.k}")
        if accepted > arm.k * steps:
            length = f"{1 + accepted / steps:.2f}" if steps else "infinite"
            found.insert(0, f"acceptance length {length} above K + 1 = {arm.k + 1}")
        if found:
            return f"prompt {row.prompt_id}, pass {row.pass_number}: {found[0]}"
    return None


def find_baseline(arm: Arm, arms: Sequence[Arm]) -> tuple[Arm | None, list[str]]:
    """The baseline with the same identity and no reason; else the nearest one and why it is none (or None)."""
    candidates = [
        other
        for other in arms
        if not other.speculates
        and other.parameters["engine"] == arm.parameters["engine"]
        and other.protocol["name"] == arm.protocol["name"]
    ]
    if not candidates:
        return None, [
            f"no-baseline: no arm without speculation for engine {arm.parameters['engine']} and protocol"
            f" {arm.protocol['name']}; add one to the arms"
        ]
    differences = [identity_reasons(arm, candidate) for candidate in candidates]
    best = min(range(len(candidates)), key=lambda i: len(differences[i]))
    return candidates[best], differences[best]


def identity_reasons(arm: Arm, baseline: Arm) -> list[str]:
    """One reason per part of the identity that differs, with both values."""
    reasons = []
    for reason, mine in arm.identity.items():
        other = baseline.identity[reason]
        if mine == other:
            continue
        if isinstance(mine, dict):
            keys = sorted(key for key in {*mine, *other} if mine.get(key) != other.get(key))
            text = ", ".join(f"{key} {_show(mine.get(key))} against {_show(other.get(key))}" for key in keys)
        else:
            text = f"{_show(mine)} against {_show(other)}"
        reasons.append(f"{reason}: {text} in baseline {baseline.name}")
    return reasons


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def pair_reasons(arm: Arm, baseline: Arm) -> list[str]:
    """Why the measurements of two arms of the same identity cannot be paired."""
    reasons = []
    mine, other = (a.requests.drop_duplicates("prompt_id").set_index("prompt_id") for a in (arm, baseline))
    if set(mine.index) != set(other.index):
        odd = sorted(set(mine.index) ^ set(other.index))
        reasons.append(f"other-prompts: {len(odd)} prompts are in only one of the two arms, the first is {odd[0]}")
    else:
        changed = [p for p in mine.index if list(mine.prompt_token_ids[p]) != list(other.prompt_token_ids[p])]
        if changed:
            reasons.append(
                f"other-prompts: prompt {changed[0]} has other token ids than in baseline {baseline.name}"
                " (another chat template or tokenizer)"
            )
    lengths = [a.requests["completion_tokens"].mean() for a in (arm, baseline)]
    if not abs(lengths[0] / lengths[1] - 1) <= LENGTH_DRIFT:
        reasons.append(
            f"output-length: {lengths[0]:.0f} output tokens per request against {lengths[1]:.0f} in baseline"
            f" {baseline.name}, more than {LENGTH_DRIFT:.0%} apart"
        )
    shares = arm.cached_share, baseline.cached_share
    if None not in shares and abs(shares[0] - shares[1]) > CACHE_DRIFT:
        reasons.append(
            f"unequal-cache: {shares[0]:.0%} of the prompt tokens were cached against {shares[1]:.0%} in baseline"
            f" {baseline.name}"
        )
    return reasons


def apart(arm: Arm, baseline: Arm) -> float | None:
    """Seconds between the measurements of two arms of several passes each; None where they overlap, as interleaved ones do.

    Passes show how the machine's speed varies while they last; what it did before or after, they cannot show.
    """
    (begin, end), (other_begin, other_end) = arm.window, baseline.window
    gap = max(begin - other_end, other_begin - end)
    return gap if gap > 0 and min(len(arm.manifests), len(baseline.manifests)) > 1 else None


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


def places_of(arm: Arm, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of places.table for an arm at its K, from the walk that it is compared with (offline_walk)."""
    for name in (arm.name, arm.parameters.get("drafter")):
        rows = [{"arm": arm.name, **row} for row in found.get(name, []) if row["k"] == arm.k]
        if rows:
            return rows
    return []


def offline_walk(arm: Arm, offline: Mapping[str, pd.DataFrame]) -> pd.DataFrame | None:
    """The offline walk to compare an arm with, by position, at its K: on its own served outputs, else the drafter's.

    Only a walk on the served outputs has the same prompts; the drafter's held-out walk says less.
    """
    for name in (arm.name, arm.parameters.get("drafter")):
        walk = offline.get(name)
        if walk is not None and (walk["k"] == arm.k).any():
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


def step_cost_of(arm: Arm, step_cost: Mapping[str, Measured]) -> tuple[stepcost.StepCost | None, list[str]]:
    """rho(K) as measured apart from the arms, on the arm's machine, version and flags; else None and why."""
    measured = step_cost.get(arm.parameters["engine"])
    if measured is None or not arm.speculates:
        return None, []
    mine, manifest = arm.identity, measured.manifest
    other = {
        "machine": (mine["other-machine"], manifest["machine"].get("fingerprint")),
        "version": (mine["other-version"], manifest["versions"]),
        "flags or environment": (
            mine["other-flags"],
            {key: manifest["parameters"].get(key) or {} for key in ("flags", "environment")},
        ),
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
    what_if: Mapping[str, WhatIf] | None = None,
    step_cost: Mapping[str, Measured] | None = None,
    drafters: Mapping[str, Mapping[str, Any]] | None = None,
    expectations: Mapping[str, Any] | None = None,
    by_place: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Comparison:
    """Compare arms; pure, so that it can be called on measurements from anywhere.

    offline, what_if: by arm (offline also by drafter). step_cost: by engine. drafters: manifests by drafter.
    expectations: resources/expectations.json, read there if not given. by_place: see read_places.
    """
    expectations = expectations or artefacts.read_json(EXPECTATIONS)
    result = Comparison([], [], [], {})
    for arm in arms:
        if not arm.served:
            result.summary.append(_unserved_row(arm))
            result.details[arm.name] = {"reasons": ["preflight"], "warnings": []} | _details(arm)
            continue
        walk = offline_walk(arm, offline or {})
        reasons = own_reasons(arm)
        baseline, warnings, speedup, lossless = None, [], None, None
        if not arm.speculates:
            label = "baseline"
            warnings += reasons  # a baseline is never refused itself, the arms paired with it are
            reasons, lossless = [], losslessness(arm, arm)
        else:
            baseline, differences = find_baseline(arm, arms)
            reasons += differences
            if baseline is not None:
                lossless = losslessness(arm, baseline)
                reasons += pair_reasons(arm, baseline)
                reasons += [reason for reason in own_reasons(baseline) if reason not in reasons]
            label = "refused"
        if arm.speculates and not reasons:
            prompts = sorted(set(arm.requests["prompt_id"]))
            speedup = stats.compare(arm.rates(prompts), baseline.rates(prompts))
            label = "undecided" if apart(arm, baseline) else str(speedup.verdict)
        cost, remarks = step_cost_of(arm, step_cost or {})
        by_output_position = places_of(arm, by_place or {})
        fall = places.fall(by_output_position)
        warnings += warnings_of(arm, baseline, lossless) + remarks + ([fall] if fall else [])
        row = _summary_row(arm, baseline, speedup, walk, lossless, label, reasons)
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
            "reasons": [reason.split(":")[0] for reason in reasons],
            "warnings": warnings,
            "noise_floor": _finite(math.expm1(speedup.floor)) if speedup else None,
            "cached_share": arm.cached_share,
            "full_share": _finite(arm.in_flight["full_share"]),
            "degenerate_share": float(arm.requests["degenerate"].notna().mean()),
            "lossless": lossless,
            "by_output_position": by_output_position,
        } | _details(arm)
    for arm, row in zip(arms, result.summary, strict=True):
        if not arm.served:
            continue
        row |= {"cause": None, "fault": None, "predicted_speedup": row.get("predicted_speedup")}
        if arm.speculates:
            facts = facts_of(arm, row, result, offline or {}, what_if or {}, step_cost or {}, drafters or {})
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
        and not {reason.split(":")[0] for reason in own_reasons(arm)} & verdict.NO_ACCEPTANCE
    ]
    known = {arm.name: served_counts(arm) for arm in chains}
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

    A refused comparison stays refused whatever is measured, so it asks for no pass.
    """
    needed = set()
    for arm in arms:
        if not arm.served or not arm.speculates:
            continue
        baseline, reasons = find_baseline(arm, arms)
        if baseline is None:
            continue
        reasons = reasons + own_reasons(arm) + own_reasons(baseline) + pair_reasons(arm, baseline)
        prompts = sorted(set(arm.requests["prompt_id"]))
        if not reasons and (apart(arm, baseline) or not stats.enough(arm.rates(prompts), baseline.rates(prompts))):
            needed |= {arm.name, baseline.name}
    return [arm.name for arm in arms if arm.name in needed]


def _details(arm: Arm) -> dict[str, Any]:
    """What an arm's manifests say that the page shows."""
    return {
        "method": arm.parameters.get("method"),
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
    return _finite(value) if isinstance(value, float) else value


def facts_of(
    arm: Arm,
    row: Mapping[str, Any],
    result: Comparison,
    offline: Mapping[str, pd.DataFrame],
    what_if: Mapping[str, WhatIf],
    step_cost: Mapping[str, Measured],
    drafters: Mapping[str, Mapping[str, Any]],
) -> verdict.Facts:
    """What the verdict on one arm is made of."""
    drafter = arm.parameters.get("drafter")
    reasons = result.details[arm.name]["reasons"]
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
        length = _finite(held_out[held_out["k"] == arm.k]["acceptance_length"].iloc[0])
    manifest = drafters.get(drafter) or {}
    counts = manifest.get("counts") or {}
    flags = {str(key).replace("_", "-") for key, value in (arm.parameters.get("flags") or {}).items() if value}
    cost, _ = step_cost_of(arm, step_cost)
    machine = arm.manifest["machine"]
    return verdict.Facts(
        label=row["verdict"],
        k=arm.k,
        served=served_counts(arm) if sound else None,
        length=row["acceptance_length"],
        as_built=as_built,
        hypotheses=hypotheses,
        by_output=fits_by_output(arm, matrix) if sound and matrix is not None else None,
        held_out_length=length,
        held_out_accuracy=(manifest.get("held_out") or {}).get("accuracy"),
        speedup=row["speedup"],
        speedup_high=row["speedup_high"],
        rho=row["rho"],
        cost=cost or cost_from_arms(row, result.summary),
        predicted_rho=row["predicted_rho"],
        samples=counts.get("training_sequences"),
        response_tokens=counts.get("training_response_tokens"),
        graphs_off=bool(flags & {"enforce-eager", "disable-cuda-graph"}) and bool(machine.get("gpu")),
        emulated=machine.get("cpu_bfloat16") is False
        and arm.parameters.get("hardware") == "cpu"
        and (arm.parameters.get("flags") or {}).get("dtype", "auto") in ("auto", "bfloat16"),
        reasons=reasons,
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


def cost_from_arms(row: Mapping[str, Any], summary: Sequence[Mapping[str, Any]]) -> stepcost.StepCost | None:
    """rho by K from the arms that share this arm's drafter and baseline; None where no rho is known."""
    points = [
        (other["k"], other["rho"])
        for other in summary
        if other["rho"] and other["baseline"] == row["baseline"] and other["drafter"] == row["drafter"]
    ]
    return stepcost.StepCost(points, "arms of this run") if points and row["rho"] else None


def warnings_of(arm: Arm, baseline: Arm | None, lossless: Mapping[str, Any] | None) -> list[str]:
    """What a reader must know although the comparison stands."""
    warnings = []
    prompts = arm.requests["prompt_id"].nunique()
    if arm.speculates and prompts < stats.MINIMUM_PROMPTS:
        warnings.append(f"{prompts} prompts: an interval needs at least {stats.MINIMUM_PROMPTS}")
    if arm.speculates and len(arm.manifests) == 1:
        warnings.append("a single pass: no A/A noise floor, so the verdict stays undecided")
    gap = apart(arm, baseline) if baseline is not None else None
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
    loops = arm.requests[arm.requests["degenerate"].notna()]
    if 0 < len(loops) <= DEGENERATE_SHARE * len(arm.requests):
        warnings.append(f"{len(loops)} of {len(arm.requests)} outputs are loops ({loops['degenerate'].iloc[0]})")
    if arm.speculates and not arm.total("steps"):
        warnings.append("the engine reported no verification step: acceptance and break-even are unknown")
    elif arm.speculates and not arm.total("accepted"):
        warnings.append("not one drafted token was accepted: suspect the integration, not the training")
    if baseline is not None and (arm.cached_share is None) != (baseline.cached_share is None):
        warnings.append("cached prompt tokens are known for only one of the two arms")
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


def _finite(value: Any) -> float | None:
    """A float, or None for nan, infinities and missing values, which are null in a table."""
    return None if value is None or pd.isna(value) or not math.isfinite(value) else float(value)


def _mean_over_prompts(arm: Arm, column: str) -> float | None:
    return _finite(arm.requests.groupby("prompt_id")[column].mean().mean())


def _summary_row(arm, baseline, speedup, walk, lossless, label, reasons) -> dict[str, Any]:
    length = None if is_random(arm) else _finite(arm.acceptance_length)
    ratio = 1.0 if label == "baseline" else _finite(speedup.speedup) if speedup else None
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
        "server_tokens_per_second": _finite(arm.in_flight["tokens_per_second"]),
        "ttft_s": _mean_over_prompts(arm, "ttft_s"),
        "speedup": ratio,
        "speedup_low": 1.0 if label == "baseline" else float(speedup.low) if bounded else None,
        "speedup_high": 1.0 if label == "baseline" else float(speedup.high) if bounded else None,
        "acceptance_length": length,
        "offline_acceptance_length": None if walk is None else float(walk["acceptance_length"].iloc[0]),
        "rho": length / ratio if length and ratio and arm.speculates else None,
        "identical_outputs": identical,
        "verdict": label,
        "reason": "; ".join(reasons) or None,
    }


def _acceptance_rows(arm: Arm, walk: pd.DataFrame | None) -> list[dict[str, Any]]:
    steps, counts = arm.total("steps"), arm.accepted_per_position
    if not (arm.speculates and steps and counts) or impossible_acceptance(arm):
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
            "conditional": _finite(c),
            "low": float(low[i]),
            "high": float(high[i]),
        }
        if walk is not None and i + 1 in walk.index:
            known = walk.loc[i + 1]
            offline_low, offline_high = acceptance.wilson(known["accepted"], known["steps"])
            row |= {
                "offline_prompts": known["prompts"],
                "offline_steps": int(known["steps"]),
                "offline_marginal": _finite(known["marginal"]),
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
        steps = _finite(row["steps"])
        rows.append(
            {name: _none(row[name]) for name in tables.REQUESTS.names if name in tables.BENCHMARK.names}
            | {
                "protocol": arm.protocol["name"],
                "baseline": baseline.name if baseline is not None else None,
                "tokens_per_second": _finite(row["rate"]),
                "speedup": _finite(speedups.get(row["prompt_id"])),
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
    """Read the arms, compare them, write the three tables and, beside the summary, its manifest."""
    if len(set(names)) != len(names):
        raise UserError(f"--arms: an arm is named twice in {' '.join(names)}; name each once")
    what_if, step_cost, drafters = what_if or {}, step_cost or {}, drafters or {}
    unknown = set(what_if) - set(names)
    if unknown:
        raise UserError(f"--what-if {min(unknown)}: no such arm; the arms are {', '.join(names)}")
    arms = [read_arm(benchmarks, name, (passes or {}).get(name)) for name in names]
    result = compare(
        arms, read_offline(offline), read_what_if(what_if), read_step_cost(step_cost), read_drafters(drafters),
        artefacts.read_json(expectations), read_places(offline),
    )  # fmt: skip
    artefacts.write_table(requests, result.requests, tables.REQUESTS)
    artefacts.write_table(acceptance_out, result.acceptance, tables.ACCEPTANCE)
    artefacts.write_table(summary, result.summary, tables.SUMMARY)
    labels = [row["verdict"] for row in result.summary]
    artefacts.write_manifest(
        artefacts.manifest_path(summary),
        "comparison",
        parameters={
            "arms": list(names),
            "length_drift": LENGTH_DRIFT,
            "cache_drift": CACHE_DRIFT,
            "degenerate_share": DEGENERATE_SHARE,
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
