"""What a run found, in a terminal: the verdicts, where the page is, what to try next."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from breakeven import artefacts, tables

COLOURS = {"faster": "green", "slower": "red", "refused": "magenta", "undecided": "yellow"}


def read(comparison: Path | str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of the summary, its manifest)."""
    rows = artefacts.read_table(Path(comparison) / "summary.parquet", tables.SUMMARY).to_pylist()
    manifest = artefacts.read_manifest(Path(comparison) / "summary.manifest.json", "comparison")
    return rows, manifest


def next_steps(row: Mapping[str, Any], details: Mapping[str, Any]) -> list[str]:
    """What to try for an arm, from its verdict and cause; none where it pays or is a baseline."""
    cause, fault = row["cause"] or "", row["fault"]
    steps = []
    if "integration" in cause or (cause == "mixed" and fault):
        named = f" ({fault})" if fault else ""
        steps.append(
            f"integration{named}: python scripts/check_drafter.py --checkpoint FOLDER --target results/target"
            f" --engine {row['engine']}; docs/checks.md says how to mend what it finds"
        )
    if cause in ("training", "mixed"):
        steps.append(
            "training: more data may pay; name samples under data_curve in the config and run snakemake data_curve, or"
            " raise prompts.size"
        )
    if cause in ("cost", "mixed"):
        best = next((line for line in details.get("pay") or [] if line["change"] == "K"), None)
        if best and best["needed"].isdigit() and best["needed"] != best["now"]:
            steps.append(f"cost: an arm with k: {best['needed']} ({best['note']})")
        steps.append("cost: snakemake step_cost shows rho at each K; a smaller draft vocabulary makes steps cheaper")
    if row["verdict"] == "undecided" and not cause:
        steps.append("undecided: more prompts, or max_passes in the protocol")
    if row["verdict"] == "refused" and not steps:
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
