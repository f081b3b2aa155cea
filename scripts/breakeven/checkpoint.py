"""Drafter checkpoints: what vLLM and SGLang load, written and read back."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from breakeven import artefacts, configs, target
from breakeven.cli import UserError
from breakeven.conventions import NEWEST, captured, export_ids, family, written_ids
from breakeven.drafter import Drafter, DrafterConfig
from breakeven.mla import LatentShape
from breakeven.vocabulary import target_ids

FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
# What an engine never takes from the target's config for a drafter that does not state it.
OWN = ("head_dim", "rope_theta", "rope_scaling", "rope_parameters", *(field.name for field in fields(LatentShape)))


def engine_config(drafter: DrafterConfig, target_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json that both engines read right.

    RoPE stands in both spellings (transformers 5 reads `rope_parameters`, older loaders `rope_theta`); layer ids are
    written only where they differ from the default layers, in each engine's own convention (docs/design.md, section 5).
    """
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_attention_heads": drafter.num_attention_heads,
        "num_key_value_heads": drafter.num_key_value_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": drafter.vocab_size,
        "draft_vocab_size": drafter.draft_vocab_size,
        "rms_norm_eps": drafter.rms_norm_eps,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": drafter.rope_scaling,
        "rope_parameters": {"rope_type": "default", **(drafter.rope_scaling or {}), "rope_theta": drafter.rope_theta},
        "max_position_embeddings": drafter.max_position_embeddings,
        "hidden_act": drafter.hidden_act,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": target_config.get("bos_token_id"),
        "eos_token_id": target_config.get("eos_token_id"),
    }
    if drafter.mla:
        # vLLM takes model_type deepseek_v3 for DeepSeek's own multi-token prediction and rewrites the architecture.
        config |= {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "rope_interleave": True,
        }
        config |= asdict(drafter.mla)
        del config["head_dim"]
    config |= {flag: True for flag in (*FLAGS, "fc_norm") if getattr(drafter, flag)}
    return config | export_ids(drafter.layers, family(target_config), target_config["num_hidden_layers"])


def save(
    folder: Path,
    drafter: Drafter,
    d2t: np.ndarray,
    t2d: np.ndarray,
    target_config: dict[str, Any],
    dtype=torch.bfloat16,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write config.json and model.safetensors into `folder`, which must exist.

    Embeddings are not written: both engines share the target's, and a copy could only differ from it.
    weights: the drafter's, where it does not hold them whole itself.
    """
    tensors = {
        name: tensor.detach().to("cpu", dtype).contiguous()
        for name, tensor in (weights or drafter.state_dict()).items()
        if not name.startswith(("embed_tokens", "rotary."))
    }
    tensors |= {"d2t": torch.from_numpy(d2t.copy()), "t2d": torch.from_numpy(t2d.copy())}
    with artefacts.atomic(folder / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    artefacts.write_json(folder / "config.json", engine_config(drafter.config, target_config))


def read_config(folder: Path, target_folder: Path) -> DrafterConfig:
    """The drafter's shape from its config.json; layers from the manifest where there is one, else from the config.

    A config in the speculators format is read as vLLM reads it. Raises UserError where the checkpoint is no EAGLE-3
    drafter with the attention of Llama or MLA.
    """
    config = artefacts.read_json(folder / "config.json")
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise UserError(
            f"{folder}: speculators_model_type {kind} cannot be evaluated offline, eagle3 can (arms of the benchmark can"
            " still serve it)"
        )
    if kind:
        config = configs.from_speculators(config)
    architecture = (config.get("architectures") or ["none"])[0]
    if "Eagle3" not in architecture:
        raise UserError(
            f"{folder}: architecture {architecture} cannot be evaluated offline; LlamaForCausalLMEagle3 and"
            " Eagle3DeepseekV2ForCausalLM can (arms of the benchmark can still serve it)"
        )
    target_config = target.text_config(target_folder)
    stated = {key: value for key, value in target_config.items() if key not in OWN} | config
    shape = DrafterConfig.from_target(stated, config.get("draft_vocab_size") or config["vocab_size"], [])
    shape.layers = layers(folder, config, target_config)
    nested = config.get("eagle_config") or {}
    # Read as vLLM reads them: norm_before_fc may stand in eagle_config, the others stand at the top level only.
    shape.norm_before_fc = bool(nested.get("norm_before_fc", config.get("norm_before_fc", False)))
    shape.norm_before_residual = bool(config.get("norm_before_residual", False))
    shape.norm_output = bool(config.get("norm_output", False))
    shape.fc_norm = bool(config.get("fc_norm", False))
    return shape


def layers(folder: Path, config: dict[str, Any], target_config: dict[str, Any]) -> list[int]:
    """The physical layers a checkpoint was trained on: its manifest's, else what the ids in its config say.

    Ids that vLLM reads are taken as vLLM takes them, those in eagle_config alone, and none, as SGLang does.
    """
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return artefacts.read_manifest(manifest, "drafter")["parameters"]["layers"]
    engine = "vllm" if written_ids("vllm", NEWEST["vllm"], config) else "sglang"
    return captured(engine, NEWEST[engine], family(target_config), config, target_config["num_hidden_layers"])


def load(folder: Path, target_folder: Path, device: str) -> tuple[Drafter, Tensor]:
    """Load a checkpoint for offline use: (drafter in float32, target ids [D] int64 of its draft vocabulary)."""
    artefacts.verify_folder(folder)
    shape = read_config(folder, target_folder)
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with artefacts.open_tensors(path) as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    d2t = tensors.pop("d2t", None)
    tensors.pop("t2d", None)
    tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    name = "model.embed_tokens.weight"
    embeddings = tensors.pop("embed_tokens.weight", None)
    if embeddings is None:
        embeddings = target.load_tensors(target_folder, [name])[name]
    drafter = Drafter(shape, embeddings)
    try:
        drafter.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise UserError(f"{folder}: {' '.join(str(error).split())}; run scripts/check_drafter.py on it") from None
    if d2t is None and shape.draft_vocab_size < shape.vocab_size:
        raise UserError(
            f"{folder}: the head has {shape.draft_vocab_size} of {shape.vocab_size} tokens but there is no d2t;"
            " export the checkpoint with its vocabulary map"
        )
    offsets = np.zeros(shape.draft_vocab_size, dtype=np.int64) if d2t is None else d2t.numpy()
    ids = torch.from_numpy(target_ids(offsets))
    if ids.min() < 0 or ids.max() >= shape.vocab_size:
        raise UserError(f"{folder}: d2t points outside the vocabulary of {shape.vocab_size}; it must hold offsets")
    return drafter.to(device).eval().requires_grad_(False), ids.to(device)
