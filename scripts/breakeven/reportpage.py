"""The comparison report: one self-contained HTML page, and the tables beside it that `snakemake --report` shows.

Everything is read from the tables of other stages and from manifests; nothing is computed here but what the reference
case needs, which has no tables, and the columns of "what would make it pay" that follow from AL, rho and K alone. The
page's one script (report/page.js) computes the same for the sliders.
"""

import base64
import csv
import hashlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from breakeven import artefacts, cli, figures, indecision, refusals, stats, stepcost, tables
from breakeven.figures import times

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
EXCERPT = 160  # characters of an output that the page shows
SHOWN = 200  # prompts of an arm in its table
DOWNLOAD = 1_000_000  # bytes of a table that the page still carries as a download


@dataclass
class Page:
    """What the template needs."""

    rows: list[dict[str, Any]]  # the summary, with label, rho_low, rho_high and details
    acceptance: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    reference: dict[str, Any]
    manifests: list[dict[str, Any]] = field(default_factory=list)
    between_engines: list[dict[str, Any]] = field(default_factory=list)
    under_load: list[dict[str, Any]] = field(default_factory=list)  # see comparison.under_load
    step_costs: list[dict[str, Any]] = field(default_factory=list)  # tables.STEP_COST of all engines
    training: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # tables.TRAINING by drafter
    offline: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # tables.OFFLINE, held out, by drafter
    curve: list[dict[str, Any]] = field(default_factory=list)  # acceptance against training samples
    curve_figure: bytes | None = None  # SVG
    commit: str | None = None  # of the project that wrote the page
    locks: dict[str, str] = field(default_factory=dict)  # sha256 of the environments' lock files, by name
    runs: dict[str, "Page"] = field(default_factory=dict)  # of several runs on one page, by their names

    @property
    def speculating(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["verdict"] != "baseline"]

    @property
    def by_output_position(self) -> list[dict[str, Any]]:
        """Rows of places.table of the arms whose outputs are long enough for two of them."""
        found = [(row["arm"], row["details"].get("by_output_position") or []) for row in self.rows]
        kept = ("first", "end", "trained", "steps", "acceptance_length", "low", "high")
        return [{"arm": arm} | {key: row[key] for key in kept} for arm, rows in found if len(rows) > 1 for row in rows]

    @property
    def per_prompt(self) -> list[dict[str, Any]]:
        return per_prompt(self)


def load(
    folder: Path | str,
    reference: Path | str,
    manifests: Sequence[Path | str] = (),
    step_costs: Sequence[Path | str] = (),
    training: Mapping[str, Path | str] | None = None,
    data_curve: Path | str | None = None,
    offline: Mapping[str, Path | str] | None = None,
    locks: Sequence[Path | str] = (),
) -> Page:
    """Read results/comparison (`folder`), the reference case, and whichever of `manifests` exist.

    step_costs: tables of step_cost.py; training: training.parquet by drafter; data_curve: curve.parquet, beside which
    curve.svg may lie; offline: held-out walks by drafter; locks: lock files of the environments.
    """
    folder = Path(folder)
    summary = artefacts.read_table(folder / "summary.parquet")
    missing = [name for name in tables.SUMMARY.names if name not in summary.column_names]
    if missing:
        raise cli.UserError(f"{folder / 'summary.parquet'}: column {missing[0]!r} is missing; run compare.py again")
    manifest = artefacts.read_manifest(folder / "summary.manifest.json", "comparison")
    details = manifest["arms"]
    rows = summary.to_pylist()
    for row in rows:
        row["label"] = label(row)
    labels = [(row["label"], row["protocol"]) for row in rows]
    for row, key in zip(rows, labels, strict=True):
        if labels.count(key) > 1:  # they differ in flags or sampling, which only the arm's own name tells
            row["label"] = row["arm"]
        row["details"] = details.get(row["arm"], {})
        row["rho_low"], row["rho_high"] = rho_interval(row)
    return Page(
        rows,
        artefacts.read_table(folder / "acceptance.parquet", tables.ACCEPTANCE).to_pylist(),
        artefacts.read_table(folder / "requests.parquet", tables.REQUESTS).to_pylist(),
        reference_case(artefacts.read_json(reference)),
        read_manifests(manifests),
        manifest.get("between_engines", []),
        manifest.get("under_load", []),
        [row for path in step_costs for row in artefacts.read_table(path, tables.STEP_COST).to_pylist()],
        {name: artefacts.read_table(path, tables.TRAINING).to_pylist() for name, path in (training or {}).items()},
        {name: artefacts.read_table(path, tables.OFFLINE).to_pylist() for name, path in (offline or {}).items()},
        artefacts.read_table(data_curve).to_pylist() if data_curve else [],
        figure.read_bytes() if data_curve and (figure := Path(data_curve).with_suffix(".svg")).is_file() else None,
        commit(Path(__file__).parent),
        artefacts.hashes(*locks),
    )


def named_runs(items: Sequence[str]) -> dict[str, Path]:
    """Results folders by name, from FOLDER or NAME=FOLDER; a name is the shortest end of the path that tells them apart."""
    folders = []
    for item in items:
        name, separator, path = item.partition("=")
        folder = Path(path if separator else item)
        folder = folder / "results" if (folder / "results" / "comparison").is_dir() else folder
        if not (folder / "comparison" / "summary.parquet").is_file():
            raise cli.UserError(
                f"{folder}: no comparison/summary.parquet there; finish that run, or name its results folder"
            )
        folders.append((name if separator else None, folder))
    parts = [[part for part in folder.resolve().parts if part != "results"] for _, folder in folders]
    depth = next((n for n in range(1, 9) if len({tuple(own[-n:]) for own in parts}) == len(parts)), 9)
    found = {name or "/".join(own[-depth:]): folder for (name, folder), own in zip(folders, parts, strict=True)}
    if len(found) < len(items):
        raise cli.UserError("two runs have the same name or folder; name them apart, as NAME=FOLDER")
    return found


def load_run(results: Path | str, reference: Path | str) -> Page:
    """A finished run as its results folder has it: comparison, manifests, step costs and training curves."""
    results = Path(results)
    manifests = ["target/manifest.json", "prompts/*.manifest.json", "drafters/*/checkpoint/manifest.json"]
    arms = artefacts.read_manifest(results / "comparison" / "summary.manifest.json", "comparison")["parameters"]["arms"]
    manifests += [f"benchmarks/{arm}/pass-*.manifest.json" for arm in arms]
    return load(
        results / "comparison",
        reference,
        [path for pattern in manifests for path in sorted(results.glob(pattern))],
        sorted((results / "stepcost").glob("*.parquet")),
        {path.parents[1].name: path for path in sorted(results.glob("drafters/*/checkpoint/training.parquet"))},
        offline={path.parent.name: path for path in sorted(results.glob("drafters/*/offline.parquet"))},
    )


def joined(pages: Mapping[str, Page]) -> Page:
    """Several runs as one page. Arms, protocols, drafters and engines of step costs are named after their run, by its key.

    Nothing is compared between runs, as nothing is between protocols.
    """

    def named(run: str, rows: Sequence[Mapping[str, Any]], *columns: str) -> list[dict[str, Any]]:
        return [dict(row) | {name: f"{run}: {row[name]}" for name in columns if row[name] is not None} for row in rows]

    first = next(iter(pages.values()))
    whole = Page([], [], [], first.reference, commit=first.commit)
    whole.runs = {run: replace(page, commit=None) for run, page in pages.items()}
    for run, page in pages.items():
        whole.rows += named(run, page.rows, "arm", "baseline", "protocol", "drafter")
        whole.acceptance += named(run, page.acceptance, "arm")
        whole.requests += named(run, page.requests, "arm", "baseline", "protocol")
        whole.manifests += named(run, page.manifests, "name", "arm")
        whole.between_engines += [
            pair | {"arms": [f"{run}: {arm}" for arm in pair["arms"]]} for pair in page.between_engines
        ]
        whole.under_load += [
            series | {"label": f"{run}: {series['label']}", "points": named(run, series["points"], "arm")}
            for series in page.under_load
        ]
        whole.step_costs += named(run, page.step_costs, "engine")
        whole.training |= {f"{run}: {name}": rows for name, rows in page.training.items()}
        whole.offline |= {f"{run}: {name}": rows for name, rows in page.offline.items()}
    return whole


def label(row: Mapping[str, Any]) -> str:
    """A short name of an arm for people: engine, drafter and K."""
    engine = ENGINES.get(row["engine"], row["engine"])
    if row["verdict"] == "baseline":
        return f"{engine}, no speculation"
    return f"{engine}, {'drafter ' + row['drafter'] if row['drafter'] else 'no drafter model'}, K = {row['k']}"


def rho_interval(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Break-even AL at the two ends of the speed-up's interval; the acceptance length is taken as it was counted."""
    if not (row["rho"] and row["speedup_low"] and row["verdict"] != "baseline"):
        return None, None
    return row["acceptance_length"] / row["speedup_high"], row["acceptance_length"] / row["speedup_low"]


def reference_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """The reference case with what follows from its numbers: speed-up, interval over prompts, range of rho.

    The baseline is one number per engine, so the interval treats it as exact; it is the smaller for it.
    """
    rows = []
    for row in case["rows"]:
        speedup = row["tokens_per_second"] / row["baseline_tokens_per_second"]
        low = high = None
        if row["tokens_per_second_per_prompt"]:
            ratios = np.array(row["tokens_per_second_per_prompt"]) / row["baseline_tokens_per_second"]
            low, high = (float(np.exp(x)) for x in stats.bootstrap_interval(np.log(ratios)))
        lengths = row["acceptance_length"]
        rho = [length / speedup for length in lengths] if lengths else None
        rows.append(
            dict(row) | {"engine_name": ENGINES.get(row["engine"], row["engine"])}
            | {"speedup": speedup, "speedup_low": low, "speedup_high": high, "rho": rho}
        )  # fmt: skip
    return {"title": case["title"], "note": case["note"], "rows": rows}


# The headline


def headline(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """(a sentence for a manager, a line of numbers for an engineer) from the rows of the summary."""
    judged = [row for row in rows if row["verdict"] in ("faster", "slower", "undecided")]
    if not judged:
        refused = [row for row in rows if row["verdict"] == "refused"]
        if refused:
            return "No comparison stands: every speculating arm was refused.", "The reasons are in the table below."
        return "Nothing was compared: there is no arm with speculation.", ""
    best = {}  # by engine and protocol, since nothing is compared across these
    for row in judged:
        key = row["engine"], row["protocol"]
        if key not in best or _rank(row) > _rank(best[key]):
            best[key] = row
    winners = list(best.values())
    first = max(winners, key=_rank)
    if len(winners) == 1:
        sentence = _sentence(winners[0], alone=len(judged) == 1)
    elif len({row["verdict"] for row in winners}) == 1:
        several = [len({key[i] for key in best}) > 1 for i in (0, 1)]
        what = {(True, False): "engines", (False, True): "protocols"}.get(
            tuple(several), "combinations of engine and protocol"
        )
        where = f"{'both' if len(winners) == 2 else f'all {len(winners)}'} {what}"
        words = {
            "faster": f"Speculation pays under {where}",
            "slower": f"Speculation does not pay under {'either' if len(winners) == 2 else 'any'} of {len(winners)} {what}",
            "undecided": f"Undecided under {where}",
        }
        undecided = first["verdict"] == "undecided"
        which = "undecided arm" if undecided else "arm"
        sentence = f"{words[first['verdict']]}; the best {which} is {_where(first)}, at {times(first)}"
        sentence += f", but {_why_undecided(first)}." if undecided else "."
    else:
        words = {"faster": "it pays", "slower": "it does not pay", "undecided": "it is undecided"}
        parts = [f"{words[row['verdict']]} with {_where(row)} ({times(row)})" for row in winners]
        sentence = f"It depends: {'; '.join(parts)}."
    unjudged = {(row["engine"], row["protocol"]) for row in rows if row["verdict"] == "refused"} - set(best)
    for engine, protocol in sorted(unjudged):
        sentence += f" No comparison stands with {ENGINES.get(engine, engine)}, protocol {protocol}."
    return sentence, _numbers(first, rows)


def _rank(row: Mapping[str, Any]) -> tuple[int, float]:
    """Order of arms by what they say about whether speculation pays: one that does not pay says less than an undecided one."""
    return ("slower", "undecided", "faster").index(row["verdict"]), row["speedup"]


def _why_undecided(row: Mapping[str, Any]) -> str:
    return indecision.explained(row, row["details"])[0]


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['label']}, protocol {row['protocol']}"


def _sentence(row: Mapping[str, Any], alone: bool) -> str:
    arm = row["label"] if alone else f"the best arm ({row['label']})"
    if row["verdict"] == "undecided":
        arm = row["label"] if alone else f"no arm is shown to pay; the best undecided one ({row['label']})"
        ran = f"{arm} ran at {row['speedup']:.2f} times the speed of plain decoding"
        return f"Undecided: {ran}, but {_why_undecided(row)}."
    sign = "pays" if row["verdict"] == "faster" else "does not pay"
    sentence = (
        f"Speculation {sign} here: {arm} generates text at {row['speedup']:.2f} times the speed of plain decoding"
        f" (95 % interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
    )
    if row["verdict"] == "slower" and row["rho"]:
        needed = f"{row['acceptance_length']:.2f} tokens and would have to yield more than {row['rho']:.2f} to pay"
        sentence += f"; a step yields {needed}"
        if row["rho"] >= row["k"] + 1:
            sentence += f", which is out of reach at K = {row['k']}"
    if row.get("cause"):
        what = "It falls short of what it could be" if row["verdict"] == "faster" else "Cause"
        sentence += f". {what}: {row['cause']}" + (f" ({row['fault']})" if row.get("fault") else "")
    return sentence + "."


def _numbers(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    base = next((other for other in rows if other["arm"] == row["baseline"]), None)
    protocol = row["details"].get("protocol", {})
    parts = [f"{row['label']}: decode {number(row['tokens_per_second'], 1)} tok/s"]
    if base:
        parts[0] += f" against {number(base['tokens_per_second'], 1)} in {base['arm']}"
    parts.append(f"speed-up {times(row)}")
    if row["acceptance_length"]:
        parts.append(f"acceptance length {row['acceptance_length']:.2f} of at most {row['k'] + 1}")
    if row["offline_acceptance_length"]:
        parts.append(f"offline {row['offline_acceptance_length']:.2f}")
    if row["rho"]:
        bounds = f" [{row['rho_low']:.2f}, {row['rho_high']:.2f}]" if row["rho_low"] else ""
        parts.append(f"break-even {row['rho']:.2f}{bounds}")
    if row["details"].get("noise_floor") is not None:
        parts.append(f"A/A noise floor ±{row['details']['noise_floor']:.1%}".replace("%", " %"))
    parts.append(f"{row['prompts']} prompts × {row['passes']} passes")
    settings = [f"{key} {protocol[key]}" for key in ("temperature", "max_tokens", "seed") if key in protocol]
    return " · ".join(parts + settings)


# Provenance


def read_manifests(paths: Sequence[Path | str]) -> list[dict[str, Any]]:
    """The manifests that exist, as name, artefact and flat (key, value) lists; a missing one is only logged."""
    found = []
    for path in map(Path, paths):
        if not path.exists():
            cli.logger.warning("%s: no such manifest, left out of the provenance", path)
            continue
        manifest = artefacts.read_json(path)
        if not isinstance(manifest, dict):
            raise cli.UserError(f"{path}: not a manifest (a JSON object is needed)")
        server = manifest.get("server") if isinstance(manifest.get("server"), dict) else {}
        command, parameters = server.get("command"), manifest.get("parameters") or {}
        environment = [f"{key}={value}" for key, value in (parameters.get("environment") or {}).items()]
        if isinstance(command, list):
            command = shlex.join([*(["env", *environment] if environment else []), *map(str, command)])
        found.append(
            {
                "name": "/".join(path.parts[-3:]),
                "arm": parameters.get("arm"),
                "artefact": manifest.get("artefact", "unknown"),
                "parameters": list(flat(manifest.get("parameters") or {})),
                "counts": list(flat(manifest.get("counts") or {})),
                "versions": list(flat(manifest.get("versions") or {})),
                "machine": list(flat(manifest.get("machine") or {})),
                "running": list(flat(server.get("running") or {})),
                "command": command,
            }
        )
    return found


def flat(value: Mapping[str, Any], prefix: str = ""):
    """(dotted key, text) of all leaves of nested mappings; long values are cut."""
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from flat(item, f"{prefix}{key}.")
        else:
            text = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
            yield f"{prefix}{key}", text if len(text) <= 300 else text[:300] + " …"


def commit(folder: Path | str) -> str | None:
    """The commit that is checked out in a folder, with "-dirty" if tracked files differ; None outside of git."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def settings(page: Page) -> list[tuple[str, str]]:
    """What all arms share or differ in: target, drafters, protocols, versions, machines; (name, text) pairs."""
    found: dict[str, list[str]] = {}

    def add(name: str, pairs) -> None:
        text = ", ".join(f"{key} {value}".strip() for key, value in pairs if value not in (None, "null", "", [], "[]"))
        if text and text not in found.setdefault(name, []):
            found[name].append(text)

    if page.commit:
        add("Page written at commit", [("", page.commit)])
    for name, sha256 in page.locks.items():
        add(name, [("sha256", sha256)])
    for manifest in [] if page.runs else page.manifests:
        if manifest["artefact"] in ("target", "drafter", "prompts"):
            add(manifest["artefact"].capitalize(), (manifest["parameters"] + manifest["counts"])[:12])
    for row in [] if page.runs else page.rows:
        details = row["details"]
        add("Protocol", flat(details.get("protocol", {})))
        add("Versions", flat(details.get("versions", {})))
        add("Machine", flat(details.get("machine", {})))
    own = [(name, text) for name, texts in found.items() for text in texts]
    return own + [(f"{run}: {name}", text) for run, one in page.runs.items() for name, text in settings(one)]


# The page


def number(value: float | None, digits: int = 2) -> str:
    """A number with fixed digits, or an en dash for null."""
    return "–" if value is None else f"{value:,.{digits}f}"


def interval(low: float | None, high: float | None, digits: int = 2) -> str:
    """An interval in brackets, or nothing."""
    return f"[{low:.{digits}f}, {high:.{digits}f}]" if low is not None and high is not None else ""


def percent(value: float | None, digits: int = 0) -> str:
    """A share in per cent, or an en dash for null."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def excerpt(text: str | None) -> str:
    """The beginning of an output on one line."""
    line = re.sub(r"\s+", " ", text or "").strip()
    return line if len(line) <= EXCERPT else line[:EXCERPT] + " …"


def per_prompt(page: Page) -> list[dict[str, Any]]:
    """By speculating arm, one row per prompt: mean decode speeds of arm and baseline, speed-up, AL, losslessness."""

    def mean(rows, key):
        values = [row[key] for row in rows if row[key] is not None]
        return sum(values) / len(values) if values else None

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in page.requests:
        groups.setdefault((row["arm"], row["prompt_id"]), []).append(row)
    found = []
    for arm in page.speculating:
        rows = []
        for (name, prompt), requests in groups.items():
            if name != arm["arm"]:
                continue
            differences = [row["first_difference"] for row in requests if row["first_difference"] is not None]
            plain = groups.get((arm["baseline"], prompt), [])
            rows.append(
                {
                    "prompt": prompt,
                    "tokens": mean(requests, "completion_tokens"),
                    "rate": mean(requests, "tokens_per_second"),
                    "baseline_rate": mean(plain, "tokens_per_second"),
                    "speedup": requests[0]["speedup"],
                    "acceptance_length": mean(requests, "acceptance_length"),
                    "ttft_s": mean(requests, "ttft_s"),
                    "first_difference": min(differences) if differences else None,
                    "compared": bool({r["pass_number"] for r in requests} & {r["pass_number"] for r in plain}),
                    "degenerate": next((row["degenerate"] for row in requests if row["degenerate"]), None),
                    "excerpt": excerpt(requests[0]["text"]),
                }
            )
        found.append({"arm": arm, "rows": rows})
    return found


def what_would_pay(page: Page) -> list[dict[str, Any]]:
    """By arm with a known step cost: what AL, rho and K alone imply. Formulas: stepcost.py.

    conditional is the constant acceptance of each draft token, given the ones before, that gives this AL;
    needed_conditional the one that gives AL = rho, null where K + 1 tokens are not enough.
    """
    rows = []
    for row in page.speculating:
        if not (row["rho"] and row["acceptance_length"] and row["k"]):
            continue
        k, rho, length = row["k"], row["rho"], row["acceptance_length"]
        rows.append(
            {
                "arm": row["arm"],
                "label": row["label"],
                "protocol": row["protocol"],
                "k": k,
                "acceptance_length": length,
                "rho": rho,
                "speedup": stepcost.predicted_speedup(length, rho),
                "ceiling": stepcost.ceiling(k, rho),
                "conditional": stepcost.needed_conditional(length, k),
                "needed_conditional": stepcost.needed_conditional(rho, k),
                "step_time_to_spare": length / rho - 1,  # a step may take so much longer; negative: must shrink
            }
        )
    return rows


def lossless(page: Page) -> list[dict[str, Any]]:
    """By arm: the share of greedy outputs equal to the baseline's, the A/A control, and the first difference."""
    rows = []
    for row in page.rows:
        found = row["details"].get("lossless") or {}
        if found.get("identical") is None and found.get("control") is None:
            continue
        differences = found.get("first_difference") or {}
        first = min(differences, key=differences.get) if differences else None
        rows.append(
            {
                "arm": row["arm"],
                "identical": found.get("identical"),
                "control": found.get("control"),
                "differing_prompts": None if found.get("identical") is None else len(differences),
                "first_difference": differences[first] if first else None,
                "prompt": first,
            }
        )
    return rows


def refused(page: Page) -> list[dict[str, str]]:
    """Each reason of each refused arm: its id, what the id means, and what was found."""
    rows = []
    for row in page.speculating:
        if row["verdict"] != "refused":
            continue
        ids = row["details"].get("reasons") or [(row["reason"] or "").split(":")[0]]
        ids = [name for name in ids if name in refusals.REASONS]
        rows.append(
            {
                "arm": row["arm"],
                "reasons": "; ".join(f"{name}: {refusals.REASONS[name]}" for name in ids),
                "found": row["reason"] or "",
            }
        )
    return rows


def commands(page: Page) -> list[tuple[str, str]]:
    """(arm, command line of its server), first pass of each arm."""
    found: dict[str, str] = {}
    for manifest in page.manifests:
        if manifest["command"] and manifest["artefact"] == "benchmark":
            found.setdefault(manifest["arm"] or manifest["name"], manifest["command"])
    return list(found.items())


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header; nested values as JSON, nulls empty."""
    out = io.StringIO()
    names = list(rows[0]) if rows else []
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([json.dumps(row[name]) if isinstance(row[name], (list, dict)) else row[name] for name in names])
    return out.getvalue()


def without_details(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The summary's own columns, without what `load` adds for the page."""
    return [{name: row[name] for name in tables.SUMMARY.names} for row in rows]


def download(name: str, rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Links that save a table's rows as CSV and JSON, the data in the links; a text where they are too many."""
    links = []
    for suffix, kind, text in (
        ("csv", "text/csv", as_csv(rows)),
        ("json", "application/json", json.dumps(rows, ensure_ascii=False, separators=(",", ":"))),
    ):
        data = base64.b64encode(text.encode()).decode()
        if len(data) > DOWNLOAD:
            return Markup('<p class="download">{} rows, too many to carry: see results/.</p>').format(len(rows))
        links.append(
            Markup(
                '<a download="{}.{}" href="data:{};charset=utf-8;base64,{}">{}<span class="hidden"> of {}</span></a>'
            ).format(name, suffix, kind, data, suffix.upper(), name)
        )
    return Markup('<p class="download">{}</p>').format(Markup(" · ").join(links))


def build(
    folder: Path | str,
    manifests: Sequence[Path | str],
    out: Path | str,
    results: Path | str,
    template: Path | str,
    style: Path | str,
    reference: Path | str,
    step_costs: Sequence[Path | str] = (),
    training: Mapping[str, Path | str] | None = None,
    data_curve: Path | str | None = None,
    offline: Mapping[str, Path | str] | None = None,
    locks: Sequence[Path | str] = (),
) -> Page:
    """Write the page, and figures and tables into `results`; returns what it shows. Others: see `load`."""
    page = load(folder, reference, manifests, step_costs, training, data_curve, offline, locks)
    write(page, out, results, template, style)
    for name, rows in {
        "summary": without_details(page.rows),
        "what_would_pay": what_would_pay(page),
        "acceptance": page.acceptance,
        "requests": [{key: value for key, value in row.items() if key != "text"} for row in page.requests],
    }.items():
        with artefacts.atomic(Path(results) / f"{name}.csv") as temporary:
            temporary.write_text(as_csv(rows), encoding="utf-8")
    return page


def write(page: Page, out: Path | str, folder: Path | str, template: Path | str, style: Path | str) -> None:
    """Draw every figure into `folder` and write the page."""
    images = {}
    for name, draw in figures.FIGURES.items():
        path = Path(folder) / f"{name}.svg"
        alt = draw(page, path, style)
        images[name] = {"alt": alt, "data": base64.b64encode(path.read_bytes()).decode()}
    html = render(page, images, template)
    with artefacts.atomic(out) as temporary:
        temporary.write_text(html, encoding="utf-8")


def render(page: Page, images: Mapping[str, Mapping[str, str]], template: Path | str) -> str:
    """The page as HTML; every value is escaped, and the page lets no script run but its own, known by its hash.

    images: by name of the figure, alt text and base64 of an SVG. page.css and page.js lie beside the template.
    """
    template = Path(template)
    if not template.exists():
        raise cli.UserError(f"{template}: no such template; give one with --template")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, percent=percent, excerpt=excerpt)
    environment.globals.update(interval=interval, engines=ENGINES, download=download)
    sentence, line = headline(page.rows)
    script = (template.parent / "page.js").read_text(encoding="utf-8")
    return environment.get_template(template.name).render(
        page=page,
        headline=sentence,
        numbers=line,
        images=images,
        style=Markup((template.parent / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        shown=SHOWN,
        summary=without_details(page.rows),
        pay=what_would_pay(page),
        lossless=lossless(page),
        refused=refused(page),
        commands=commands(page),
        curve_figure=base64.b64encode(page.curve_figure).decode() if page.curve_figure else None,
        per_prompt=page.per_prompt,
        settings=settings(page),
        findings=[{"arm": row["arm"]} | finding for row in page.rows for finding in row["details"].get("findings", [])],
        reasoned=[row for row in page.speculating if row["details"].get("evidence")],
        causes=any(row.get("cause") for row in page.rows),
        loads=any((row.get("concurrency") or 1) > 1 for row in page.rows),
        predictions=any(row.get("predicted_speedup") is not None for row in page.rows),
    )
