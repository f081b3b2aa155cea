"""What a run found, in a terminal: the verdicts, where the page is, what to try next."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from breakeven import artefacts, configuration, indecision, tables

COLOURS = {"faster": "green", "slower": "red", "refused": "magenta", "undecided": "yellow"}


def read(comparison: Path | str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of the summary, its manifest)."""
    rows = artefacts.read_table(Path(comparison) / "summary.parquet", tables.SUMMARY).to_pylist()
    manifest = artefacts.read_manifest(Path(comparison) / "summary.manifest.json", "comparison")
    return rows, manifest


def check_command(row: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """The command line that checks an arm's drafter as the arm served it; FOLDER stands for the drafter's checkpoint."""
    words = ["python", "scripts/check_drafter.py", "--checkpoint", "FOLDER", "--target", "results/target"]
    words += ["--engine-version", (details.get("versions") or {}).get(row["engine"], "VERSION")]
    arm = {key: row[key] for key in ("engine", "drafter", "k")} | {"method": details.get("method") or "eagle3"}
    arm |= {key: details[key] for key in ("options", "allow") if key in details}
    return shlex.join([*words, *configuration.check_words(arm, "FOLDER", details.get("flags") or {})])


def next_steps(row: Mapping[str, Any], details: Mapping[str, Any]) -> list[str]:
    """What to try for an arm, from its verdict and cause; none for a baseline and where nothing is to blame."""
    cause, fault = row["cause"] or "", row["fault"]
    steps = []
    if "integration" in cause or (cause == "mixed" and fault):
        named = f" ({fault})" if fault else ""
        steps.append(
            f"integration{named}: {check_command(row, details)} (FOLDER: the drafter's checkpoint); docs/checks.md says"
            " how to mend what it finds"
        )
    if cause == "integration or distribution":
        steps.append(
            "distribution: replay_served, the offline walk on the served outputs, tells which of the two it is"
        )
    if cause == "training" and fault == "distribution":
        steps.append("training (distribution): train on data like the served prompts and as long (prompts.sources)")
    elif cause == "training":
        steps.append(
            "training: more data may pay; name samples under data_curve in the config and run snakemake data_curve, or"
            " raise prompts.size"
        )
    if cause == "mixed" and not fault:
        steps.append("training: acceptance is low for its data, but more of it cannot pay before a step is cheaper")
    if cause in ("cost", "mixed"):
        best = next((line for line in details.get("pay") or [] if line["change"] == "K"), None)
        if best and best["needed"].isdigit() and best["needed"] != best["now"]:
            steps.append(f"cost: an arm with k: {best['needed']} ({best['note']})")
        steps += [
            f"cost: {line['change']}: {line['now']}, needed: {line['needed']} ({line['note']})"
            for line in details.get("pay") or []
            if line["change"] in ("CUDA graphs", "bfloat16")
        ]
        steps.append("cost: snakemake step_cost shows rho at each K; a smaller draft vocabulary may make steps cheaper")
    # With a cause, an interval that ends below a gain worth having is enough, and only a doubtful speed needs measuring.
    if row["verdict"] == "undecided" and (not cause or details.get("undecided_because") != "noise"):
        steps.append(f"undecided: {indecision.explained(row, details)[1]}")
    if row["verdict"] == "refused":
        steps.append(f"refused: {row['reason']}")
    return steps


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The verdicts, one row per arm."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("arm", "protocol", "verdict", "cause"):
        shown.add_column(name, overflow="fold")
    for name in ("tok/s", "speed-up", "AL", "rho"):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cause = (row["cause"] or "") + (f" ({row['fault']})" if row["fault"] else "")
        numbers = [
            "" if row[name] is None else f"{row[name]:.{digits}f}"
            for name, digits in (("tokens_per_second", 1), ("acceptance_length", 2), ("rho", 2))
        ]
        # As Text, so that brackets are brackets and not rich's markup.
        shown.add_row(
            Text(row["arm"]), Text(row["protocol"]), Text(row["verdict"], COLOURS.get(row["verdict"], "")), Text(cause),
            numbers[0], Text(speedup(row)), *numbers[1:],
        )  # fmt: skip
    return shown


def load_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """The speed-up at each concurrency, with the server's output tokens per second with speculation and without."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("at once", "speed-up", "verdict", "AL", "rho", "server tok/s", "plain"):
        shown.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
    for point in points:
        numbers = [
            "" if point[name] is None else f"{point[name]:.{digits}f}"
            for name, digits in (
                ("acceptance_length", 2), ("rho", 2), ("server_tokens_per_second", 0), ("plain_server_tokens_per_second", 0),
            )
        ]  # fmt: skip
        verdict = Text(point["verdict"], COLOURS.get(point["verdict"], ""))
        shown.add_row(str(point["concurrency"]), Text(speedup(point)), verdict, *numbers)
    return shown


def speedup(row: Mapping[str, Any]) -> str:
    """A speed-up with its interval; empty for a baseline and where there is none."""
    if row["speedup"] is None or row["verdict"] == "baseline":
        return ""
    interval = f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" if row["speedup_low"] else ""
    return f"{row['speedup']:.2f}{interval}"


def show(comparison: Path | str, page: Path | str, console: Console) -> None:
    """Print verdicts, next steps and the page's path."""
    rows, manifest = read(comparison)
    details = manifest["arms"]
    console.print()
    console.print(table(rows))
    for series in manifest.get("under_load", []):
        console.print(Text(f"\nUnder load, {series['label']}: {series['crossing']}"), soft_wrap=True)
        console.print(load_table(series["points"]))
    steps: dict[str, list[str]] = {}
    for row in rows:
        for step in next_steps(row, details.get(row["arm"], {})):
            steps.setdefault(step, []).append(row["arm"])
    if steps:
        console.print("\nWhat to try next")
    for step, arms in steps.items():
        console.print(Text(f"- {', '.join(arms)}: {step}"), soft_wrap=True)
    console.print(Text(f"\nThe page: {page}"), soft_wrap=True)
