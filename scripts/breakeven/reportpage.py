"""The comparison report: one self-contained HTML page and the figures that `snakemake --report` embeds.

Everything is read from the comparison's tables and from manifests; nothing is computed here but what the reference case
needs, which has no tables.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np

from breakeven import artefacts, cli, stats, tables

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
COLOURS = {"faster": "#1f6f8b", "slower": "#b5482a", "undecided": "#6b6b6b", "recorded": "#9a9a9a"}
MARKERS = {"faster": "o", "slower": "s", "undecided": "D", "recorded": "v"}
EXCERPT = 160  # characters of an output that the page shows


@dataclass
class Page:
    """What the template needs."""

    rows: list[dict[str, Any]]  # the summary, with label, rho_low, rho_high and details
    acceptance: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    reference: dict[str, Any]
    manifests: list[dict[str, Any]] = field(default_factory=list)
    between_engines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def speculating(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["verdict"] != "baseline"]


def load(comparison: Path | str, reference: Path | str, manifests: Sequence[Path | str] = ()) -> Page:
    """Read results/comparison, the reference case, and whichever of `manifests` exist."""
    comparison = Path(comparison)
    summary = artefacts.read_table(comparison / "summary.parquet")
    missing = [name for name in tables.SUMMARY.names if name not in summary.column_names]
    if missing:
        raise cli.UserError(f"{comparison / 'summary.parquet'}: column {missing[0]!r} is missing; run compare.py again")
    manifest = artefacts.read_manifest(comparison / "summary.manifest.json", "comparison")
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
        artefacts.read_table(comparison / "acceptance.parquet", tables.ACCEPTANCE).to_pylist(),
        artefacts.read_table(comparison / "requests.parquet", tables.REQUESTS).to_pylist(),
        reference_case(artefacts.read_json(reference)),
        read_manifests(manifests),
        manifest.get("between_engines", []),
    )


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
        if key not in best or row["speedup"] > best[key]["speedup"]:
            best[key] = row
    winners = list(best.values())
    if len(winners) == 1:
        sentence = _sentence(winners[0], alone=len(judged) == 1)
    elif len({row["verdict"] for row in winners}) == 1:
        row = max(winners, key=lambda row: row["speedup"])
        where = f"all {len(winners)} combinations of engine and protocol"
        words = {
            "faster": f"Speculation pays under {where}",
            "slower": f"Speculation does not pay under any of {len(winners)} combinations of engine and protocol",
            "undecided": f"Undecided under {where}",
        }
        sentence = f"{words[row['verdict']]}; the best arm is {_where(row)}, at {_times(row)}."
    else:
        words = {"faster": "it pays", "slower": "it does not pay", "undecided": "it is undecided"}
        parts = [f"{words[row['verdict']]} with {_where(row)} ({_times(row)})" for row in winners]
        sentence = f"It depends: {'; '.join(parts)}."
    return sentence, _numbers(max(winners, key=lambda row: row["speedup"]), rows)


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['label']}, protocol {row['protocol']}"


def _times(row: Mapping[str, Any]) -> str:
    interval = f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" if row["speedup_low"] else ", no interval"
    return f"{row['speedup']:.2f}×{interval}"


def _sentence(row: Mapping[str, Any], alone: bool) -> str:
    arm = row["label"] if alone else f"the best arm ({row['label']})"
    if row["verdict"] == "undecided":
        why = "the difference from plain decoding is within the noise of this measurement"
        if not row["speedup_low"]:
            why = "there are too few prompts for an interval"
        return f"Undecided: {arm} ran at {row['speedup']:.2f} times the speed of plain decoding, but {why}."
    sign = "pays" if row["verdict"] == "faster" else "does not pay"
    sentence = (
        f"Speculation {sign} here: {arm} generates text at {row['speedup']:.2f} times the speed of plain decoding"
        f" (95 % interval {row['speedup_low']:.2f} to {row['speedup_high']:.2f})"
    )
    if row["verdict"] == "slower" and row["rho"]:
        needed = f"{row['acceptance_length']:.2f} tokens and would have to yield more than {row['rho']:.2f} to pay"
        sentence += f"; a step yields {needed}"
    if row.get("cause"):
        sentence += f". Cause: {row['cause']}" + (f" ({row['fault']})" if row.get("fault") else "")
    return sentence + "."


def _numbers(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    base = next((other for other in rows if other["arm"] == row["baseline"]), None)
    protocol = row["details"].get("protocol", {})
    parts = [f"{row['label']}: decode {number(row['tokens_per_second'], 1)} tok/s"]
    if base:
        parts[0] += f" against {number(base['tokens_per_second'], 1)} in {base['arm']}"
    parts.append(f"speed-up {_times(row)}")
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


# Figures


def draw_speedups(page: Page, path: Path | str, style: Path | str) -> str:
    """Speed-up with interval (left), acceptance length reached against break-even (right); returns the alt text."""
    rows = [dict(row) for row in page.speculating]
    for row in page.reference["rows"]:
        lengths, rho = row["acceptance_length"], row["rho"]
        rows.append(
            {
                "label": f"{row['engine_name']}, {row['arm']} *",
                "verdict": "recorded",
                "speedup": row["speedup"],
                "speedup_low": row["speedup_low"],
                "speedup_high": row["speedup_high"],
                "acceptance_length": None,
                "lengths": lengths,
                "rho": None,
                "rho_low": rho[0] if rho else None,
                "rho_high": rho[1] if rho else None,
                "k": None,
            }
        )
    with plt.style.context(str(style)):
        figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(9.6, 1.7 + 0.42 * max(len(rows), 1)))
        left.set_title("Speed-up over plain decoding", pad=18)
        right.set_title("Acceptance length against break-even", pad=18)
        left.axvline(1, color="#1a1a1a", linewidth=1)
        for y, row in enumerate(rows):
            colour, marker = COLOURS.get(row["verdict"], "#9a9a9a"), MARKERS.get(row["verdict"], "o")
            if row["speedup"]:
                if row["speedup_low"]:
                    left.plot([row["speedup_low"], row["speedup_high"]], [y, y], color=colour, linewidth=2.2,
                              solid_capstyle="butt")  # fmt: skip
                fill = colour if row["speedup_low"] else "white"
                left.plot(row["speedup"], y, marker, color=colour, markerfacecolor=fill)
                left.annotate(f"{row['speedup']:.2f}", (row["speedup"], y), (0, 7), textcoords="offset points",
                              ha="center", fontsize=8.5, color=colour)  # fmt: skip
            else:
                left.annotate("refused", (1, y), (6, 0), textcoords="offset points", va="center", fontsize=8.5,
                              color="#6b6b6b", style="italic")  # fmt: skip
            _draw_length(right, y, row, colour, marker)
        several = len({row["protocol"] for row in page.speculating}) > 1
        names = [
            f"{row['label']}\n{row['protocol']}" if several and row.get("protocol") else row["label"] for row in rows
        ]
        left.set_yticks(range(len(rows)), names)
        left.set_ylim(len(rows) - 0.4, -0.75)
        if page.speculating and page.reference["rows"]:
            for axes in (left, right):
                axes.axhline(len(page.speculating) - 0.5, color="#c8c8c8", linewidth=0.8)
        ends = [row[key] for row in rows for key in ("speedup", "speedup_low", "speedup_high") if row[key]]
        left.set_xlim(min([0.5, *(0.95 * x for x in ends)]), max([1.5, *(1.07 * x for x in ends)]))
        left.set_xlabel("times as fast (× plain)")
        left.annotate("slower", (1, 1), (-5, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="right", fontsize=8, color=COLOURS["slower"])  # fmt: skip
        left.annotate("faster", (1, 1), (5, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
                      fontsize=8, color=COLOURS["faster"])  # fmt: skip
        right.set_xlabel("tokens per verification step")
        right.set_xlim(left=0.9)
        if right.get_xlim()[1] < 2.5:
            right.set_xlim(0.9, 2.5)
        handles = [
            plt.Line2D([], [], color="#6b6b6b", marker="o", linestyle="", label="reached"),
            plt.Line2D([], [], color="#1a1a1a", marker="|", markersize=11, markeredgewidth=2, linestyle="",
                       label="break-even (95 % interval shaded)"),
            plt.Line2D([], [], color="#9a9a9a", marker="4", markersize=8, linestyle="", label="ceiling K + 1"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="outside lower right", ncols=3)
        _save(figure, path)
    texts = []
    for row in rows:
        text = f"{row['label']}: {_times(row)}, {row['verdict']}" if row["speedup"] else f"{row['label']}: refused"
        if row["acceptance_length"] and row["rho"]:
            text += f", acceptance length {row['acceptance_length']:.2f} against break-even {row['rho']:.2f}"
        texts.append(text)
    return "Speed-up of each arm and its acceptance length against break-even. " + "; ".join(texts) + "."


def _draw_length(axes, y: int, row: Mapping[str, Any], colour: str, marker: str) -> None:
    """One arm's row in the right panel: interval of break-even shaded, gap to what was reached as a line."""
    if row["rho_low"]:
        axes.fill_betweenx([y - 0.2, y + 0.2], row["rho_low"], row["rho_high"], color="#dcdcdc", linewidth=0)
    if row["rho"] and row["acceptance_length"]:
        axes.plot([row["rho"], row["acceptance_length"]], [y, y], color=colour, linewidth=2.2, alpha=0.6)
    if row["rho"]:
        axes.plot([row["rho"]] * 2, [y - 0.26, y + 0.26], color="#1a1a1a", linewidth=2)
    if row["acceptance_length"]:
        axes.plot(row["acceptance_length"], y, marker, color=colour)
        axes.annotate(f"{row['acceptance_length']:.2f}", (row["acceptance_length"], y), (0, 11),
                      textcoords="offset points", ha="center", fontsize=8.5, color=colour)  # fmt: skip
    if row.get("lengths"):
        axes.plot(row["lengths"], [y, y], color=colour, linewidth=5, solid_capstyle="butt")
    if row["k"]:
        axes.plot(row["k"] + 1, y, "4", color="#9a9a9a", markersize=8)
    if not (row["acceptance_length"] or row.get("lengths")):
        axes.annotate("not known", (0, y), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=8.5, color="#8a8a8a", style="italic")  # fmt: skip


def draw_acceptance(page: Page, path: Path | str, style: Path | str) -> str:
    """Marginal acceptance per position, offline and served, one small panel per arm; returns the alt text."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for row in page.acceptance:
        arms.setdefault(row["arm"], []).append(row)
    labels = {row["arm"]: row for row in page.rows}
    columns = min(max(len(arms), 1), 3)
    lines = max(math.ceil(len(arms) / columns), 1)
    texts = []
    with plt.style.context(str(style)):
        size = (3.2 * columns, 2.6 * lines + 0.4)
        figure, grid = plt.subplots(lines, columns, sharey=True, squeeze=False, figsize=size)
        for axes in grid.flat[len(arms) :]:
            axes.set_axis_off()
        if not arms:
            grid[0, 0].text(0, 0.5, "No acceptance counts were recorded.", transform=grid[0, 0].transAxes)
        for axes, (arm, rows) in zip(grid.flat, arms.items(), strict=False):
            axes.grid(axis="x", visible=False)
            axes.grid(axis="y", visible=True)
            title = labels[arm]["label"] if arm in labels else arm
            axes.set_title(title + (f"\n{labels[arm]['protocol']}" if arm in labels else ""))
            x = np.array([row["position"] for row in rows])
            known = [row["offline_marginal"] is not None for row in rows]
            if all(known):
                _points(axes, x - 0.1, rows, "offline_", "#8a6d1f", "s", f"offline ({rows[0]['offline_prompts']})")
            _points(axes, x + (0.1 if all(known) else 0), rows, "", COLOURS["faster"], "o", "served")
            axes.set_xticks(x)
            axes.set_xlim(0.5, max(x) + 0.5)
            axes.set_ylim(0, 1)
            axes.set_xlabel("draft position")
            axes.legend(loc="upper right")
            for row in rows:
                offline = f", offline {row['offline_marginal']:.3f}" if row["offline_marginal"] is not None else ""
                texts.append(f"{arm} position {row['position']}: served {row['marginal']:.3f}{offline}")
        grid[0, 0].set_ylabel("accepted share of steps")
        _save(figure, path)
    return "Marginal acceptance per draft position, offline and served. " + "; ".join(texts) + "."


def _points(axes, x, rows, prefix, colour, marker, name) -> None:
    y, low, high = (np.array([row[prefix + key] for row in rows]) for key in ("marginal", "low", "high"))
    line = {"linestyle": "--" if prefix else "-", "markerfacecolor": "white" if prefix else colour}
    errors = [np.maximum(y - low, 0), np.maximum(high - y, 0)]
    axes.errorbar(
        x,
        y,
        errors,
        color=colour,
        marker=marker,
        markersize=4,
        linewidth=1,
        elinewidth=1.4,
        capsize=3,
        label=name,
        **line,
    )


def _save(figure, path: Path | str) -> None:
    with artefacts.atomic(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None})
    plt.close(figure)


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
        command = server.get("command")
        found.append(
            {
                "name": "/".join(path.parts[-3:]),
                "artefact": manifest.get("artefact", "unknown"),
                "parameters": list(flat(manifest.get("parameters") or {})),
                "counts": list(flat(manifest.get("counts") or {})),
                "versions": list(flat(manifest.get("versions") or {})),
                "machine": list(flat(manifest.get("machine") or {})),
                "command": " ".join(map(str, command)) if isinstance(command, list) else command,
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


def settings(page: Page) -> list[tuple[str, str]]:
    """What all arms share or differ in: target, drafters, protocols, versions, machines; (name, text) pairs."""
    found: dict[str, list[str]] = {}

    def add(name: str, pairs) -> None:
        text = ", ".join(f"{key} {value}" for key, value in pairs if value not in (None, "null", "", [], "[]"))
        if text and text not in found.setdefault(name, []):
            found[name].append(text)

    for manifest in page.manifests:
        if manifest["artefact"] in ("target", "drafter", "prompts"):
            add(manifest["artefact"].capitalize(), (manifest["parameters"] + manifest["counts"])[:12])
    for row in page.rows:
        details = row["details"]
        add("Protocol", flat(details.get("protocol", {})))
        add("Versions", flat(details.get("versions", {})))
        add("Machine", flat(details.get("machine", {})))
    return [(name, text) for name, texts in found.items() for text in texts]


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
            rows.append(
                {
                    "prompt": prompt,
                    "tokens": mean(requests, "completion_tokens"),
                    "rate": mean(requests, "tokens_per_second"),
                    "baseline_rate": mean(groups.get((arm["baseline"], prompt), []), "tokens_per_second"),
                    "speedup": requests[0]["speedup"],
                    "acceptance_length": mean(requests, "acceptance_length"),
                    "ttft_s": mean(requests, "ttft_s"),
                    "first_difference": min(differences) if differences else None,
                    "degenerate": next((row["degenerate"] for row in requests if row["degenerate"]), None),
                    "excerpt": excerpt(requests[0]["text"]),
                }
            )
        found.append({"arm": arm, "rows": rows})
    return found


def build(
    comparison: Path | str,
    manifests: Sequence[Path | str],
    out: Path | str,
    figures: Path | str,
    template: Path | str,
    style: Path | str,
    reference: Path | str,
) -> Page:
    """Draw the figures and write the page; returns what it shows."""
    page = load(comparison, reference, manifests)
    figures = Path(figures)
    images = []
    for name, draw in (("speedups", draw_speedups), ("acceptance", draw_acceptance)):
        path = figures / f"{name}.svg"
        alt = draw(page, path, style)
        images.append({"alt": alt, "data": base64.b64encode(path.read_bytes()).decode()})
    html = render(page, images, template)
    with artefacts.atomic(out) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return page


def render(page: Page, images: Sequence[Mapping[str, str]], template: Path | str) -> str:
    """The page as HTML; every value is escaped. images: speedups and acceptance, alt text and base64 of an SVG."""
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
    environment.globals.update(interval=interval, engines=ENGINES)
    sentence, line = headline(page.rows)
    return environment.get_template(template.name).render(
        page=page,
        headline=sentence,
        numbers=line,
        speedups=images[0],
        acceptance_image=images[1],
        per_prompt=per_prompt(page),
        settings=settings(page),
        findings=[(row, finding) for row in page.rows for finding in row["details"].get("findings", [])],
        reasoned=[row for row in page.speculating if row["details"].get("evidence")],
        causes=any(row.get("cause") for row in page.rows),
        predictions=any(row.get("predicted_speedup") is not None for row in page.rows),
    )
