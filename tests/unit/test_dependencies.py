"""The modules a script imports are found, so that rules rerun when one of them changes."""

import shutil
from pathlib import Path

import pytest

from breakeven import dependencies

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(p.stem for p in (ROOT / "scripts").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_comes_first_and_every_file_exists(name):
    found = dependencies.files(ROOT, f"scripts/{name}.py")
    assert found[0] == f"scripts/{name}.py" and len(found) == len(set(found))
    assert all((ROOT / path).is_file() for path in found)


def test_indirect_imports_and_imports_in_functions_count():
    found = dependencies.files(ROOT, "scripts/train_drafter.py")
    assert "scripts/breakeven/drafter.py" in found and "scripts/breakeven/training.py" in found
    assert "scripts/breakeven/wheels.py" not in found and "scripts/breakeven/prompts.py" not in found
    assert "scripts/breakeven/chat.py" in dependencies.files(ROOT, "scripts/build_vocabulary.py")


def test_stages_do_not_depend_on_what_they_do_not_use():
    benchmark = dependencies.files(ROOT, "scripts/benchmark.py")
    assert not {"prompts", "training", "drafter", "comparison"} & {Path(p).stem for p in benchmark}
    curation = {Path(p).stem for p in dependencies.files(ROOT, "scripts/curate_prompts.py")}
    assert not {"benchmark", "engines", "drafter", "comparison"} & curation


def test_modules_loaded_by_name_are_added_with_their_imports(tmp_path):
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "scripts/breakeven/engines/extra.py").write_text("from breakeven import stats\n")
    found = dependencies.files(tmp_path, "scripts/benchmark.py", "scripts/breakeven/engines/extra.py")
    assert {"scripts/breakeven/engines/extra.py", "scripts/breakeven/stats.py"} <= set(found)
