"""Files that stages hand to each other: Parquet tables, manifests, content hashes, all written whole or not at all.

What is read is what was written: `verify` compares a file with the sha256 that its manifest holds, and a manifest holds
one of itself.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from breakeven import __version__
from breakeven.cli import UserError

MANIFEST_VERSION = 1
OWN_SHA256 = "own_sha256"  # of a JSON object: sha256 of its other keys
_verified: set[tuple[str, int, int]] = set()  # path, mtime, size of what this process has compared


@contextlib.contextmanager
def atomic(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path beside `path` and move it there on success; on an error nothing is left."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        as_any_new_file(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def as_any_new_file(*paths: Path) -> None:
    """Give files the rights that the umask leaves: safetensors (0.8) makes files that nobody but their owner can read."""
    os.umask(mask := os.umask(0o077))
    for path in paths:
        with contextlib.suppress(PermissionError):  # of a file system that has no such rights
            path.chmod(0o666 & ~mask)


def sha256(path: Path | str) -> str:
    """The sha256 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(parameters: Any) -> str:
    """A short hash of JSON-serialisable parameters, for telling whether a partial result belongs to this run."""
    return hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:16]


def write_json(path: Path | str, content: Any) -> None:
    """Write indented JSON with a final newline; keys keep their order. The key own_sha256 is filled in where it stands."""
    if isinstance(content, dict) and OWN_SHA256 in content:
        content = content | {OWN_SHA256: _own_sha256(content)}
    with atomic(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path | str) -> Any:
    """Read a JSON file; a missing or broken one, or one that contradicts its own_sha256, is a UserError that names it."""
    try:
        content = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested without end
        raise UserError(f"{path}: not valid JSON ({error}); write the file again or delete it") from None
    if isinstance(content, dict) and OWN_SHA256 in content and content[OWN_SHA256] != _own_sha256(content):
        raise UserError(
            f"{path}: damaged or edited since it was written: the sha256 of its keys is {_own_sha256(content)}, its"
            f" {OWN_SHA256} says {content[OWN_SHA256]}; delete it and run the workflow again, or restore it from a copy"
        )
    return content


def _own_sha256(content: dict[str, Any]) -> str:
    others = {key: value for key, value in content.items() if key != OWN_SHA256}
    # Through JSON and back, since keys that are numbers sort otherwise once they are texts.
    return hashlib.sha256(json.dumps(json.loads(json.dumps(others)), sort_keys=True).encode()).hexdigest()


def hashes(*paths: Path | str) -> dict[str, str]:
    """The sha256 of files by name, as a manifest in their folder holds them under `files`."""
    return {Path(path).name: sha256(path) for path in paths}


def verify(path: Path | str) -> None:
    """Compare a file with the sha256 that its manifest holds; once for each file in a process.

    The manifest is the one beside the file or its folder's. A file that none names passes: it is not of this workflow. A
    difference is a UserError with both sums. Costs one reading at the speed of sha256 (docs/faults.md).
    """
    path = Path(path)
    try:
        stat = path.stat()
    except OSError:
        return  # whoever reads it says so
    key = (str(path.absolute()), stat.st_mtime_ns, stat.st_size)
    if key in _verified:
        return
    found = _listed(path)
    if found:
        manifest, expected = found
        actual = sha256(path)
        if actual != expected:
            raise UserError(
                f"{path}: damaged or changed since it was written: its sha256 is {actual}, {manifest} says {expected};"
                " delete it and run the workflow again, or restore it from a copy"
            )
    _verified.add(key)


def _listed(path: Path) -> tuple[Path, str] | None:
    """(manifest, sha256) of the first manifest that names a file: its own, its folder's, else another one beside it."""
    own = manifest_path(path)
    beside = [own] if own.is_file() else sorted(path.parent.glob("*.manifest.json"))
    for manifest in [*beside, path.parent / "manifest.json"]:
        expected = _files(manifest).get(path.name) if manifest != path else None
        if expected:
            return manifest, expected
    # A fetched drafter's manifest stands above its folder.
    manifest = path.parent.parent / "manifest.json"
    expected = _files(manifest, "published_drafter").get(path.name)
    return (manifest, expected) if expected else None


def _files(manifest: Path, artefact: str | None = None) -> dict[str, str]:
    content = read_json(manifest) if manifest.is_file() else {}
    if not isinstance(content, dict) or artefact not in (None, content.get("artefact")):
        return {}
    return content.get("files") or content.get("outputs") or {}


def verify_all(paths: Iterable[Path | str]) -> None:
    """`verify` many files, as many at once as there are cores: sums of large files are computed without Python's lock."""
    with ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        list(pool.map(verify, paths))


def verify_folder(folder: Path | str) -> None:
    """`verify` each file of a checkpoint folder, before another program reads them."""
    verify_all(path for path in sorted(Path(folder).iterdir()) if path.is_file() and path.name != "manifest.json")


@contextlib.contextmanager
def open_tensors(path: Path | str) -> Iterator[Any]:
    """A safetensors file for torch, as safe_open gives it; one that cannot be read is a UserError that names it."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, "pt")
    except SafetensorError as error:
        verify(path)  # says more, where a manifest knows the file
        raise UserError(f"{path}: not a readable safetensors file ({error}); copy or export it again") from None
    with file:
        yield file


def write_manifest(
    path: Path | str,
    artefact: str,
    *,
    parameters: Mapping[str, Any],
    inputs: Mapping[str, Path | str] | None = None,
    counts: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Write an artefact's manifest and return it.

    `inputs` maps a name to a file whose sha256 is recorded; for an artefact of a former stage name its manifest, which
    holds the content hashes. `counts`, where it has the keys in, kept and rejected, must add up: in = kept + rejected,
    with `rejected` a count by reason. Nothing volatile (times, ports, paths of this machine) belongs into a manifest,
    since its checksum decides what runs again.
    """
    if counts and {"in", "kept", "rejected"} <= set(counts):
        total = counts["kept"] + sum(counts["rejected"].values())
        if counts["in"] != total:
            raise AssertionError(f"{path}: {counts['in']} in, but kept + rejected = {total}")
    manifest = {
        "artefact": artefact,
        "manifest_version": MANIFEST_VERSION,
        "breakeven": __version__,
        "parameters": dict(parameters),
        "inputs": {name: sha256(file) for name, file in (inputs or {}).items()},
        "counts": dict(counts or {}),
        "versions": dict(versions or {}),
        **more,
        OWN_SHA256: "",
    }
    write_json(path, manifest)
    return manifest


def read_manifest(path: Path | str, artefact: str) -> dict[str, Any]:
    """Read a manifest and check that it belongs to `artefact` and to this version of the layout."""
    manifest = read_json(path)
    found = manifest.get("artefact") if isinstance(manifest, dict) else None
    if found != artefact:
        raise UserError(f"{path}: this is the manifest of {found!r}, but one of {artefact!r} is needed here")
    if manifest["manifest_version"] != MANIFEST_VERSION:
        raise UserError(
            f"{path}: manifest version {manifest['manifest_version']}, this code reads {MANIFEST_VERSION};"
            " delete the folder and run the workflow again"
        )
    return manifest


def manifest_path(data: Path | str) -> Path:
    """The manifest beside a data file: `shard-000000.parquet` has `shard-000000.manifest.json`."""
    data = Path(data)
    return data.with_name(data.name.split(".")[0] + ".manifest.json")


def write_table(path: Path | str, rows, schema) -> None:
    """Write a list of row dicts, or a pyarrow Table, as Parquet (zstd) in exactly `schema`; atomic."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows, schema=schema) if isinstance(rows, list) else rows.cast(schema)
    with atomic(path) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def read_table(path: Path | str, schema=None):
    """Read a Parquet file as a pyarrow Table; with `schema`, a missing column is a UserError that names it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    verify(path)
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None
    if schema is not None:
        missing = [name for name in schema.names if name not in table.column_names]
        if missing:
            raise UserError(f"{path}: column {missing[0]!r} is missing; it has {', '.join(table.column_names)}")
        table = table.select(schema.names).cast(schema)
    return table
