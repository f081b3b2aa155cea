"""What a layer id means: which hidden states each engine and version captures for a drafter's config.json.

A physical tensor is named by its position in the target: k is the *input of layer k* (HF `hidden_states[k]`), 0 is the
embedding output, N is the output of the last layer before the final norm. Ids in a config.json are conventions on top of
that, and the engines differ. Every rule below was read from the released package whose version stands beside it; a
version between two that were read follows the older one. Pure Python: no engine and no torch is imported.

Both engines test membership ("is this layer in the set?") while they walk the layers, so what reaches `fc` is always
in ascending order and without repeats, whatever the order in the config.
"""

from breakeven.cli import UserError

ENGINES = ("vllm", "sglang")
NEWEST = {"vllm": "0.32.0", "sglang": "0.5.23"}  # the newest release of each engine that was read
OLDEST = {"vllm": "0.20.2", "sglang": "0.5.5"}
# Whose rules for layer ids a target follows; Qwen and most others follow Llama's. This says nothing of its attention.
FAMILIES = ("llama", "deepseek", "gpt-oss", "minimax-m3-vl")
# SGLang runs these with DeepSeek's class or a copy of its rule (glm4_moe_lite.py, glm4_moe.py, mistral_large_3.py).
DEEPSEEK_TYPES = ("deepseek", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa")
DEEPSEEK_CLASSES = ("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM")

# First version in which each thing is so; read in that version and in the newest older one named behind it.
SINCE = {
    ("vllm", "eagle_config ids"): "0.22.0",  # V1 runner falls back to eagle_config; 0.21.0: top-level key only
    ("vllm", "eagle_config.layer_ids"): "0.27.0",  # V2 runner, eagle3_utils.py; 0.26.0: top-level key only
    ("vllm", "last layer, deepseek"): "0.25.1",  # deepseek_v2.py captures id N; 0.24.0: loop over layers only
    ("vllm", "v2 runner for all"): "0.29.0",  # config/vllm.py use_v2_model_runner; 0.28.0: by architecture
    ("vllm", "number of features"): "0.22.0",  # fc width from the config; 0.21.0: always 3
    ("sglang", "deepseek as written"): "0.5.13",  # deepseek_v2.py: +1 only if ids[0] == 1; 0.5.12: always +1
    ("sglang", "gpt-oss last layer"): "0.5.17",  # gpt_oss.py: as written if max(ids) == N; 0.5.16: always +1
    ("sglang", "number of features"): "0.5.12",  # llama_eagle3.py fc width from the config; 0.5.11: always 3
}


def parse_version(text: str) -> tuple[int, ...]:
    """`0.5.12.post1` -> (0, 5, 12): the leading numbers; a UserError where there are none."""
    numbers = []
    for part in str(text).strip().lstrip("v").split("+")[0].split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    if len(numbers) < 2:
        raise UserError(f"engine version {text!r} is not a version number; write it like 0.32.0")
    return tuple(numbers)


def since(engine: str, version: str, thing: str) -> bool:
    """Whether `thing` (a key of SINCE) is so in this version of the engine."""
    return parse_version(version) >= parse_version(SINCE[engine, thing])


def text_config(config: dict) -> dict:
    """The language model's part of a target's config.json (multimodal targets such as Kimi-K2.5 nest it)."""
    for key in ("text_config", "language_config", "llm_config"):
        if isinstance(config.get(key), dict):
            names = config.get("architectures") or config[key].get("architectures")
            return config[key] | ({"architectures": names} if names else {})
    return config


def family(target_config: dict) -> str:
    """Which of FAMILIES a target's layer ids follow, from its architecture and model_type."""
    config = text_config(target_config)
    model_type, name = str(config.get("model_type", "")), (config.get("architectures") or [""])[0]
    if model_type.startswith(DEEPSEEK_TYPES) or name in DEEPSEEK_CLASSES:
        return "deepseek"
    if name == "MiniMaxM3SparseForConditionalGeneration":
        return "minimax-m3-vl"
    if model_type.startswith("gpt_oss"):
        return "gpt-oss"
    return "llama"


def default_layers(n_layers: int) -> list[int]:
    """The features engines take where the config names none (captured has the exception): inputs of 2, N // 2, N - 3."""
    return [2, n_layers // 2, n_layers - 3]


def layers_option(text: str, n_layers: int) -> list[int]:
    """Layers as scripts take them, 'default' or '2,15,27' (ascending, since engines feed them so); else a UserError."""
    if text == "default":
        return default_layers(n_layers)
    try:
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--layers: {text!r} is not 'default' or a list like 2,15,27") from None
    if layers != sorted(set(layers)):
        raise UserError(f"--layers: {text} must ascend without repetition; engines feed them in ascending order")
    return layers


def default_runner(version: str) -> str:
    """The model runner vLLM picks on a GPU with Triton: "v1" | "v2" (VLLM_USE_V2_MODEL_RUNNER overrides it).

    Between 0.22.0 and 0.28.0 it depends on the target's architecture, and without Triton (installed.without_triton) it
    is v1.
    """
    return "v2" if since("vllm", version, "v2 runner for all") else "v1"


def written_ids(engine: str, version: str, config: dict, runner: str | None = None) -> list[int] | None:
    """The ids in a drafter's config.json that the engine reads, as written; None where it falls back to its default.

    vLLM reads the top-level key (all versions read), then `eagle_config` (V1 runner since 0.22.0) or
    `eagle_config.layer_ids` (V2 runner, 0.27.0 and later). SGLang reads `eagle_config` alone (0.5.5 to 0.5.23).
    """
    nested = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    ids = None
    if engine == "sglang":
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
        return list(ids) if ids is not None else None
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids and (runner or default_runner(version)) == "v2":
        ids = nested.get("layer_ids") if since("vllm", version, "eagle_config.layer_ids") else None
    elif not ids and since("vllm", version, "eagle_config ids"):
        ids = nested.get("eagle_aux_hidden_state_layer_ids")
    return list(ids) if ids else None


def captured(
    engine: str, version: str, family: str, config: dict, n_layers: int, runner: str | None = None
) -> list[int]:
    """The physical tensors the engine captures, in the order in which it feeds them to `fc`.

    `config` is the drafter's config.json, `n_layers` the target's layer count, `runner` vLLM's model runner ("v1" |
    "v2"; None: the default on a GPU). Ids that the engine never reaches are left out, as it leaves them out.

    vLLM (0.20.2 to 0.32.0, `interfaces.py`, the targets' `forward`): id k is the input of layer k; N counts, for
    DeepSeek from 0.25.1. SGLang (`set_eagle3_layers_to_capture`): Llama, Qwen: id + 1. DeepSeek: id + 1 up to 0.5.12,
    then as written unless the first id is 1. gpt-oss: id + 1, as written from 0.5.17 if the largest id is N. MiniMax-M3
    with vision (minimax_m3_vl.py): id + 1, and 1 more than elsewhere where no ids are written. The last layer's output is
    reached for gpt-oss only.
    """
    ids = written_ids(engine, version, config, runner)
    if ids is None:
        shift = int((engine, family) == ("sglang", "minimax-m3-vl"))
        return [k + shift for k in default_layers(n_layers)]
    last_reached = True
    if engine == "vllm":
        last_reached = family != "deepseek" or since("vllm", version, "last layer, deepseek")
    else:
        as_written = False
        if family == "deepseek":
            as_written = since("sglang", version, "deepseek as written") and bool(ids) and ids[0] != 1
        if family == "gpt-oss" and since("sglang", version, "gpt-oss last layer"):
            as_written = bool(ids) and max(ids) == n_layers
        if not as_written:
            ids = [k + 1 for k in ids]
        last_reached = family == "gpt-oss" and since("sglang", version, "gpt-oss last layer")
    return sorted({k for k in ids if 0 <= k < n_layers or (k == n_layers and last_reached)})


def number_of_features(engine: str, version: str, config: dict, mla: bool = False) -> int:
    """How many hidden states the engine builds `fc` for (its input is this times the target's hidden size).

    Read from vLLM llama_eagle3.py, deepseek_eagle3.py, qwen3_eagle3.py and SGLang llama_eagle3.py, kimi_k25_eagle3.py.
    """
    if not since(engine, version, "number of features"):
        return 3
    nested = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    nested_ids = nested.get("eagle_aux_hidden_state_layer_ids")
    top_ids = config.get("eagle_aux_hidden_state_layer_ids")
    if engine == "sglang" and mla:
        ids = nested_ids if nested_ids is not None else top_ids
        return 3 if ids is None else len(ids)
    qwen3 = engine == "vllm" and "Eagle3Qwen3ForCausalLM" in (config.get("architectures") or [])
    for key in (*(("num_aux_layers",) if qwen3 else ()), "num_aux_hidden_states"):
        if config.get(key) is not None:
            return int(config[key])
    if qwen3:
        nested_ids = top_ids or nested_ids
    return len(nested_ids) if nested_ids else 3


def most_draft_tokens(steps: int, topk: int) -> int:
    """The most draft tokens SGLang can select, the root included: a chain, or all candidates of its tree.

    Read from eagle_utils.py, organize_draft_results: topk candidates, then topk * topk in each further step.
    """
    return steps + 1 if topk == 1 else 1 + topk + (steps - 1) * topk * topk


def export_ids(layers: list[int], family: str, n_layers: int) -> dict:
    """The config.json keys from which both engines capture exactly these physical tensors.

    Empty for the default layers where both take them without ids (not for MiniMax-M3 with vision). Otherwise the top-level
    key carries vLLM's convention and `eagle_config` SGLang's. Raises a UserError for layers that SGLang cannot capture: 0
    (older versions add a residual that is not there yet) and, except for gpt-oss, N.
    """
    layers = list(layers)
    if layers != sorted(set(layers)) or not layers or layers[0] < 1 or layers[-1] > n_layers:
        raise UserError(f"layers {layers}: write ascending, distinct numbers between 1 and {n_layers}")
    if layers == default_layers(n_layers) and family != "minimax-m3-vl":
        return {}
    if layers[-1] == n_layers and family != "gpt-oss":
        raise UserError(
            f"layers {layers}: SGLang cannot capture the output of the last layer ({n_layers}) of this family;"
            f" take {n_layers - 1} or less"
        )
    ids = [k - 1 for k in layers]
    if family == "deepseek" and 2 in layers:
        ids.sort(key=lambda k: k != 1)  # a first id of 1 is what makes every version add 1
    elif family == "deepseek":
        ids = sorted(layers, key=lambda k: k == 1)  # as written from 0.5.13, as long as the first id is not 1
    keys = {
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }
    if len(layers) != 3:
        keys["num_aux_hidden_states"] = len(layers)
    return keys
