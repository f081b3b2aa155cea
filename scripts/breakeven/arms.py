"""One benchmarked arm as its passes tell it: what ran, its requests, and the numbers over them.

An arm is a folder `{benchmarks}/{arm}` with `pass-N.parquet` (tables.BENCHMARK) and `pass-N.manifest.json`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from breakeven import acceptance, artefacts, engines, load, tables
from breakeven.cli import UserError
from breakeven.sanity import degenerate


@dataclass
class Arm:
    """One arm: what its manifests say, and its requests, one row each, sorted by prompt and pass.

    Under load a prompt may be asked several times in a pass; the first of them stays the first.
    """

    name: str
    manifests: dict[int, dict[str, Any]]  # by pass number
    requests: pd.DataFrame  # tables.BENCHMARK plus rate, rate_e2e (tokens per second), scored, loop and degenerate
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
    def draft(self) -> dict[str, Any]:
        """What an arm drafts with, but for K: drafter, method and the engine's further options."""
        return {
            "drafter": self.parameters.get("drafter"),
            "method": engines.method(self.parameters),
            "options": self.parameters.get("options") or {},
        }

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

    @cached_property
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
    def loops(self) -> tuple[int, int]:
        """Outputs that repeat themselves, and all outputs: every one is judged."""
        return int(self.requests["loop"].sum()), len(self.requests)

    @property
    def improbable(self) -> tuple[int, int]:
        """First answers that are improbable text, loops apart, and all first answers: only these were scored."""
        first = self.requests[self.requests["scored"]]
        return int((first["degenerate"].notna() & ~first["loop"]).sum()), len(first)

    @property
    def degenerate_share(self) -> float:
        """Share of the outputs that are loops or, as far as the first answers tell, improbable text."""
        return min(1.0, sum(bad / max(judged, 1) for bad, judged in (self.loops, self.improbable)))

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
    # Only the first answer to a prompt was scored when it was measured.
    requests["scored"] = ~requests.duplicated(["prompt_id", "pass_number"])
    loops = [degenerate(ids) for ids in requests["output_token_ids"]]
    requests["loop"] = [loop is not None for loop in loops]
    requests["degenerate"] = [
        loop or (_problem(manifests[number], prompt) if scored else None)
        for loop, number, prompt, scored in zip(
            loops, requests["pass_number"], requests["prompt_id"], requests["scored"], strict=True
        )
    ]
    wanted = passes or int(manifest["parameters"]["protocol"].get("passes") or 1)
    return Arm(name, manifests, requests, files, wanted - spared)


def _problem(manifest: Mapping[str, Any], prompt_id: str) -> str | None:
    """What the benchmark noted about the text of a prompt's first answer (benchmark.sanity)."""
    return manifest.get("sanity", {}).get(prompt_id, {}).get("problem")


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


def is_random(arm: Arm) -> bool:
    """Does the protocol say that its prompts are random tokens (vLLM's and SGLang's `random` data sets)?"""
    said = [where.get(key) for where in (arm.protocol, arm.parameters) for key in ("workload", "dataset", "prompts")]
    kinds = [value.get("kind") if isinstance(value, dict) else value for value in said]
    return any(isinstance(kind, str) and kind.startswith("random") for kind in kinds)
