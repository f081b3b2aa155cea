"""How engines read a drafter's config.json: the speculators format and RoPE in its spellings. No torch is imported."""

from typing import Any


def from_speculators(raw: dict[str, Any]) -> dict[str, Any]:
    """The config vLLM makes of a speculators-format one (transformers_utils/configs/speculators/algos.py, 0.32.0).

    Read for the types eagle3 and peagle; the classes that it names for peagle are those of eagle3 under other names.
    """
    config = dict(raw.get("transformer_layer_config") or {})
    config["draft_vocab_size"] = raw.get("draft_vocab_size")
    for key in ("target_hidden_size", "eagle_aux_hidden_state_layer_ids"):
        if raw.get(key):
            config[key] = raw[key]
    parallel = raw["speculators_model_type"] == "peagle"
    config["norm_before_residual"] = raw.get("norm_before_residual", not parallel)
    for key in ("norm_before_fc", *(() if parallel else ("fc_norm", "norm_output"))):
        config[key] = raw.get(key, False)
    model_type = config.get("model_type", "llama")
    config["architectures"] = [{"qwen3": "Eagle3Qwen3ForCausalLM"}.get(model_type, "Eagle3LlamaForCausalLM")]
    return config


def plain_rope(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A set of RoPE parameters, of the full-attention layers where there is one per kind of layer; {} for none."""
    parameters = parameters or {}
    kinds = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    return dict(kinds.get("full_attention") or next(iter(kinds.values()), parameters))


def scaling_of(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """The scaling in a set of RoPE parameters as {rope_type, ...}, None for the plain rotation."""
    rest = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    kind = parameters.get("rope_type") or parameters.get("type")
    return None if kind in (None, "default") else {"rope_type": kind, **rest}


def rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling) as transformers 5 reads them: a `rope_scaling` that is set takes the place of `rope_parameters`.

    The base is that set's `rope_theta`, else the config's own, else 10,000; scaling is None for the plain rotation.
    """
    parameters = plain_rope(config.get("rope_scaling") or config.get("rope_parameters"))
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0), scaling_of(parameters)
