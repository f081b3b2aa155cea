"""Tiny drafters and targets of each family, good by construction; tests plant one fault each.

drafter, target = good(tmp_path, "llama")
edit_config(drafter, rope_theta=10000.0)
edit_tensors(drafter, lambda tensors: tensors.pop("fc.weight"))
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

HIDDEN, INNER, HEADS, KV, HEAD_DIM, LAYERS, VOCAB, DRAFT_VOCAB, EOS = 32, 48, 4, 2, 8, 12, 96, 24, 2
FAMILIES = ("llama", "qwen3", "deepseek", "kimi", "gpt-oss")
MLA = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
TARGETS = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "deepseek": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "kimi": ("KimiK25ForConditionalGeneration", "kimi_k25"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
}
# Kimi-K2.x scales its positions; so do the drafters for it.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def rope(family: str, theta: float) -> dict:
    """The RoPE keys in both spellings."""
    scaling = YARN if family in ("deepseek", "kimi") else {"rope_type": "default"}
    keys = {"rope_theta": theta, "rope_parameters": {**scaling, "rope_theta": theta}}
    return keys | ({"rope_scaling": dict(YARN)} if scaling is YARN else {})


def write_json(path: Path, content) -> None:
    path.write_text(json.dumps(content))


def good_target(folder: Path, family: str, theta: float = 50000.0) -> Path:
    """A target's config.json, tokenizer.json and embeddings."""
    folder.mkdir(parents=True)
    architecture, model_type = TARGETS[family]
    config = {
        "model_type": "kimi_k2" if family == "kimi" else model_type, "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "eos_token_id": EOS,
        **rope(family, theta), **(MLA if family in ("deepseek", "kimi") else {}),
    }  # fmt: skip
    if family == "kimi":
        config = {"model_type": "kimi_k25", "text_config": config}
    write_json(folder / "config.json", {"architectures": [architecture], **config})
    vocab = {f"token{i}": i for i in range(VOCAB)}
    write_json(
        folder / "tokenizer.json", {"model": {"vocab": vocab}, "added_tokens": [{"content": "<end>", "id": EOS}]}
    )
    embeddings = np.random.default_rng(0).normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    save_file({"model.embed_tokens.weight": embeddings}, folder / "model.safetensors")
    return folder


def drafter_tensors(mla: bool = False, layers: int = 3, draft_vocab: int = DRAFT_VOCAB) -> dict[str, np.ndarray]:
    """The tensors that our exporter writes, float32."""
    rng = np.random.default_rng(1)
    shapes = {
        "fc.weight": (HIDDEN, layers * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.mlp.gate_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": (INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, INNER),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (draft_vocab, HIDDEN),
    }
    attention = {
        "q_proj": (HEADS * HEAD_DIM, 2 * HIDDEN), "k_proj": (KV * HEAD_DIM, 2 * HIDDEN),
        "v_proj": (KV * HEAD_DIM, 2 * HIDDEN), "o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }  # fmt: skip
    if mla:
        q, kv, nope, pe, v = MLA.values()
        attention = {
            "q_a_proj": (q, 2 * HIDDEN), "q_a_layernorm": (q,), "q_b_proj": (HEADS * (nope + pe), q),
            "kv_a_proj_with_mqa": (kv + pe, 2 * HIDDEN), "kv_a_layernorm": (kv,),
            "kv_b_proj": (HEADS * (nope + v), kv), "o_proj": (HIDDEN, HEADS * v),
        }  # fmt: skip
    shapes |= {f"midlayer.self_attn.{name}.weight": shape for name, shape in attention.items()}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if draft_vocab < VOCAB:
        ids = draft_ids(draft_vocab)
        kept = np.zeros(VOCAB, np.bool_)
        kept[ids] = True
        tensors |= {"d2t": ids - np.arange(draft_vocab), "t2d": kept}
    return tensors


def draft_ids(size: int = DRAFT_VOCAB) -> np.ndarray:
    """The target ids of the draft vocabulary, EOS in."""
    rest = np.setdiff1d(np.arange(VOCAB), [EOS])
    return np.sort(np.append(np.random.default_rng(2).choice(rest, size - 1, replace=False), EOS)).astype(np.int64)


def good_drafter(folder: Path, family: str, theta: float = 50000.0, **tensor_options) -> Path:
    """A drafter as our exporter writes it for the default layers, with a manifest."""
    folder.mkdir(parents=True)
    mla = family in ("deepseek", "kimi")
    config = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if mla else "LlamaForCausalLMEagle3"],
        "model_type": "deepseek_v2" if mla else "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": HEAD_DIM, "num_hidden_layers": 1,
        "vocab_size": VOCAB, "draft_vocab_size": tensor_options.get("draft_vocab", DRAFT_VOCAB),
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
        **rope(family, theta), **(MLA if mla else {}),
    }  # fmt: skip
    write_json(folder / "config.json", config)
    save_file(drafter_tensors(mla, **tensor_options), folder / "model.safetensors")
    n = LAYERS
    parameters = {"layers": [2, n // 2, n - 3], "rope_theta": theta, "norm_flags": {"norm_before_fc": False}}
    write_json(folder / "manifest.json", {"artefact": "drafter", "manifest_version": 1, "parameters": parameters})
    return folder


def good(folder: Path, family: str, **options) -> tuple[Path, Path]:
    """(drafter, target) of a family."""
    return good_drafter(folder / "drafter", family, **options), good_target(folder / "target", family)


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes) -> None:
    """Change keys of a config.json."""
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    for key in remove:
        config.pop(key, None)
    write_json(folder / "config.json", config)


def edit_manifest(folder: Path, **changes) -> None:
    """Change parameters of a manifest; None removes one."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parameters"].update(changes)
    manifest["parameters"] = {k: v for k, v in manifest["parameters"].items() if v is not None}
    write_json(folder / "manifest.json", manifest)


def edit_tensors(folder: Path, change) -> None:
    """Change the dict of tensors in place, or return a new one."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")


def rename(tensors: dict, old: str, new: str) -> dict:
    """Every name with `old` in it renamed."""
    return {name.replace(old, new): value for name, value in tensors.items()}
