"""Reading the target checkpoint: its manifest, its config in every spelling, single tensors, the whole model."""

import sys
from pathlib import Path
from typing import Any

from breakeven import artefacts, conventions, machine
from breakeven.cli import UserError


def read_manifest(folder: Path) -> dict[str, Any]:
    """The target's manifest; a folder that fetch_target did not write is a UserError."""
    return artefacts.read_manifest(Path(folder) / "manifest.json", "target")


def text_config(folder: Path | str) -> dict[str, Any]:
    """config.json of the target, or its `text_config` for multi-modal ones (Kimi-K2.5 and others)."""
    artefacts.verify(Path(folder) / "config.json")
    return conventions.text_config(artefacts.read_json(Path(folder) / "config.json"))


def special_token_ids(folder: Path | str) -> list[int]:
    """Ids that a draft vocabulary must hold: end tokens, other specials, and what the chat template writes."""
    from breakeven.chat import load_tokenizer, render

    tokenizer = load_tokenizer(folder)
    ids = set(tokenizer.all_special_ids)
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        if path.is_file():
            config = artefacts.read_json(path)
            end = config.get("text_config", config).get("eos_token_id")
            ids.update(end if isinstance(end, list) else [end] if end is not None else [])
    manifest = read_manifest(Path(folder))
    kwargs = manifest["parameters"]["chat_template_kwargs"]
    ids.update(render(tokenizer, [{"role": "user", "content": ""}], kwargs))
    return sorted(ids)


def _stored(folder: Path | str) -> dict[str, tuple[Path, str]]:
    """Where each tensor of a checkpoint is stored, (file, name there), by its name in the language model alone."""
    where = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with artefacts.open_tensors(path) as file:
            where.update({name.removeprefix("language_model."): (path, name) for name in file.keys()})  # noqa: SIM118
    return where


def load_tensors(folder: Path | str, names: list[str]) -> dict[str, Any]:
    """Read single tensors (torch) from a possibly sharded safetensors checkpoint; a missing or packed one is a UserError.

    Names are those of the language model alone; multi-modal checkpoints (Kimi-K2.5) write `language_model.` before them.
    """
    where, tensors = _stored(folder), {}
    for name in names:
        if name not in where:
            raise UserError(f"{folder}: the checkpoint has no tensor {name}")
        path, stored = where[name]
        artefacts.verify(path)
        with artefacts.open_tensors(path) as file:
            tensors[name] = file.get_tensor(stored)
        if tensors[name].dtype.itemsize == 1:
            raise UserError(
                f"{folder}: {stored} is stored as {tensors[name].dtype}, quantized; take a checkpoint where it is bfloat16,"
                " or initialise_from: scratch or a published drafter, which needs the target's head and embeddings alone"
            )
    return tensors


def load_norm_and_head(folder: Path | str) -> tuple[Any, Any]:
    """The final norm's weight [H] and the output head's [V, H] (the embeddings where they are tied), whatever the prefix."""
    names, chosen = list(_stored(folder)), []
    for endings in (("model.norm.weight",), ("lm_head.weight", "embed_tokens.weight")):
        found = [name for ending in endings for name in names if name.endswith(ending)]
        if not found:
            raise UserError(f"{folder}: the checkpoint has no tensor named ...{endings[0]}")
        chosen.append(found[0])
    tensors = load_tensors(folder, chosen)
    return tensors[chosen[0]], tensors[chosen[1]]


def computes_bfloat16(device: str) -> bool:
    """Whether a device multiplies bfloat16 itself; a CPU that emulates it is several times as fast in float32."""
    return not device.startswith("cpu") or machine.cpu_computes_bfloat16()


def load_model(folder: Path | str, device: str, dtype: str | None = None):
    """The target as a transformers model in evaluation mode, attention by SDPA.

    dtype: that of weights and computation; if not given, bfloat16, or float32 on a CPU that would emulate it.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    artefacts.verify_folder(folder)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    dtype = dtype or ("bfloat16" if computes_bfloat16(device) else "float32")
    options = dict(dtype=getattr(torch, dtype), attn_implementation="sdpa", trust_remote_code=False)
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(
            f"{folder}: this target needs Python code of its own, which is not run here; use a target whose architecture"
            " transformers has"
        ) from None
    return model.to(device).eval().requires_grad_(False)
