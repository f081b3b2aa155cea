"""Which library modules a script imports, so that a rule can name them as inputs and rerun when one changes."""

import ast
from functools import cache
from pathlib import Path


def files(root: Path | str, script: str, *modules: str) -> list[str]:
    """The script, then every module of the library that it imports, directly or not, as paths relative to `root`.

    `modules` are further files that the script loads by name (engine modules). Imports inside functions count too.
    """
    root = Path(root)
    library = root / "scripts" / "breakeven"
    found: dict[str, None] = {}
    queue = [script, *modules]
    while queue:
        path = queue.pop(0)
        if path not in found:
            found[path] = None
            queue += [p.relative_to(root).as_posix() for p in _imports(root / path, library)]
    return [script, *sorted(set(found) - {script})]


@cache
def _imports(path: Path, library: Path) -> tuple[Path, ...]:
    """Library modules that one file imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    found = set()
    for name in names:
        parts = name.split(".")
        if parts[0] != "breakeven":
            continue
        # Importing a.b.c runs the packages a and a.b too.
        for length in range(1, len(parts) + 1):
            base = library.joinpath(*parts[1:length])
            found.update(p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file())
    return tuple(sorted(found))
