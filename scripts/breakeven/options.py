"""Command-line options that several scripts read alike."""

from collections.abc import Sequence
from pathlib import Path

from breakeven.cli import UserError


def pairs(option: str, items: Sequence[str]) -> dict[str, Path]:
    """NAME=FILE arguments as a mapping; a UserError for another form and for a name given twice."""
    found = {}
    for item in items:
        name, separator, path = item.partition("=")
        if not (name and separator and path):
            raise UserError(
                f"{option} {item}: write NAME=FILE, NAME an arm, a drafter, an engine or a number of samples"
            )
        if name in found:
            raise UserError(f"{option}: {name} is given twice, as {found[name]} and {path}; each name once")
        found[name] = Path(path)
    return found
