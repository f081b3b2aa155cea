"""The figures of the comparison report, as SVG files of the same bytes each time; each function returns the alt text.

They are embedded in the page and shown by `snakemake --report`. Colours differ in lightness too, and every meaning that
a colour has a mark has as well. `page` is a reportpage.Page, `style` a matplotlib style file.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from breakeven import artefacts

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLOURS = {"faster": "#1f6f8b", "slower": "#b5482a", "undecided": "#6b6b6b", "recorded": "#9a9a9a"}
MARKERS = {"faster": "o", "slower": "s", "undecided": "D", "recorded": "v"}
SERIES = ("#1f6f8b", "#b5482a", "#8a6d1f", "#5b4a8a", "#3d7a4a", "#1a1a1a")
SHAPES = "osD^v*"
NAMED_PROMPTS = 30  # more prompts than these are drawn without their names
POINTS = 1000  # of a training curve; more cannot be seen and make the page large


def times(row: Mapping[str, Any]) -> str:
    """A speed-up with its interval, as text."""
    interval = f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" if row["speedup_low"] else ", no interval"
    return f"{row['speedup']:.2f}×{interval}"


def draw_speedups(page: Any, path: Path | str, style: Path | str) -> str:
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
        text = f"{row['label']}: {times(row)}, {row['verdict']}" if row["speedup"] else f"{row['label']}: refused"
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


def draw_acceptance(page: Any, path: Path | str, style: Path | str) -> str:
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


def draw_prompts(page: Any, path: Path | str, style: Path | str) -> str:
    """Decode speed of each prompt with and without speculation, one panel per arm that was compared."""
    groups = [
        (group["arm"], [row for row in group["rows"] if row["speedup"] and row["baseline_rate"]])
        for group in page.per_prompt
    ]
    groups = [(arm, sorted(rows, key=lambda row: row["speedup"])) for arm, rows in groups if rows]
    texts = []
    with plt.style.context(str(style)):
        if not groups:
            return _nothing(path, "No arm was compared prompt by prompt.")
        columns = min(len(groups), 3)
        lines = -(-len(groups) // columns)
        most = max(len(rows) for _, rows in groups)
        height = 1.3 + (0.3 * most if most <= NAMED_PROMPTS else 3.5)
        figure, grid = plt.subplots(lines, columns, squeeze=False, figsize=(3.4 * columns + 0.6, lines * height))
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        for axes, (arm, rows) in zip(grid.flat, groups, strict=False):
            y = np.arange(len(rows))
            plain, own = (np.array([row[key] for row in rows]) for key in ("baseline_rate", "rate"))
            colours = [COLOURS["faster"] if row["speedup"] >= 1 else COLOURS["slower"] for row in rows]
            axes.hlines(y, plain, own, colors=colours, linewidth=2)
            axes.plot(plain, y, "o", color="#6b6b6b", markerfacecolor="white", label="plain", linestyle="")
            for marker, sign in (("o", True), ("s", False)):
                chosen = np.array([(row["speedup"] >= 1) is sign for row in rows])
                name = "faster" if sign else "slower"
                if chosen.any():
                    axes.plot(own[chosen], y[chosen], marker, color=COLOURS[name], label=f"speculative, {name}",
                              linestyle="")  # fmt: skip
            axes.set_title(f"{arm['label']}\n{arm['protocol']}")
            axes.set_yticks(y, [row["prompt"] for row in rows] if most <= NAMED_PROMPTS else [""] * len(rows))
            axes.set_ylim(-0.6, len(rows) - 0.4)
            axes.set_xlabel("decode tok/s")
            texts.append(
                f"{arm['arm']}: " + ", ".join(f"{row['prompt']} {row['speedup']:.2f}×" for row in rows[:NAMED_PROMPTS])
            )
        handles = [
            plt.Line2D([], [], color="#6b6b6b", marker="o", markerfacecolor="white", linestyle="", label="plain"),
            plt.Line2D([], [], color=COLOURS["faster"], marker="o", linestyle="", label="speculative, faster"),
            plt.Line2D([], [], color=COLOURS["slower"], marker="s", linestyle="", label="speculative, slower"),
        ]
        figure.legend(handles=handles, loc="outside lower right", ncols=3)
        _save(figure, path)
    return "Decode speed of each prompt with and without speculation. " + "; ".join(texts) + "."


def draw_lengths(page: Any, path: Path | str, style: Path | str) -> str:
    """Acceptance length against K: the held-out walk of each drafter, what arms reached, and break-even (rho)."""
    with plt.style.context(str(style)):
        arms = [row for row in page.speculating if row["acceptance_length"] and row["k"]]
        if not arms and not page.offline:
            return _nothing(path, "No acceptance length is known.")
        figure, axes = plt.subplots(figsize=(7.4, 3.8))
        texts = []
        names = sorted({*page.offline, *(row["drafter"] or row["arm"] for row in arms)})
        for i, name in enumerate(names):
            colour, marker = SERIES[i % len(SERIES)], SHAPES[i % len(SHAPES)]
            walk = {row["k"]: row["acceptance_length"] for row in page.offline.get(name, [])}
            if walk:
                ks = sorted(walk)
                axes.plot(ks, [walk[k] for k in ks], "--", color=colour, marker=marker, markerfacecolor="white",
                          markersize=4, label=f"{name}, held out")  # fmt: skip
                texts.append(f"{name} held out: " + ", ".join(f"K {k} {walk[k]:.2f}" for k in ks))
            served = [row for row in arms if (row["drafter"] or row["arm"]) == name]
            if served:
                axes.plot([row["k"] for row in served], [row["acceptance_length"] for row in served], marker,
                          color=colour, linestyle="", label=f"{name}, served")  # fmt: skip
            for row in served:
                texts.append(f"{row['arm']} served: K {row['k']} {row['acceptance_length']:.2f}")
                if row["rho"]:
                    axes.plot([row["k"] - 0.18, row["k"] + 0.18], [row["rho"]] * 2, color=colour, linewidth=2.5)
                    axes.plot([row["k"]] * 2, [row["rho"], row["acceptance_length"]], color=colour, alpha=0.5)
                    texts[-1] += f" against break-even {row['rho']:.2f}"
        for engine in sorted({row["engine"] for row in page.step_costs}):
            single = {
                row["k"]: row["rho"] for row in page.step_costs if row["engine"] == engine and row["concurrency"] == 1
            }
            ks = sorted(single)
            axes.plot(
                ks, [single[k] for k in ks], ":", color="#6b6b6b", label=f"break-even on {engine}, measured apart"
            )
        axes.plot([], [], color="#6b6b6b", linewidth=2.5, label="break-even of an arm, in its colour")
        most = int(max([row["k"] for row in arms] + [row["k"] for rows in page.offline.values() for row in rows]))
        axes.set_xticks(range(1, most + 1))
        axes.set_ylim(bottom=min([0.98, *(0.98 * row["rho"] for row in arms if row["rho"])]))
        axes.grid(axis="y", visible=True)
        axes.set_xlabel("K, drafted tokens per step")
        axes.set_ylabel("acceptance length")
        figure.legend(loc="outside right upper")
        _save(figure, path)
    return "Acceptance length against K. " + "; ".join(texts) + "."


def draw_step_cost(page: Any, path: Path | str, style: Path | str) -> str:
    """rho against K with its interval, one line per engine and concurrency; repeats are separate marks."""
    with plt.style.context(str(style)):
        if not page.step_costs:
            return _nothing(path, "Step costs were not measured; `snakemake step_cost` measures them.")
        figure, axes = plt.subplots(figsize=(6.4, 3.6))
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in page.step_costs:
            groups.setdefault((row["engine"], row["concurrency"]), []).append(row)
        texts = []
        for i, ((engine, concurrency), rows) in enumerate(sorted(groups.items())):
            rows.sort(key=lambda row: (row["k"], row["repeat"]))
            x = np.array([row["k"] for row in rows]) + 0.06 * (i - (len(groups) - 1) / 2)
            rho, low, high = (np.array([row[key] for row in rows]) for key in ("rho", "rho_low", "rho_high"))
            several = len({row["k"] for row in rows}) < len(rows)
            axes.errorbar(
                x, rho, [np.maximum(rho - low, 0), np.maximum(high - rho, 0)], color=SERIES[i % len(SERIES)],
                marker=SHAPES[i % len(SHAPES)], linestyle="" if several else "-", markersize=5, elinewidth=1.4,
                capsize=3, label=f"{engine}, {concurrency} at a time",
            )  # fmt: skip
            texts += [f"{engine} K {row['k']} at {concurrency}: rho {row['rho']:.2f}" for row in rows]
        ks = sorted({row["k"] for row in page.step_costs})
        axes.axhline(1, color="#1a1a1a", linewidth=1)
        axes.grid(axis="y", visible=True)
        axes.grid(axis="x", visible=False)
        axes.set_xticks(ks)
        axes.set_ylim(bottom=min(0.9, *(row["rho_low"] for row in page.step_costs)))
        axes.set_xlabel("K, drafted tokens per step")
        axes.set_ylabel("rho, break-even acceptance length")
        axes.legend(loc="upper left")
        _save(figure, path)
    return "Step cost rho against K. " + "; ".join(texts) + "."


def draw_load(page: Any, path: Path | str, style: Path | str) -> str:
    """Speed-up against requests in flight (log scale) with its interval, one line for each set of arms."""
    with plt.style.context(str(style)):
        if not page.under_load:
            return _nothing(path, "No arms differ in their concurrency alone.")
        figure, axes = plt.subplots(figsize=(6.4, 3.6))
        texts = []
        for i, series in enumerate(page.under_load):
            points = [point for point in series["points"] if point["speedup"]]
            y = np.array([point["speedup"] for point in points])
            low, high = (
                np.array([point[f"speedup_{end}"] or point["speedup"] for point in points]) for end in ("low", "high")
            )
            axes.errorbar(
                [point["concurrency"] for point in points], y, [np.maximum(y - low, 0), np.maximum(high - y, 0)],
                color=SERIES[i % len(SERIES)], marker=SHAPES[i % len(SHAPES)], markersize=5, elinewidth=1.4, capsize=3,
                label=series["label"],
            )  # fmt: skip
            texts += [f"{series['label']} at {point['concurrency']}: {times(point)}" for point in points]
        measured = sorted({point["concurrency"] for series in page.under_load for point in series["points"]})
        axes.axhline(1, color="#1a1a1a", linewidth=1)
        axes.grid(axis="y", visible=True)
        axes.set_xscale("log")
        axes.set_xticks(measured, [str(n) for n in measured])
        axes.minorticks_off()
        axes.set_xlabel("requests in flight at once")
        axes.set_ylabel("times as fast (× plain)")
        axes.legend(loc="best")
        _save(figure, path)
    return "Speed-up against concurrency. " + "; ".join(texts) + "."


def draw_training(page: Any, path: Path | str, style: Path | str) -> str:
    """Loss and accuracy over the tokens seen, prompts included, one line of panels per trained drafter."""
    with plt.style.context(str(style)):
        if not page.training:
            return _nothing(path, "No drafter was trained.")
        figure, grid = plt.subplots(len(page.training), 2, squeeze=False, figsize=(9.6, 2.9 * len(page.training)))
        texts = []
        for (left, right), (name, rows) in zip(grid, page.training.items(), strict=True):
            train = [row for row in rows if row["split"] == "train"]
            held_out = [row for row in rows if row["split"] == "held_out"]
            left.set_title(f"{name}: loss")
            right.set_title(f"{name}: accuracy per training-time step")
            for axes in (left, right):
                axes.set_xlabel("tokens seen, prompts included")
                axes.grid(axis="y", visible=True)
            thinned = slice(None, None, max(1, len(train) // POINTS))
            x = [row["tokens"] for row in train][thinned]
            if train:
                left.plot(
                    x,
                    smooth([row["loss"] for row in train])[thinned],
                    color=COLOURS["recorded"],
                    label="training, smoothed",
                )
            for i, step in enumerate(zip(*(row["accuracy"] for row in train), strict=True)):
                right.plot(x, smooth(step)[thinned], color=SERIES[i % len(SERIES)], linewidth=1, label=f"step {i + 1}")
            at = [row["tokens"] for row in held_out]
            left.plot(at, [row["loss"] for row in held_out], "o--", color=COLOURS["faster"], label="held out")
            for i, step in enumerate(zip(*(row["accuracy"] for row in held_out), strict=True)):
                right.plot(at, step, SHAPES[i % len(SHAPES)], color=SERIES[i % len(SERIES)])
            right.set_ylim(bottom=0)
            left.legend(loc="upper right")
            right.legend(loc="lower right", ncols=3, title="marks: held out", title_fontsize=8.5)
            if held_out:
                accuracy = ", ".join(f"{value:.3f}" for value in held_out[-1]["accuracy"])
                texts.append(f"{name}: held-out loss {held_out[-1]['loss']:.2f}, accuracy per step {accuracy}")
        _save(figure, path)
    return "Loss and accuracy during training. " + "; ".join(texts) + "."


def smooth(values: Sequence[float]) -> np.ndarray:
    """A moving average over a fiftieth of the values, as long as the values; nulls are left out."""
    values = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    width = max(1, len(values) // 50)
    known = np.convolve(~np.isnan(values), np.ones(width), "same")
    with np.errstate(invalid="ignore"):
        return np.convolve(np.nan_to_num(values), np.ones(width), "same") / np.where(known, known, np.nan)


def _nothing(path: Path | str, text: str) -> str:
    """A figure that only says why there is none, since Snakemake expects the file."""
    figure, axes = plt.subplots(figsize=(6.4, 0.6))
    axes.set_axis_off()
    axes.text(0, 0.5, text, transform=axes.transAxes, va="center")
    _save(figure, path)
    return text


FIGURES = {
    "speedups": draw_speedups,
    "acceptance": draw_acceptance,
    "lengths": draw_lengths,
    "prompts": draw_prompts,
    "step_cost": draw_step_cost,
    "load": draw_load,
    "training": draw_training,
}
"""Every figure of the report, by the name of its file."""
