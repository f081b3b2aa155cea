"""docs/field-reports.md says of each report which test covers it; a test that is renamed or removed is noticed here."""

import importlib
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/field-reports.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if re.match(r"\| B\d", line)
]


def test_every_test_that_is_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", TEXT)
    assert len(named) > 70
    for path, name, case in named:
        source = (ROOT / path).read_text()
        assert f"def {name}(" in source, f"{path}::{name}"
        if case:
            assert case in importlib.import_module(Path(path).stem).FAULTS, case


def test_each_report_has_one_row_and_the_counts_are_right():
    ids = [row[0] for row in ROWS]
    assert ids == sorted(set(ids))
    kinds = Counter(row[2] for row in ROWS)
    assert set(kinds) <= {"a test", "cannot happen", "open"}
    said = re.search(
        r"(\d+) of (\d+) have a test .*?, (\d+) cannot happen here by construction, (\d+) (?:is|are)\s+open", TEXT, re.S
    )
    assert [int(n) for n in said.groups()] == [kinds["a test"], len(ROWS), kinds["cannot happen"], kinds["open"]]
    for _, _, kind, how in ROWS:
        assert kind != "a test" or "`tests/" in how
        assert kind == "a test" or how.startswith({"open": "not covered yet: "}.get(kind, kind))
