"""Options that several scripts read alike."""

from pathlib import Path

import pytest

from breakeven import options
from breakeven.cli import UserError


def test_each_name_has_one_file():
    assert options.pairs("--offline", ["a=x", "b=x=y"]) == {"a": Path("x"), "b": Path("x=y")}
    for items, said in (
        (["a=x", "a=y"], "--offline: a is given twice, as x and y"),
        (["a"], "--offline a: write NAME"),
    ):
        with pytest.raises(UserError, match=said):
            options.pairs("--offline", items)
