"""Shards that do not belong here: copied from another target, chat template or seed, or left over from an earlier run.

Snakemake compares files with what it recorded when it made them; a shard that came from elsewhere has no such record. The
manifests say what each shard was made from, so the stage that reads shards follows them back to the pool and the target.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from breakeven import artefacts
from breakeven.cli import UserError

NO_MATTER = ("start", "settings")  # of the responses: a shard's own place, and how fast the engine was let run


def check_chain(target: Path, shards: Iterable[Path]) -> None:
    """Raise a UserError that names the first shard (hidden states or responses) that is not of this target and pool.

    Response shards and the pool are looked for where the workflow puts them, beside the folder of the shards; what is not
    there (hidden states that were handed over alone) is not checked.
    """
    wanted = artefacts.sha256(target / "manifest.json")
    responses = {}
    for path in shards:
        manifest = artefacts.read_json(artefacts.manifest_path(path))
        _same_target(path, manifest, wanted, target)
        if manifest["artefact"] == "hidden_states":
            source = path.parents[1] / "responses" / f"{path.stem}.parquet"
            if not artefacts.manifest_path(source).is_file():
                continue
            there = artefacts.read_manifest(artefacts.manifest_path(source), "responses")
            if manifest["inputs"]["responses"] != there["files"].get(source.name):
                raise UserError(f"{path}: made from other responses than {source}; {_remedy(path)}")
            _same_target(source, there, wanted, target)
            path, manifest = source, there
        responses[path] = manifest
    if responses:
        _same_pool(responses)
        _same_parameters(responses)


def _remedy(path: Path) -> str:
    return f"delete it and {artefacts.manifest_path(path).name} and run the workflow again"


def _same_target(path: Path, manifest: dict[str, Any], wanted: str, target: Path) -> None:
    if manifest["inputs"]["target"] != wanted:
        raise UserError(f"{path}: made from another target or chat template than {target}; {_remedy(path)}")


def _same_pool(responses: dict[Path, dict[str, Any]]) -> None:
    pools = {path: manifest["inputs"]["pool"] for path, manifest in responses.items()}
    pool = next(iter(responses)).parents[1] / "prompts" / "pool.parquet"
    if artefacts.manifest_path(pool).is_file():
        outputs = artefacts.read_manifest(artefacts.manifest_path(pool), "prompts")["outputs"]
        wanted, whose = outputs[pool.name], f"than {pool}"
    else:
        wanted, whose = Counter(pools.values()).most_common(1)[0][0], "than most shards"
    for path, found in pools.items():
        if found != wanted:
            raise UserError(
                f"{path}: made from another pool of prompts (seed, sources or filters) {whose}; {_remedy(path)}"
            )


def _same_parameters(responses: dict[Path, dict[str, Any]]) -> None:
    for path, manifest in responses.items():
        start = manifest["parameters"]["start"]
        if path.stem.removeprefix("shard-") != f"{start:06d}":
            raise UserError(f"{path}: holds the prompts from rank {start}, another shard's; {_remedy(path)}")
    keys = {key for manifest in responses.values() for key in manifest["parameters"]} - set(NO_MATTER)
    for key in sorted(keys):
        values = {path: json.dumps(m["parameters"].get(key), sort_keys=True) for path, m in responses.items()}
        usual = Counter(values.values()).most_common(1)[0][0]
        for path, value in values.items():
            if value != usual:
                raise UserError(f"{path}: made with {key} {value}, most shards with {usual}; {_remedy(path)}")
