"""Seeds of the fault harness, and the table that it writes."""

import csv
import os
from collections import Counter
from pathlib import Path

import pytest

import harness

# Ten that take two minutes together: every way of dying, a full disk, damage, and Snakemake around one.
CI = (57, 64, 41, 79, 71, 58, 43, 46, 12, 56)
OUTCOMES: list[harness.Outcome] = []


def pytest_addoption(parser):
    parser.addoption("--seeds", default="0-99", help="nightly faults: numbers and FIRST-LAST, both included, by commas")


def numbers(text: str) -> list[int]:
    """What --seeds names: "7,10-12" is 7, 10, 11, 12."""
    spans = [part.partition("-") for part in text.split(",")]
    return [seed for first, _, last in spans for seed in range(int(first), int(last or first) + 1)]


def pytest_generate_tests(metafunc):
    if "nightly_seed" in metafunc.fixturenames:
        asked = "nightly" in (metafunc.config.option.markexpr or "")
        seeds = numbers(metafunc.config.getoption("--seeds", "0-99")) if asked else []
        metafunc.parametrize("nightly_seed", seeds, ids=[harness.draw(seed).name for seed in seeds])
    if "ci_seed" in metafunc.fixturenames:
        metafunc.parametrize("ci_seed", CI, ids=[harness.draw(seed).name for seed in CI])


@pytest.fixture(scope="session")
def faults(finished):
    """The finished run with its jobs; results of undisturbed jobs are made when first needed."""
    return harness.Faults(finished, harness.jobs(finished))


@pytest.fixture
def hit(faults, tmp_path):
    """hit(seed): apply the fault of a seed and keep its row of the table."""

    def apply(seed: int) -> None:
        outcome = harness.Outcome(harness.draw(seed))
        OUTCOMES.append(outcome)
        try:
            faults.apply(outcome.fault, tmp_path, outcome)
        except harness.NotPossible as reason:
            outcome.happened = outcome.recovered = f"not made: {reason}"
            pytest.skip(str(reason))
        except BaseException as error:
            outcome.failed = " ".join(str(error).split())[:300] or type(error).__name__
            raise

    return apply


def pytest_sessionfinish(session):
    """Write what became of each seed to BREAKEVEN_FAULT_TABLE: faults.csv, and faults.md with the kinds by stage."""
    if os.environ.get("BREAKEVEN_FAULT_TABLE") and OUTCOMES:
        write_table(Path(os.environ["BREAKEVEN_FAULT_TABLE"]))


def write_table(folder: Path) -> None:
    """Rows of this session join those of earlier ones; a seed that ran again replaces its row."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    if (folder / "faults.csv").is_file():
        with open(folder / "faults.csv", newline="") as file:
            rows = {row["seed"]: row for row in csv.DictReader(file)}
    rows |= {str(outcome.fault.seed): outcome.row() for outcome in OUTCOMES}
    ordered = sorted(rows.values(), key=lambda row: int(row["seed"]))
    with open(folder / "faults.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(ordered[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)
    (folder / "faults.md").write_text(summary(ordered))


def summary(rows: list[dict[str, str]]) -> str:
    """The table of kinds by stage: seeds, and how many of them held."""
    seeds, held = Counter(), Counter()
    for row in rows:
        key = (row["how"], row["stage"], row["kind"])
        seeds[key] += 1
        held[key] += row["outcome"] == "held"
    lines = [
        f"{len(rows)} seeds, {sum(held.values())} held.",
        "",
        "| run by | stage | kind | seeds | held |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {how} | {stage} | {kind} | {n} | {held[how, stage, kind]} |"
        for (how, stage, kind), n in sorted(seeds.items())
    ]
    return "\n".join(lines) + "\n"
