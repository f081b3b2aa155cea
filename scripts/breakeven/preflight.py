"""Preflight: would this engine, in this version, serve this drafter on this target as it was trained?

`examine(case)` returns findings; an empty list is a clean bill. It reads config.json files and safetensors headers, scans
values for NaN, and compares a few rows of the embeddings: seconds, no torch, no engine. What each engine does with a
fault was read from its released source (conventions.py names the versions) or measured.
"""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from breakeven import configs, conventions, headers, installed
from breakeven.artefacts import hashes, read_json, write_json
from breakeven.cli import UserError
from breakeven.findings import CHECKS, LEVELS, Finding
from breakeven.headers import Tensor

# First version that honours a norm flag, None: no version read does. Read from llama_eagle3.py and deepseek_eagle3.py
# (vLLM 0.20.2 to 0.32.0), llama_eagle3.py and kimi_k25_eagle3.py (SGLang 0.5.5 to 0.5.23).
NORM_FLAGS = {
    ("vllm", "llama"): {
        "norm_before_residual": "0.20.2", "norm_before_fc": "0.20.2", "fc_norm": "0.22.0", "norm_output": "0.22.0",
    },
    ("vllm", "mla"): {
        "norm_before_residual": "0.20.2", "norm_before_fc": None, "fc_norm": "0.23.0", "norm_output": "0.22.0",
    },
    ("sglang", "llama"): {
        "norm_before_residual": None, "norm_before_fc": "0.5.17", "fc_norm": "0.5.12", "norm_output": "0.5.12",
    },
    ("sglang", "mla"): {
        "norm_before_residual": None, "norm_before_fc": None, "fc_norm": "0.5.12", "norm_output": "0.5.12",
    },
}  # fmt: skip

# Drafter classes and the first version that has them (vLLM registry.py, SGLang EntryClass).
DRAFTERS = {
    "vllm": {
        "LlamaForCausalLMEagle3": "0.20.2", "Eagle3LlamaForCausalLM": "0.20.2", "Eagle3MiniMaxM2ForCausalLM": "0.20.2",
        "Eagle3Qwen2_5vlForCausalLM": "0.20.2", "Eagle3Qwen3vlForCausalLM": "0.20.2",
        "Eagle3DeepseekV2ForCausalLM": "0.20.2", "Eagle3DeepseekV3ForCausalLM": "0.20.2",
        "Eagle3Qwen3ForCausalLM": "0.24.0",
    },
    "sglang": {"LlamaForCausalLMEagle3": "0.5.5", "Eagle3DeepseekV2ForCausalLM": "0.5.12"},
}  # fmt: skip

# Targets that hand out hidden states, by first version; an architecture that is not here needs --engine-python.
TARGETS = {
    "vllm": dict.fromkeys(
        ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
         "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"), "0.20.2",
    ),
    "sglang": {
        **dict.fromkeys(
            ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM",
             "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"), "0.5.5",
        ),
        "KimiK25ForConditionalGeneration": "0.5.10",
    },
}  # fmt: skip


@dataclass
class Case:
    """A drafter, a target and how they will be served. `read_configs` and `read_weights` fill the rest."""

    checkpoint: Path
    target: Path
    engine: str
    version: str
    algorithm: str | None = None
    k: int | None = None
    max_model_len: int | None = None
    longest_request: int | None = None  # prompt + generated tokens of the longest benchmark request
    tensor_parallel: int = 1
    layers: list[int] | None = None  # physical layers the drafter was trained on
    chat_template_kwargs: dict | None = None
    site: Path | None = None  # the installed engine's site-packages
    flags: dict[str, Any] = field(default_factory=dict)  # engine flags, names with underscores

    def read_configs(self) -> None:
        """Read configs and manifest; UserErrors for what is not there."""
        for folder in (self.checkpoint, self.target):
            if not (folder / "config.json").is_file():
                raise UserError(f"{folder}: no config.json there; give a folder with a model")
        self.raw_config = _read_config(self.checkpoint / "config.json")
        self.speculators = "speculators_model_type" in self.raw_config
        self.config = configs.from_speculators(self.raw_config) if self.speculators else self.raw_config
        whole = _read_config(self.target / "config.json")
        self.target_architecture = (whole.get("architectures") or [""])[0]
        self.target_config = conventions.text_config(whole)
        self.target_dtype = _dtype(self.target_config) or _dtype(whole)
        self.family = conventions.family(whole)
        without = self.engine == "vllm" and self.site is not None and installed.without_triton(self.site)
        self.runner = "v1" if without else None  # None: vLLM's choice on a GPU
        self.target_mla = bool(self.target_config.get("kv_lora_rank"))
        for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
            if not isinstance(self.target_config.get(key), int):
                raise UserError(f"{self.target / 'config.json'}: key {key!r} is missing; it is needed here")
        manifest = self.checkpoint / "manifest.json"
        self.manifest = (_read_config(manifest).get("parameters") or {}) if manifest.is_file() else {}
        options = self.flags.get("speculative_config", {})
        if not isinstance(options, dict):
            raise UserError(f"flag speculative-config: {options!r} is not a JSON object; quote it for the shell")
        self.algorithm = self.algorithm or options.get("method")
        self.k = self.k if self.k is not None else options.get("num_speculative_tokens")
        self.draft_tp = self.flags.get("draft_tensor_parallel_size", options.get("draft_tensor_parallel_size"))
        for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
            if not isinstance(self.flags.get(name, 1), int):
                raise UserError(f"flag {name}: {self.flags[name]!r} is not a whole number")

    def read_weights(self) -> None:
        """Read the headers; a UserError for weights that cannot be read."""
        self.all_tensors = headers.read(self.checkpoint)
        self.tensors = {_plain_name(name): tensor for name, tensor in self.all_tensors.items()}
        self.kind = _kind(self)
        self.mla = self.kind == "eagle3-mla"
        self.attention = "mla" if self.mla else "llama"
        self.hidden = self.config.get("hidden_size")
        self.target_hidden = self.target_config["hidden_size"]
        self.vocab = self.target_config["vocab_size"]
        head = self.tensors.get("lm_head.weight")
        self.draft_vocab = self.config.get("draft_vocab_size") or (head.shape[0] if head else self.vocab)

    def at_least(self, engine: str, version: str) -> bool:
        """Whether this case is served by that engine in that version or a later one."""
        return self.engine == engine and not self.older(version)

    def older(self, version: str) -> bool:
        """Whether the engine's version is older than this one."""
        return conventions.parse_version(self.version) < conventions.parse_version(version)

    def found(self, id: str, level: str, message: str, effect: str, mend: str | None = None, fix=None) -> Finding:
        """A finding on this engine and version; the mend defaults to the registry's."""
        assert id in CHECKS and level in CHECKS[id].level.split("/"), (id, level)
        return Finding(id, level, message, self.engine, self.version, effect, mend or CHECKS[id].mend, fix=fix)


def examine(case: Case, allow: list[str] = ()) -> list[Finding]:
    """All findings of a case, worst first. `allow`: ids that are shown but do not count; unknown ones are a UserError."""
    for id in allow:
        if id not in CHECKS:
            raise UserError(f"allow: no finding is called {id!r}; the ids stand in docs/checks.md")
    case.read_configs()
    findings: list[Finding] = []
    try:
        case.read_weights()
    except UserError as error:
        findings.append(case.found("weights-unreadable", "ERROR", str(error), "fails to load it"))
        return _allowed(findings, allow)
    checks = [engine_version, what_it_is]
    if case.kind.startswith("eagle3") and not _missing_keys(case):
        checks += [
            architectures, required_tensors, shapes, widths, layer_count, head, vocabulary_map, vocabularies, layers,
            norm_flags, rope, rope_interleave, positions, dtypes, biases, embeddings, backends,
        ]  # fmt: skip
    checks += [finite, quantization, serving, tensor_parallel, chat_template]
    for check in checks:
        findings += check(case)
    return _allowed(sorted(findings, key=lambda f: LEVELS.index(f.level)), allow)


def summary(case: Case) -> dict[str, Any]:
    """What the engine will make of an EAGLE-3 drafter; the server's log can be compared with it."""
    if not getattr(case, "kind", "").startswith("eagle3"):
        return {}
    shared = case.engine == "sglang" and case.hidden == case.target_hidden  # SGLang's set_embed
    own_embeddings = "embed_tokens.weight" in case.tensors and not shared
    n_layers = case.target_config["num_hidden_layers"]
    captured = conventions.captured(case.engine, case.version, case.family, case.config, n_layers, case.runner)
    if case.engine == "sglang" and (case.algorithm or "EAGLE3").upper() != "EAGLE3":
        captured = []
    return {
        "kind": case.kind,
        "layers": captured,
        "target_layers": n_layers,
        "draft_vocab_size": case.draft_vocab,
        "vocab_size": case.vocab,
        "lm_head": "own" if "lm_head.weight" in case.tensors else "target's",
        "embeddings": "own" if own_embeddings else "target's",
    }


def _missing_keys(case: Case) -> list[str]:
    """Config keys without which nothing can be compared."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    return [key for key in keys if not isinstance(case.config.get(key), int)]


def _allowed(findings: list[Finding], allow: list[str]) -> list[Finding]:
    for finding in findings:
        finding.allowed = finding.id in allow
    return findings


def fix(case: Case, findings: list[Finding], out: Path) -> list[str]:
    """Write a copy of the checkpoint with every certain mend to a new folder; return the ids that were mended."""
    mends = [finding for finding in findings if finding.fix]
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: is not empty; give --fix a new folder")
    config, tensors = json.loads(json.dumps(case.raw_config)), dict(case.all_tensors)
    for finding in mends:
        finding.fix(config, tensors)
    out.mkdir(parents=True, exist_ok=True)
    weights = {file.name for file in headers.weight_files(case.checkpoint)}
    for file in case.checkpoint.iterdir():
        if file.is_file() and file.name not in weights | {"config.json", "model.safetensors.index.json"}:
            shutil.copyfile(file, out / file.name)
    headers.write(out / "model.safetensors", tensors)
    write_json(out / "config.json", config)
    manifest = out / "manifest.json"
    if manifest.is_file() and "files" in (content := _read_object(manifest)):
        write_json(manifest, content | {"files": hashes(*(out / name for name in content["files"]))})
    return [finding.id for finding in mends]


# --- reading the checkpoint ---------------------------------------------------------------------------------------


def _read_object(file: Path) -> dict:
    """A JSON file that holds an object."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds a {type(content).__name__}, an object is needed; write the file again")
    return content


# What a key of a config.json has to be where it is written; null is as good as absent.
KINDS = {
    **dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "num_hidden_layers", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states",
         "num_aux_layers", "max_position_embeddings", "original_max_position_embeddings", "q_lora_rank", "kv_lora_rank",
         "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), "a whole number",
    ),
    **dict.fromkeys(("rope_theta", "factor"), "a number above 0"),
    **dict.fromkeys(
        ("eagle_config", "rope_parameters", "rope_scaling", "quantization_config", "quantization",
         "transformer_layer_config", "text_config", "parameters", "norm_flags"), "an object",
    ),
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "layer_ids", "layers"), "a list of whole numbers"),
    "eos_token_id": "a whole number or a list of them",
    "architectures": "a list of texts",
}  # fmt: skip


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40


IS_KIND = {
    "a whole number": _is_whole,
    "a number above 0": lambda value: isinstance(value, (int, float)) and 0 < value < 1e30,
    "an object": lambda value: isinstance(value, dict),
    "a list of whole numbers": lambda value: isinstance(value, list) and all(map(_is_whole, value)),
    "a whole number or a list of them": lambda value: (
        _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))
    ),
    "a list of texts": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
}


def _read_config(file: Path) -> dict:
    """A config.json whose keys are of the kinds that KINDS names, in it and in the objects inside; else a UserError."""
    content = _read_object(file)

    def check(part: dict, where: str) -> None:
        for key, value in part.items():
            kind = KINDS.get(key)
            if kind and value is not None and not IS_KIND[kind](value):
                raise UserError(f"{file}, key {where}{key}: {str(value)[:60]!r} is not {kind}; export it again")
            if isinstance(value, dict):
                check(value, f"{where}{key}.")

    check(content, "")
    return content


def _plain_name(name: str) -> str:
    """One spelling for the names in use: midlayer for the first layer, SGLang's old names for fc_norm."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0."):
        name = "midlayer." + name.removeprefix("layers.0.")
    for i, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(old, f"fc_norm.{i}")
    return name


def _kind(case: Case) -> str:
    """eagle3 | eagle3-mla | eagle (1 and 2) | model, told by tensors, not by what the config calls itself."""
    tensors = case.tensors
    mla = any(part in name for name in tensors for part in ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj"))
    q = next((t for n, t in tensors.items() if n.endswith("midlayer.self_attn.q_proj.weight")), None)
    hidden = case.config.get("hidden_size")
    fc = tensors.get("fc.weight")
    doubled = q is not None and len(q.shape) == 2 and q.shape[1] == 2 * (hidden or -1)
    if "midlayer.hidden_norm.weight" in tensors or "d2t" in tensors or doubled:
        return "eagle3-mla" if mla else "eagle3"
    if fc is not None and len(fc.shape) == 2 and fc.shape[1] != 2 * fc.shape[0]:
        return "eagle3-mla" if mla else "eagle3"
    return "eagle" if fc is not None else "model"


def _dtype(config: dict) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")  # transformers keeps dtype where both are written
    return str(value).removeprefix("torch.") if value else None


def _number_list(values) -> str:
    return "[" + ", ".join(str(v) for v in values) + "]"


# --- what it is, and whether engine and target know it ------------------------------------------------------------


def engine_version(case: Case) -> Iterator[Finding]:
    """The stated version against the installed one and against what was read."""
    if case.site:
        found = installed.version(case.site, case.engine)
        if conventions.parse_version(found) != conventions.parse_version(case.version):
            yield case.found(
                "engine-version", "ERROR", f"version {case.version} is stated, {found} is installed in {case.site.name}",
                "the rules of the wrong version would be applied",
            )  # fmt: skip
    if case.older(conventions.OLDEST[case.engine]):
        yield case.found(
            "engine-version", "WARN",
            f"{case.engine} {case.version} is older than {conventions.OLDEST[case.engine]}, the oldest that was read",
            f"the rules of {conventions.OLDEST[case.engine]} are applied",
        )  # fmt: skip


def what_it_is(case: Case) -> Iterator[Finding]:
    """The kind of checkpoint against the algorithm's name, in every spelling."""
    name = case.algorithm
    fc = case.tensors.get("fc.weight")
    if case.kind == "model":
        if name is None or name.upper() in ("EAGLE", "EAGLE3", "NEXTN"):
            yield case.found(
                "not-a-drafter", "ERROR",
                f"no fc.weight, no hidden_norm and no d2t among {len(case.tensors)} tensors: a whole language model",
                "the engine fails to load it as a drafter",
            )  # fmt: skip
        return
    if case.kind == "eagle":
        if name is None or name.upper() not in ("EAGLE", "NEXTN"):
            yield case.found(
                "eagle1-head", "ERROR",
                f"fc.weight is {_number_list(fc.shape)} and there is no d2t and no hidden_norm: this is an EAGLE-1/2 head,"
                f" the algorithm is {name or 'EAGLE-3'}",
                "fails to load (an EAGLE-3 fc has 3 x the target's hidden size as columns)",
            )  # fmt: skip
        return
    yield from _algorithm(case)
    if case.speculators and case.engine == "sglang":
        yield case.found(
            "format", "ERROR", "config.json is in the speculators format (speculators_model_type)",
            "SGLang (0.5.5 to 0.5.23) does not know the format and fails to start",
        )  # fmt: skip
    elif _missing_keys(case):
        yield case.found(
            "format", "ERROR", f"config.json has no {', '.join(_missing_keys(case))}", "fails to start",
            "write the drafter's own sizes",
        )  # fmt: skip
    elif not case.speculators and not case.config.get("model_type"):
        yield case.found(
            "format", "ERROR", "config.json has no model_type", "transformers cannot tell the config's class: no start",
            'write "model_type": "llama" (plain attention) or "deepseek_v2" (MLA)',
        )  # fmt: skip
    elif case.engine == "vllm" and case.mla and str(case.config.get("model_type")) in ("deepseek_v3", "deepseek_v32"):
        model_type = case.config["model_type"]
        yield case.found(
            "mla-model-type", "ERROR", f"model_type is {model_type}",
            f"takes {model_type} for DeepSeek's multi-token prediction, puts its class in place of"
            f" {(case.config.get('architectures') or ['the class'])[0]}, and does not start",
            fix=lambda config, _: config.update(model_type="deepseek_v2"),
        )  # fmt: skip


def _algorithm(case: Case) -> Iterator[Finding]:
    """The algorithm's name for an EAGLE-3 checkpoint."""
    name, fc = case.algorithm, case.tensors.get("fc.weight")
    width = f"fc.weight is {_number_list(fc.shape)}" if fc else "the tensors are EAGLE-3's"
    if case.engine == "vllm":
        if name is None:
            path = str(case.checkpoint).lower()
            if (
                case.speculators
                or ("eagle3" in path and "eagle-" not in path)
                or not case.flags.get("speculative_config")
            ):
                return
            method = "eagle" if "eagle-" in path else "none"
            yield case.found(
                "algorithm", "ERROR", f"no method is set, and vLLM guesses {method!r} from the path {case.checkpoint.name}",
                "starts with the wrong method or not at all", 'set "method": "eagle3"',
            )  # fmt: skip
        elif name != "eagle3":
            effect = "the method is compared letter by letter: no start"
            if name == "eagle":
                effect = "looks for an EAGLE-1 class (EagleLlamaForCausalLM...) and fails to start"
            yield case.found("algorithm", "ERROR", f"method is {name!r}, {width}: EAGLE-3 needs 'eagle3'", effect)
        return
    if name is None:
        return
    upper = name.upper()
    if upper != "EAGLE3":
        features = fc.shape[1] // case.target_hidden if fc and len(fc.shape) == 2 else 3
        effect = (
            f"captures no hidden states, skips fc (the {case.target_hidden}-wide final state goes in where"
            f" {features * case.target_hidden} are expected) and shares the target's head: acceptance length 1.00, no word"
            if upper in ("EAGLE", "NEXTN") else "takes another kind of drafter"
        )  # fmt: skip
        yield case.found(
            "algorithm", "ERROR", f"--speculative-algorithm is {name}, {width}: EAGLE-3 needs EAGLE3", effect
        )
    elif name != "EAGLE3" and case.older("0.5.12"):
        yield case.found(
            "algorithm", "ERROR", f"--speculative-algorithm is {name}, this version takes EAGLE3 in capitals only",
            "refuses the command line",
        )  # fmt: skip


def _class_name(case: Case) -> str:
    """The drafter's architecture as the engine looks it up."""
    name = (case.config.get("architectures") or [""])[0]
    if case.engine == "vllm" and not (name.startswith("Eagle3") or name.endswith("Eagle3")):
        name = f"Eagle3{name}"  # transformers_utils/configs/eagle.py
    return name


def architectures(case: Case) -> Iterator[Finding]:
    """Whether the engine's version has classes for the drafter and can capture from the target."""
    names, name = case.config.get("architectures") or [], _class_name(case)
    if case.site:
        known, where = installed.knows(case.site, case.engine, name), f"the installed {case.engine}"
    else:
        first = DRAFTERS[case.engine].get(name)
        known, where = first is not None and not case.older(first), f"{case.engine} {case.version}"
    if not (case.speculators and case.engine == "sglang") and not known:
        # One that norms its queries and keys has no class of SGLang's.
        renamed = name in DRAFTERS["vllm"] and name != "Eagle3Qwen3ForCausalLM"
        certain = case.engine == "sglang" and not case.mla and renamed and not case.speculators
        yield case.found(
            "drafter-architecture", "ERROR", f"architectures is {names}: {where} has no class {name!r}",
            "fails to start",
            f"known: {', '.join(DRAFTERS[case.engine])}",
            (lambda config, _: config.update(architectures=["LlamaForCausalLMEagle3"])) if certain else None,
        )  # fmt: skip
    target = case.target_architecture
    unknown = f"whether {case.engine} {case.version} captures from {target} is not known here"
    if case.site:
        answer = installed.captures(case.site, case.engine, target)
        if answer is None:
            yield case.found(
                "target-architecture", "INFO", unknown, "fails after loading the target if it cannot",
                "its class cannot be read from the installed engine; try the server once",
            )  # fmt: skip
        elif not answer:
            mark = "SupportsEagle3" if case.engine == "vllm" else "set_eagle3_layers_to_capture"
            known = "has no " + mark if installed.knows(case.site, case.engine, target) else "is unknown"
            yield case.found(
                "target-architecture", "ERROR", f"target class {target} {known} in the installed {case.engine}",
                "fails after loading the target's weights",
            )  # fmt: skip
        return
    first = TARGETS[case.engine].get(target)
    if first is None:
        yield case.found(
            "target-architecture", "INFO", unknown,
            "fails after loading the target if it cannot", "give --engine-python to read it from the installed engine",
        )  # fmt: skip
    elif case.older(first):
        yield case.found(
            "target-architecture", "ERROR", f"{target} hands out hidden states from {first} on, this is {case.version}",
            "fails after loading the target's weights",
        )  # fmt: skip


# --- tensors ------------------------------------------------------------------------------------------------------


def expected_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Required tensors of an EAGLE-3 drafter with one layer and their shapes, from its config.

    fc, lm_head, embed_tokens, d2t and t2d have checks of their own. MLA: vLLM deepseek_eagle3.py, SGLang
    kimi_k25_eagle3.py; plain attention: llama_eagle3.py of both, vLLM qwen3_eagle3.py.
    """
    config, hidden = case.config, case.hidden or 0
    heads = config.get("num_attention_heads") or 0
    inner = config.get("intermediate_size") or 0
    shapes = {
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
    }
    attention = "midlayer.self_attn."
    if case.mla:
        nope, rope_dim, value, q_rank, kv_rank = (
            config.get(key) or 0
            for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
        )
        return shapes | {
            f"{attention}q_a_proj.weight": (q_rank, 2 * hidden),
            f"{attention}q_a_layernorm.weight": (q_rank,),
            f"{attention}q_b_proj.weight": (heads * (nope + rope_dim), q_rank),
            f"{attention}kv_a_proj_with_mqa.weight": (kv_rank + rope_dim, 2 * hidden),
            f"{attention}kv_a_layernorm.weight": (kv_rank,),
            f"{attention}kv_b_proj.weight": (heads * (nope + value), kv_rank),
            f"{attention}o_proj.weight": (hidden, heads * value),
        }
    head_dim = config.get("head_dim") or (hidden // heads if heads else 0)
    kv = config.get("num_key_value_heads") or heads
    if case.engine == "vllm" and _class_name(case) == "Eagle3Qwen3ForCausalLM":
        shapes |= {f"{attention}{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    return shapes | {
        f"{attention}q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{attention}k_proj.weight": (kv * head_dim, 2 * hidden),
        f"{attention}v_proj.weight": (kv * head_dim, 2 * hidden),
        f"{attention}o_proj.weight": (hidden, heads * head_dim),
    }


def _quantized(case: Case) -> bool:
    """Whether the drafter's linear layers are stored packed."""
    quantization = case.config.get("quantization_config")
    return bool(quantization) and bool(
        quantization.get("quant_algo") or quantization.get("quant_method") not in (None, "modelopt")
    )


def required_tensors(case: Case) -> Iterator[Finding]:
    """Missing, misnamed and superfluous tensors."""
    expected = expected_shapes(case)
    packed = _quantized(case)
    for name in ["fc.weight", *expected]:
        if name not in case.tensors and not (packed and name.endswith("proj.weight")):
            yield case.found(
                "tensor-missing", "ERROR", f"{name} is not in the file",
                "serves with uninitialised weights, no error and no warning",
            )  # fmt: skip
    renames = {}
    for name in case.all_tensors:
        plain = name.removeprefix("model.")
        if case.engine == "vllm" and plain != name:
            renames[name] = plain
        if case.engine == "sglang" and case.older("0.5.12") and plain.startswith("layers.0."):
            renames[name] = _plain_name(name)
        if case.engine == "sglang" and case.mla and plain != name:
            renames[name] = plain
        if case.engine == "vllm" and plain.startswith("aux_norm_"):
            renames[name] = _plain_name(name)
    if renames:
        old, new = next(iter(renames.items()))

        def rename(_, tensors):
            for before, after in list(renames.items()):
                tensors[after] = tensors.pop(before)

        effect = "fails to load" if case.engine == "vllm" else "drops the tensor without a word: random weights"
        yield case.found(
            "tensor-name",
            "ERROR",
            f"{len(renames)} names are not read, e.g. {old} instead of {new}",
            effect,
            fix=rename,
        )
    known = {*expected, "fc.weight", "lm_head.weight", "embed_tokens.weight", "d2t", "t2d", "input_norm.weight"}
    extra = [
        name for name in case.tensors
        if name not in known and not name.startswith(("fc_norm.", "layers.")) and "rotary_emb" not in name
        and "mask_hidden" not in name and not (packed and name.startswith("midlayer."))
        and not name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"))
        and not (name == "fc.bias" and case.engine == "sglang" and case.config.get("bias"))
    ]  # fmt: skip
    if extra:
        effect = "drops it without a word, so another network is served"
        if case.engine == "vllm":
            effect = "fails to load" if not case.mla else "fails to load, older versions drop it without a word"
        yield case.found("tensor-extra", "ERROR", f"no place for {', '.join(sorted(extra)[:4])}", effect)


def shapes(case: Case) -> Iterator[Finding]:
    """Shapes against the config, heads apart from the rest."""
    if case.mla and not case.config.get("q_lora_rank"):
        yield case.found(
            "mla-q-lora", "ERROR", f"q_lora_rank is {case.config.get('q_lora_rank')}", "refuses or fails to load"
        )
        return
    if _quantized(case):
        return  # packed weights have other shapes
    for name, shape in expected_shapes(case).items():
        tensor = case.tensors.get(name)
        if tensor is None or tensor.shape == shape:
            continue
        is_head = ".self_attn." in name
        config = case.config
        if case.mla and is_head:
            keys = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            rule = ", ".join(f"{key} {config.get(key)}" for key in ("hidden_size", "num_attention_heads", *keys))
            half = shape[1:] == (2 * case.hidden,) and tensor.shape[1:] == (case.hidden,)
            yield case.found(
                "head-shape", "ERROR",
                f"{name} is {_number_list(tensor.shape)}, the config ({rule}) makes it {_number_list(shape)}"
                + (": it reads hidden_size, an EAGLE-3 layer reads [embedding, features]" if half else ""),
                "fails to load",
            )  # fmt: skip
            continue
        rule = (
            f"num_attention_heads {config.get('num_attention_heads')}, num_key_value_heads"
            f" {config.get('num_key_value_heads')}, head_dim {config.get('head_dim')}, hidden_size {case.hidden}"
            if is_head else f"hidden_size {case.hidden}, intermediate_size {config.get('intermediate_size')}"
        )  # fmt: skip
        effect = "loads the wrong rows without complaint" if is_head and case.engine == "vllm" else "fails to load"
        yield case.found(
            "head-shape" if is_head else "tensor-shape", "ERROR",
            f"{name} is {_number_list(tensor.shape)}, the config ({rule}) makes it {_number_list(shape)}", effect,
        )  # fmt: skip


def widths(case: Case) -> Iterator[Finding]:
    """fc against features and hidden sizes, and drafters of another width than the target."""
    fc = case.tensors.get("fc.weight")
    stated = case.config.get("target_hidden_size")
    hidden, target = case.hidden, case.target_hidden
    if stated is not None and stated != target:
        yield case.found(
            "hidden-size", "ERROR", f"target_hidden_size is {stated}, the target's hidden_size is {target}",
            "builds fc for another width",
        )  # fmt: skip
    null = stated is None and "target_hidden_size" in case.config and not (case.engine == "sglang" and case.mla)
    if null:
        yield case.found(
            "hidden-size", "ERROR", "target_hidden_size is null", "multiplies with it: a TypeError at start",
            f"write {target}, or leave the key out",
            lambda config, _: (config.get("transformer_layer_config") or config).update(target_hidden_size=target),
        )  # fmt: skip
    if hidden != target:
        if stated is None and not null:
            yield case.found(
                "hidden-size", "ERROR",
                f"drafter hidden_size {hidden}, target {target}, and no target_hidden_size in the config",
                "builds fc for the wrong width and fails",
            )  # fmt: skip
        if "embed_tokens.weight" not in case.tensors:
            yield case.found(
                "hidden-size", "ERROR", f"drafter hidden_size {hidden}, target {target}, and no embed_tokens.weight",
                "the target's embeddings do not fit: uninitialised ones are used, or a KeyError",
            )  # fmt: skip
    if fc is None or len(fc.shape) != 2 or _quantized(case):
        return
    if fc.shape[0] != hidden:
        yield case.found(
            "tensor-shape", "ERROR", f"fc.weight has {fc.shape[0]} rows, hidden_size is {hidden}", "fails to load"
        )
    features = conventions.number_of_features(case.engine, case.version, case.config, case.mla)
    width = (stated if stated is not None else hidden) or 0
    if fc.shape[1] != features * width:
        count = fc.shape[1] / target
        yield case.found(
            "fc-width", "ERROR",
            f"fc.weight has {fc.shape[1]} columns ({count:g} x the target's {target}); {features} features of {width}"
            f" make {features * width}", "fails to load, or mixes features",
        )  # fmt: skip
    elif case.engine == "sglang" and fc.shape[1] == hidden:
        yield case.found(
            "fc-skipped", "ERROR", f"{features} x {width} features are as wide as the embeddings ({hidden})",
            "applies fc only where the widths differ, so it is skipped without a word",
        )  # fmt: skip


def layer_count(case: Case) -> Iterator[Finding]:
    """The drafter's own number of layers."""
    stated = case.config.get("num_hidden_layers")
    there = 1 + max((int(n.split(".")[1]) for n in case.tensors if n.startswith("layers.")), default=0)
    if stated != there:
        yield case.found(
            "draft-layers", "ERROR", f"num_hidden_layers is {stated}, the file has {there}",
            "builds that many layers, the missing ones uninitialised, or refuses",
            fix=lambda config, _: (config.get("transformer_layer_config") or config).update(num_hidden_layers=there),
        )  # fmt: skip
    elif there > 1 and case.engine == "sglang" and (case.mla or case.older("0.5.12")):
        yield case.found("draft-layers", "ERROR", f"{there} layers, this class takes 1", "refuses to start")


def head(case: Case) -> Iterator[Finding]:
    """lm_head: there, of the right height, and used."""
    tensor, config, vocab = case.tensors.get("lm_head.weight"), case.config, case.vocab
    stated = config.get("draft_vocab_size")
    absent = "draft_vocab_size" not in config
    d2t = case.tensors.get("d2t")
    confirmed = tensor is not None and d2t is not None and d2t.shape == tensor.shape[:1]  # two against the config
    sizes = f"draft_vocab_size {stated}, vocab_size {vocab}"
    if tensor is None:
        shared = (
            case.engine == "vllm" or (stated is None and (not absent or case.mla)) or config.get("tie_word_embeddings")
        )
        if (stated or vocab) != vocab:
            yield case.found(
                "lm-head-missing", "ERROR", f"no lm_head.weight, {sizes}",
                "puts the target's head where a pruned one is expected" if case.engine == "vllm" else "random head, no word",
            )  # fmt: skip
        elif not shared:
            yield case.found(
                "lm-head-missing", "ERROR", f"no lm_head.weight, {sizes}", "random head, no word: acceptance length 1.00",
                'ship the head, or set "draft_vocab_size": null so that the target\'s head is shared',
                lambda config, _: config.update(draft_vocab_size=None),
            )  # fmt: skip
        elif case.engine == "vllm" and stated is not None:
            yield case.found("lm-head-missing", "WARN", f"no lm_head.weight, {sizes}", "shares the target's head")
    elif not _quantized(case) and stated is not None and tensor.shape[0] != stated:
        yield case.found(
            "lm-head-rows", "ERROR", f"lm_head.weight has {tensor.shape[0]} rows, draft_vocab_size is {stated}",
            "fails to load",
            fix=(lambda config, _: config.update(draft_vocab_size=tensor.shape[0])) if confirmed else None,
        )  # fmt: skip
    elif tensor.shape[1] != case.hidden and not _quantized(case):
        yield case.found(
            "tensor-shape", "ERROR", f"lm_head.weight has {tensor.shape[1]} columns, hidden_size is {case.hidden}",
            "fails to load",
        )  # fmt: skip
    if tensor is not None and stated is None and (absent or tensor.shape[0] != vocab):
        pruned = tensor.shape[0] != vocab
        if (case.engine == "sglang" and not case.mla) or pruned:
            effect = f"takes {vocab} for it and fails to load"
            if case.engine == "sglang":
                effect = "AttributeError at start" if absent and not case.mla else "drops the head, shares the target's"
            yield case.found(
                "draft-vocab-size", "ERROR", f"no draft_vocab_size, lm_head.weight has {tensor.shape[0]} rows", effect,
                fix=lambda config, _: config.update(draft_vocab_size=tensor.shape[0]),
            )  # fmt: skip
    if case.engine == "sglang" and tensor is not None and config.get("tie_word_embeddings"):
        yield case.found(
            "lm-head-tied", "ERROR", f"tie_word_embeddings is true, lm_head.weight has {tensor.shape[0]} rows",
            f"drops it without a word and uses the {vocab} rows of the embeddings",
            fix=lambda config, _: config.update(tie_word_embeddings=False),
        )  # fmt: skip


def finite(case: Case) -> Iterator[Finding]:
    """NaN and infinities in any tensor."""
    for name, tensor in case.all_tensors.items():
        bad = headers.nonfinite(tensor)
        if bad:
            yield case.found(
                "nonfinite", "ERROR", f"{name} has {bad[0]} NaN or infinite of {math.prod(tensor.shape)} values, the"
                f" first at index {bad[1]}", "serves it without a word; acceptance 0",
            )  # fmt: skip


def embeddings(case: Case) -> Iterator[Finding]:
    """embed_tokens, if the drafter ships its own, against the target's rows (1,024 of them)."""
    own = case.tensors.get("embed_tokens.weight")
    if own is None:
        return
    if own.shape != (case.config.get("vocab_size"), case.hidden):
        yield case.found(
            "tensor-shape", "ERROR", f"embed_tokens.weight is {_number_list(own.shape)}, the config makes it"
            f" [{case.config.get('vocab_size')}, {case.hidden}]", "fails to load",
        )  # fmt: skip
        return
    theirs = target_embeddings(case.target)
    if theirs is None or theirs.shape[1] != own.shape[1] or case.hidden != case.target_hidden:
        return
    if case.manifest.get("train_embeddings") or own.dtype not in headers.NAMES or theirs.dtype not in headers.NAMES:
        return
    n = min(own.shape[0], theirs.shape[0])
    rows = np.unique(np.linspace(0, n - 1, 1024).astype(np.int64))
    a, b = headers.floats(own, rows), headers.floats(theirs, rows)
    if np.array_equal(a, b):
        return
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosine = float(np.median((a * b).sum(1)[norms > 0] / norms[norms > 0])) if (norms > 0).any() else 0.0
    if cosine > 0.9999:
        return  # rounding to another dtype
    effect = "keeps the drafter's own" if case.engine == "vllm" else "takes the target's instead"
    if case.engine == "vllm" or cosine > 0.9:
        yield case.found(
            "embeddings", "ERROR" if cosine < 0.9 else "WARN",
            f"embed_tokens differs from the target's: median cosine {cosine:.3f} over {len(rows)} rows, 1 if shared",
            effect,
            fix=(lambda _, tensors: [tensors.pop(n) for n in list(tensors) if n.endswith("embed_tokens.weight")])
            if cosine < 0.9 else None,
        )  # fmt: skip


def target_embeddings(folder: Path) -> Tensor | None:
    """The target's embedding tensor, or None where its weights are not there."""
    try:
        tensors = headers.read(folder)
    except UserError:
        return None
    return next((t for n, t in tensors.items() if n.endswith("embed_tokens.weight") and len(t.shape) == 2), None)


# --- vocabulary ---------------------------------------------------------------------------------------------------


def vocabulary_map(case: Case) -> Iterator[Finding]:
    """d2t and t2d: offset, range, order, agreement, coverage of the end tokens."""
    d2t, t2d = case.tensors.get("d2t"), case.tensors.get("t2d")
    size, vocab = case.draft_vocab, case.vocab
    kept = None
    if t2d is not None:
        if t2d.shape != (vocab,) and t2d.shape != (case.config.get("vocab_size"),):
            yield case.found(
                "d2t-shape", "ERROR", f"t2d is {_number_list(t2d.shape)}, the vocabulary has {vocab}",
                "is not read, but the map belongs to another vocabulary",
            )  # fmt: skip
        else:
            kept = np.flatnonzero(headers.array(t2d))

    def from_t2d(_, tensors):
        tensors["d2t"] = kept.astype(np.int64) - np.arange(len(kept))

    certain = from_t2d if kept is not None and len(kept) == size else None
    if d2t is None:
        if size < vocab:
            yield case.found(
                "d2t-missing", "ERROR", f"draft_vocab_size is {size} of {vocab} and there is no d2t",
                f"proposes the first {size} ids whatever the head means, no error and no warning", fix=certain,
            )  # fmt: skip
        return
    if d2t.shape != (size,) or d2t.dtype not in ("I64", "I32"):
        yield case.found(
            "d2t-shape", "ERROR", f"d2t is {d2t.dtype} {_number_list(d2t.shape)}, expected int64 [{size}]",
            "fails to load, or fails at the first request",
        )  # fmt: skip
        return
    offset = headers.array(d2t).astype(np.int64)
    ids = offset + np.arange(size)
    if size == vocab and case.at_least("vllm", "0.30.0"):
        yield case.found(
            "d2t-full-vocabulary", "ERROR", f"draft_vocab_size and vocab_size are both {vocab}, and d2t is in the file",
            "has no place for d2t then and fails to load",
            fix=(lambda _, tensors: [tensors.pop(n, None) for n in ("d2t", "t2d")]) if not offset.any() else None,
        )  # fmt: skip
    rising = size > 1 and bool((np.diff(offset) > 0).all())
    if (kept is not None and np.array_equal(offset, kept) and offset.any()) or (
        kept is None and rising and size < vocab
    ):
        yield case.found(
            "d2t-absolute", "ERROR",
            f"d2t is absolute: it holds target ids ({offset[0]}, {offset[1] if size > 1 else ''}, ... {offset[-1]}),"
            " engines expect offsets",
            f"adds 0 ... {size - 1} to them: other tokens, and an IndexError on the first request beyond {vocab}",
            fix=lambda _, tensors: tensors.update(d2t=offset - np.arange(size)),
        )  # fmt: skip
        return
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if len(outside):
        j = int(outside[0])
        yield case.found(
            "d2t-range", "ERROR", f"d2t maps draft id {j} to {ids[j]}, the vocabulary has {vocab} ({len(outside)} such)",
            "IndexError on the first request, or other tokens",
        )  # fmt: skip
        return
    unique = np.unique(ids)
    if kept is not None and not np.array_equal(unique, kept):
        both = len(np.intersect1d(unique, kept))
        zero = "; d2t is all zeros" if not offset.any() else ""
        yield case.found(
            "d2t-t2d", "ERROR", f"d2t names {len(unique)} target ids, t2d {len(kept)}, {both} in common{zero}",
            "reads d2t only: other tokens are proposed, no word",
            fix=certain if not offset.any() else None,
        )  # fmt: skip
    if len(unique) < size:
        yield case.found(
            "d2t-duplicate",
            "ERROR",
            f"d2t maps {size} draft ids to {len(unique)} target ids",
            "loses head rows, no word",
        )
    elif (np.diff(ids) <= 0).any():
        yield case.found(
            "d2t-unsorted", "ERROR", f"mapped ids fall {int((np.diff(ids) < 0).sum())} times, ascending ones are the rule",
            "maps as written, no word",
        )  # fmt: skip
    if kept is None and not offset.any() and size < vocab:
        yield case.found(
            "d2t-identity", "WARN", f"d2t is all zeros: ids 0 ... {size - 1} of {vocab}", "maps as written"
        )
    ends = sorted(_end_ids(case.target))
    if ends and size < vocab and not np.isin(ends, unique).any():
        yield case.found(
            "vocabulary-end", "WARN", f"none of the target's end-of-text ids {ends} is among the {size} draft ids",
            "never drafts the end of an answer",
        )  # fmt: skip


def _end_ids(target: Path) -> set[int]:
    """End-of-text ids of a target, from generation_config.json or config.json."""
    for name in ("generation_config.json", "config.json"):
        if (target / name).is_file():
            config = _read_config(target / name)
            ids = config.get("eos_token_id")
            ids = ids if ids is not None else conventions.text_config(config).get("eos_token_id")
            if ids is not None:
                return set(ids if isinstance(ids, list) else [ids])
    return set()


def _tokens(folder: Path) -> dict[str, int] | None:
    """Token -> id of a tokenizer.json, added tokens included; None where there is none."""
    if not (folder / "tokenizer.json").is_file():
        return None
    content = _read_object(folder / "tokenizer.json")
    try:
        vocab = (content.get("model") or {}).get("vocab") or {}
        if isinstance(vocab, list):  # unigram: [token, score] pairs
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        tokens = {**vocab, **{token["content"]: token["id"] for token in content.get("added_tokens") or []}}
    except (AttributeError, KeyError, TypeError, ValueError):
        tokens = {"": None}
    if not all(map(_is_whole, tokens.values())):
        raise UserError(f"{folder / 'tokenizer.json'}: not a tokenizer as transformers writes it; copy it again")
    return tokens


def vocabularies(case: Case) -> Iterator[Finding]:
    """vocab_size and tokenizer of drafter and target; a difference in the padded tail alone is a warning."""
    own, theirs = case.config.get("vocab_size"), case.vocab
    drafter, target = _tokens(case.checkpoint), _tokens(case.target)
    changed = sum(target.get(token) != i for token, i in drafter.items()) if drafter and target else 0
    if changed:  # one that lacks tokens of the target's agrees with it otherwise
        yield case.found(
            "tokenizer", "ERROR", f"{changed} of the drafter's {len(drafter)} tokens have another id or none in the"
            f" target's {len(target)}", "uses the target's tokenizer: the drafter sees other tokens than in training",
        )  # fmt: skip
        return
    if own == theirs:
        return
    used = 1 + max(target.values()) if target else None
    padding = used is not None and used <= min(own or 0, theirs)
    yield case.found(
        "vocabulary-size", "WARN" if padding else "ERROR",
        f"vocab_size is {own} in the drafter's config, {theirs} in the target's"
        + (f": padding only, the tokenizer uses {used} ids" if padding else ""),
        "sizes embeddings and the scattered logits by the drafter's",
    )  # fmt: skip


# --- layers -------------------------------------------------------------------------------------------------------


def layers(case: Case) -> Iterator[Finding]:
    """The layers the engine will capture against those the drafter was trained on."""
    n, config, engine, version = case.target_config["num_hidden_layers"], case.config, case.engine, case.version
    wanted = case.manifest.get("layers")
    if case.layers is not None and wanted is not None and list(case.layers) != list(wanted):
        yield case.found(
            "layer-ids", "ERROR", f"--layers says {_number_list(case.layers)}, the manifest {_number_list(wanted)}",
            "cannot be right for both", "state what the manifest states, or leave --layers out",
        )  # fmt: skip
        return
    wanted = list(case.layers if case.layers is not None else wanted) if (case.layers or wanted) else None
    ids = conventions.written_ids(engine, version, config, case.runner)
    got = conventions.captured(engine, version, case.family, config, n, case.runner)
    written = f"ids {_number_list(ids)}" if ids else "no ids it reads (the default)"
    runners = {}
    if engine == "vllm" and not case.older("0.22.0") and case.runner is None:
        runners = {r: conventions.captured(engine, version, case.family, config, n, r) for r in ("v1", "v2")}
    if wanted and wanted != sorted(set(wanted)):
        yield case.found(
            "layer-order",
            "ERROR",
            f"trained on {_number_list(wanted)}",
            f"feeds fc {_number_list(sorted(set(wanted)))}",
        )
        return

    def write_both(config, _):
        for key in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states"):
            config.pop(key, None)
        nested = {k: v for k, v in (config.pop("eagle_config", None) or {}).items() if "layer_ids" not in k}
        keys = conventions.export_ids(wanted, case.family, n)
        nested.update(keys.pop("eagle_config", {}))
        config.update(keys, **({"eagle_config": nested} if nested else {}))

    if ids and len(got) < len(set(ids)):
        yield case.found(
            "layer-ids-range", "ERROR", f"{written} of a target with {n} layers: only {_number_list(got)} are reached",
            f"gives fc {len(got)} features instead of {len(set(ids))} and fails",
        )  # fmt: skip
    elif wanted and got != wanted:
        yield case.found(
            "layer-ids", "ERROR",
            f"trained on the inputs of layers {_number_list(wanted)}; from {written} in config.json {engine} {version}"
            f" captures {_number_list(got)} ({case.family} family, {n} layers)",
            "serves with the wrong features, no word", fix=None if case.speculators else write_both,
        )  # fmt: skip
    elif wanted and runners and any(layers != wanted for layers in runners.values()):
        yield case.found(
            "layer-ids-runner", "WARN",
            f"V1 runner: {_number_list(runners['v1'])}, V2 runner: {_number_list(runners['v2'])}, trained on"
            f" {_number_list(wanted)}", "depends on the runner it picks (VLLM_USE_V2_MODEL_RUNNER)", fix=write_both,
        )  # fmt: skip
    elif not wanted and not any(
        config.get(k) or (config.get("eagle_config") or {}).get(k)
        for k in ("eagle_aux_hidden_state_layer_ids", "layer_ids")
    ):
        yield case.found(
            "layer-ids-unstated", "WARN",
            f"no layer ids in config.json, no manifest, no --layers: {engine} will take {_number_list(got)} of {n}",
            "guesses; a drafter trained on others drops to acceptance near 0, no word",
            f"state --layers {','.join(map(str, got))} if it was trained so",
        )  # fmt: skip
    elif not wanted:
        readings = {f"{engine} {version}": got} | ({f"{engine} {r}": layers for r, layers in runners.items()})
        for other, newest in conventions.NEWEST.items():
            if other != engine:
                readings[f"{other} {newest}"] = conventions.captured(other, newest, case.family, config, n)
        if len({tuple(layers) for layers in readings.values()}) > 1:
            text = "; ".join(f"{name} captures {_number_list(layers)}" for name, layers in readings.items())
            yield case.found("layer-ids-ambiguous", "WARN", text, f"takes {_number_list(got)}")
    features = conventions.number_of_features(engine, version, config, case.mla)
    if len(got) != features and len(got) == len(set(ids or got)):
        yield case.found(
            "fc-width", "ERROR", f"captures {len(got)} layers {_number_list(got)}, fc is built for {features}",
            "fails to load or at the first request",
            "write num_aux_hidden_states, and the ids in eagle_config as well",
        )  # fmt: skip


# --- numbers the config carries -----------------------------------------------------------------------------------


def _flag(case: Case, name: str) -> bool:
    """A norm flag as this engine and version read it from the config, were it to honour it."""
    config = case.config
    nested = config.get("eagle_config") or {}
    if name == "norm_before_fc" and not (case.engine == "vllm" and case.older("0.22.0")):
        return bool(nested.get(name, config.get(name, False)))
    if name == "fc_norm" and case.engine == "sglang":
        return bool(config.get("fc_norm") or config.get("use_aux_norm"))
    return bool(config.get(name, False))


def norm_flags(case: Case) -> Iterator[Finding]:
    """Norm flags against tensors, manifest and what the version honours."""
    trained = {**case.manifest, **(case.manifest.get("norm_flags") or {})}
    tensors = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
    for name, first in NORM_FLAGS[case.engine, case.attention].items():
        value = _flag(case, name)
        stated = value or bool((case.config.get("eagle_config") or {}).get(name))
        honoured = first is not None and not case.older(first)
        if stated and not honoured:
            since = f"from {first} on" if first else "in no version read"
            other = "vllm" if case.engine == "sglang" else "sglang"
            yield case.found(
                "norm-flag", "ERROR", f"{name} is true; {case.engine} honours it {since} for this class, this is"
                f" {case.version}", "computes without it, no word",
                f"serve with a version or engine that honours it ({other}: {NORM_FLAGS[other, case.attention][name]}),"
                " or train without",
            )  # fmt: skip
            continue
        tensor = tensors.get(name)
        if tensor and (tensor in case.tensors) != value:
            effect = "computes without the norm, no word" if not value else "norm weights stay uninitialised"
            yield case.found(
                "norm-tensor", "ERROR",
                f"{name} is {str(value).lower()} and {tensor} is {'there' if not value else 'not there'}", effect,
                fix=(lambda config, _, name=name: config.update({name: True})) if not value and honoured else None,
            )  # fmt: skip
        if name in trained and bool(trained[name]) != value:
            yield case.found(
                "norm-manifest", "ERROR", f"{name} is {str(value).lower()} in the config, trained with"
                f" {str(bool(trained[name])).lower()}", "computes another network, no word",
                fix=lambda config, _, name=name: config.update({name: bool(trained[name])}),
            )  # fmt: skip
    nested = case.config.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        yield case.found(
            "fc-width", "ERROR", "eagle_config.use_aux_hidden_state is false, fc.weight is in the file",
            "takes the final hidden state and skips fc", "set it to true",
            lambda config, _: config["eagle_config"].update(use_aux_hidden_state=True),
        )  # fmt: skip


def rope(case: Case) -> Iterator[Finding]:
    """RoPE base and scaling, in both spellings, as the engine reads them.

    transformers 5 (SGLang >= 0.5.10, vLLM from 0.31.0 in any case) reads both, and a rope_scaling that is set replaces
    rope_parameters, base and all; transformers 4 (SGLang <= 0.5.9; what vLLM 0.20.2 was locked with) knows rope_theta and
    rope_scaling only and defaults to 10,000.
    """
    sets = {key: configs.plain_rope(case.config.get(key)) for key in ("rope_parameters", "rope_scaling")}
    bases = {"rope_theta": case.config.get("rope_theta")}
    bases |= {f"{key}.rope_theta": parameters.get("rope_theta") for key, parameters in sets.items()}
    bases = {key: float(value) for key, value in bases.items() if value}
    old = case.engine == "sglang" and case.older("0.5.10")
    maybe_old = old or (case.engine == "vllm" and case.older("0.31.0"))
    both, own = configs.rope(case.config)
    read = bases.get("rope_theta", 10000.0) if old else both
    trained = case.manifest.get("rope_theta")
    if sets["rope_parameters"].get("type") and sets["rope_parameters"].get("rope_type") == "default":
        del sets["rope_parameters"]["rope_type"]  # checkpoints trained here once carried both
    parameters, scaling = (configs.scaling_of(sets[key]) for key in ("rope_parameters", "rope_scaling"))
    # What transformers adds to one of them (the original length, for one) is no disagreement.
    common = {"rope_type", *(parameters or {})} & {"rope_type", *(scaling or {})}
    disagree = all(sets.values()) and any((parameters or {}).get(key) != (scaling or {}).get(key) for key in common)

    def write_both(theta):
        def mend(config, _):
            config = config.get("transformer_layer_config") or config
            chosen = configs.plain_rope(config.get("rope_scaling") or config.get("rope_parameters"))
            kind = chosen.pop("rope_type", None) or chosen.get("type") or "default"
            chosen.pop("type", None)
            config["rope_theta"] = theta
            config["rope_parameters"] = {**chosen, "rope_type": kind, "rope_theta": theta}
            if config.get("rope_scaling"):
                config["rope_scaling"] = dict(config["rope_parameters"])

        return mend

    if disagree:
        yield case.found(
            "rope-scaling", "ERROR", f"rope_scaling is {scaling}, rope_parameters is {parameters}",
            "rotates as rope_scaling says, no word",
        )  # fmt: skip
    if any(base != both for base in bases.values()):
        text = ", ".join(f"{key} is {base:g}" for key, base in bases.items())
        yield case.found(
            "rope-theta", "ERROR",
            text + ("" if len(bases) > 1 else ", which rope_scaling puts out of force: without a base it means 10000"),
            f"uses {read:g}; other versions use another",
            fix=write_both(float(trained)) if trained is not None and not disagree else None,
        )  # fmt: skip
    elif "rope_theta" not in bases and both != 10000.0 and maybe_old:
        yield case.found(
            "rope-spelling", "ERROR" if old else "WARN",
            f"RoPE base {both:g} does not stand as rope_theta; without it it reads as 10000"
            + ("" if old else " where transformers 4 is installed"),
            "rotates with another base than in training, no word", fix=write_both(both),
        )  # fmt: skip
    elif trained is not None and float(trained) != read:
        yield case.found(
            "rope-theta", "ERROR", f"trained with RoPE base {float(trained):g}, the config gives {read:g}",
            "rotates with another base than in training, no word", fix=write_both(float(trained)),
        )  # fmt: skip
    target, theirs = configs.rope(case.target_config)
    alike = case.mla == case.target_mla  # plain attention under MLA rotates other dimensions anyway
    if trained is None and both != target and alike:
        yield case.found("rope-target", "WARN", f"RoPE base {both:g}, the target's is {target:g}", "uses the drafter's")
    if own and not case.config.get("rope_scaling") and maybe_old:
        yield case.found(
            "rope-spelling", "ERROR" if old else "WARN",
            f"RoPE scaling {own['rope_type']} stands in rope_parameters only; without rope_scaling it reads as none"
            + ("" if old else " where transformers 4 is installed"),
            "rotates without scaling, no word", "write it as rope_scaling as well",
        )  # fmt: skip
    if trained is None and own != theirs and alike:
        yield case.found(
            "rope-target", "WARN", f"RoPE scaling is {own}, the target's is {theirs}", "uses the drafter's"
        )
    if case.mla and case.engine == "vllm" and case.older("0.28.0") and own is None and both != 10000.0:
        yield case.found(
            "rope-mla", "WARN", f"MLA drafter with RoPE base {both:g} and no scaling",
            "rebuilds the RoPE settings without the base: 10000 with transformers 4, no start with transformers 5",
        )  # fmt: skip


def rope_interleave(case: Case) -> Iterator[Finding]:
    """How the rotated part of MLA is laid out: vLLM turns interleaved pairs, SGLang (0.5.23) does as rope_interleave says."""
    stated = case.config.get("rope_interleave", True)
    trained = case.manifest.get("mla") is not None or stated  # those trained here are interleaved
    served = True if case.engine == "vllm" else stated
    if case.mla and bool(served) != bool(trained):
        yield case.found(
            "rope-interleave", "ERROR",
            f"rope_interleave is {str(stated).lower()}, {'trained interleaved' if trained else 'and vLLM does not read it'}",
            f"rotates {'interleaved pairs' if served else 'halves'}, other dimensions than in training, no word",
            fix=(lambda config, _: config.update(rope_interleave=True)) if trained else None,
        )  # fmt: skip


def positions(case: Case) -> Iterator[Finding]:
    """The drafter's positions against the served length and the longest request."""
    own = case.config.get("max_position_embeddings")
    named = own is not None
    own = own if named else 2048  # LlamaConfig's default
    if case.engine == "sglang":
        scaling = configs.rope(case.config)[1] or {}
        if "original_max_position_embeddings" not in scaling and scaling.get("rope_type") != "llama3":
            own = int(own * scaling.get("factor", 1))  # get_context_length
    need = case.max_model_len or case.target_config.get("max_position_embeddings") or 0
    if own >= need:
        return
    text = f"max_position_embeddings is {own}{'' if named else ' by default'}, the served length is {need}"
    longest = case.longest_request
    if longest:
        text += f", the longest request {longest}"

    def mend(config, _):
        return (config.get("transformer_layer_config") or config).update(
            max_position_embeddings=max(need, case.target_config.get("max_position_embeddings") or 0)
        )

    if case.engine == "sglang":
        yield case.found(
            "positions", "ERROR", text,
            "refuses to start unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN is set, which then raises it", fix=mend,
        )  # fmt: skip
    elif not case.older("0.27.0"):
        yield case.found("positions", "WARN", text, "raises it to the target's and logs an INFO line", fix=mend)
    else:
        harmless = longest is not None and longest <= own
        yield case.found(
            "positions", "WARN" if harmless else "ERROR", text,
            f"the rotary cache ends at {own}: a device assert, or garbage drafts beyond it", fix=mend,
        )  # fmt: skip


def dtypes(case: Case) -> Iterator[Finding]:
    """The dtype the drafter is served in against the target's."""
    own, theirs = _dtype(case.config), case.flags.get("dtype") or case.target_dtype
    stored = {headers.NAMES[t.dtype] for t in case.tensors.values() if t.dtype in headers.NAMES}
    if case.flags.get("dtype") not in (None, "auto") or theirs in (None, "auto"):
        return
    if case.engine == "sglang":
        loaded = {None: "float16", "float32": "float16"}.get(own, own)
        theirs = {"float32": "float16"}.get(theirs, theirs)
        if loaded != theirs:
            yield case.found(
                "dtype", "ERROR", f"drafter dtype {own or 'not in the config'}, target {theirs}",
                f"loads the drafter as {loaded} beside a {theirs} target: a dtype error or wrong values",
                fix=lambda config, _: config.update(dtype=theirs, torch_dtype=theirs),
            )  # fmt: skip
    elif (own is not None and own != theirs) or (own is None and stored - {theirs, "float32"}):
        yield case.found(
            "dtype",
            "WARN",
            f"drafter dtype {own or ', '.join(sorted(stored))}, target {theirs}",
            f"casts it to {theirs}",
        )


def biases(case: Case) -> Iterator[Finding]:
    """Attention biases."""
    there = [n for n in case.tensors if n.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"))]
    flag = bool(case.config.get("attention_bias"))
    if there and case.engine == "sglang":
        yield case.found("attention-bias", "ERROR", f"{there[0]} is in the file", "drops it without a word")
    elif case.engine == "vllm" and bool(there) != flag:
        yield case.found(
            "attention-bias", "ERROR", f"attention_bias is {str(flag).lower()}, {len(there)} bias tensors are in the file",
            "fails to load" if there else "biases stay uninitialised",
        )  # fmt: skip


def backends(case: Case) -> Iterator[Finding]:
    """A drafter with plain attention under an MLA target, on SGLang."""
    if case.engine != "sglang" or case.mla or not case.target_mla:
        return
    if not case.flags.get("speculative_draft_attention_backend"):
        yield case.found(
            "attention-backend", "WARN", "the target uses MLA, the drafter plain attention, and no"
            " --speculative-draft-attention-backend is set", "gives the drafter the target's MLA backend: may not start",
        )  # fmt: skip


def quantization(case: Case) -> Iterator[Finding]:
    """The drafter's own quantization and what it inherits."""
    own = case.config.get("quantization_config")
    extra = case.checkpoint / "hf_quant_config.json"
    if own is None and extra.is_file():
        own = _read_config(extra).get("quantization")
    if own is not None:
        algorithm = own.get("quant_algo") if "quant_algo" in own else own.get("quant_method")
        text = f"quantization is {algorithm}" if algorithm else "quant_algo is null: treated as unquantized"
        yield case.found(
            "quantization", "INFO", text, "reads the drafter's own quantization; packed shapes are not checked here"
        )
    unset = not case.flags.get("speculative_draft_model_quantization")
    if case.engine == "sglang" and case.flags.get("quantization") and own is None and unset:
        yield case.found(
                "quantization", "WARN", f"--quantization {case.flags['quantization']} and an unquantized drafter",
                "applies it to the drafter as well", "--speculative-draft-model-quantization unquant",
            )  # fmt: skip


# --- how it is served ---------------------------------------------------------------------------------------------


def serving(case: Case) -> Iterator[Finding]:
    """K, and SGLang's three numbers."""
    if case.engine == "vllm":
        if (case.k is None and case.flags.get("speculative_config") and not case.speculators) or (
            case.k is not None and case.k < 1
        ):
            yield case.found(
                "num-speculative-tokens", "ERROR", f"num_speculative_tokens is {case.k}", "refuses to start"
            )
        return
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    steps, topk, tokens = (case.flags.get(name) for name in names)
    given = [value for value in (steps, topk, tokens) if value is not None]
    if not given and case.k is not None:
        steps, topk, tokens = case.k, 1, case.k + 1
    elif not given:
        if case.flags and case.algorithm:
            auto = (5, 4, 8) if case.target_architecture in ("LlamaForCausalLM", "Grok1ForCausalLM") else (3, 1, 4)
            yield case.found(
                "draft-tokens", "WARN", "steps, topk and draft tokens are not set",
                f"takes {auto[0]} steps, topk {auto[1]}, {auto[2]} draft tokens for {case.target_architecture}",
            )  # fmt: skip
        return
    elif (steps or 0) >= 1 and topk == 1 and tokens is None:
        yield case.found(
            "draft-tokens", "WARN", f"steps {steps}, topk 1 and no draft tokens", f"sets draft tokens to {steps + 1}"
        )
        tokens = steps + 1
    elif len(given) < 3:
        yield case.found(
            "draft-tokens", "ERROR", f"steps {steps}, topk {topk}, draft tokens {tokens}: all three or none",
            "fails with an assertion or a TypeError at start",
        )  # fmt: skip
        return
    if min(steps, topk) < 1 or tokens < 2:
        yield case.found(
            "draft-tokens", "ERROR", f"steps {steps}, topk {topk}, draft tokens {tokens}: at least 1, 1 and 2",
            "fails at start or drafts nothing",
        )  # fmt: skip
        return
    most = conventions.most_draft_tokens(steps, topk)
    if tokens > most:
        effect = "sets draft tokens to steps + 1" if topk == 1 else "cannot select that many and fails"
        yield case.found(
            "draft-tokens", "ERROR",
            f"{tokens} draft tokens cannot be reached with {steps} steps and topk {topk}: at most {most}, root included",
            effect,
        )  # fmt: skip
    elif topk == 1 and tokens != steps + 1:
        yield case.found(
            "draft-tokens", "WARN", f"{tokens} draft tokens with {steps} steps and topk 1", f"sets them to {steps + 1}"
        )
    if case.k is not None and case.k != steps:
        yield case.found(
            "draft-tokens",
            "ERROR",
            f"K is {case.k}, speculative_num_steps is {steps}",
            f"drafts {steps} tokens per step",
        )


def tensor_parallel(case: Case) -> Iterator[Finding]:
    """Divisibility by the tensor parallel size, and the drafter's own size on vLLM."""
    size, config = case.tensor_parallel, case.config
    heads = config.get("num_attention_heads") or 0
    kv = config.get("num_key_value_heads") or heads
    if size > 1:
        wrong = [f"num_attention_heads {heads}"] if heads % size else []
        if not case.mla and kv % size and size % kv:
            wrong.append(f"num_key_value_heads {kv}")
        if (config.get("intermediate_size") or 0) % size:
            wrong.append(f"intermediate_size {config['intermediate_size']}")
        if wrong:
            yield case.found(
                "tensor-parallel", "ERROR", f"tensor parallel size {size} does not divide {', '.join(wrong)}",
                "refuses to start",
            )  # fmt: skip
    draft = case.draft_tp
    if case.engine == "vllm" and draft is not None and draft != size:
        if draft != 1:
            yield case.found(
                "tensor-parallel", "ERROR", f"draft_tensor_parallel_size {draft}, tensor parallel size {size}: 1 or equal",
                "refuses to start",
            )  # fmt: skip
        else:
            yield case.found(
                "tensor-parallel", "WARN", f"draft_tensor_parallel_size 1 with tensor parallel size {size}",
                "accepts it, but shards the EAGLE drafter like the target", "leave it out",
            )  # fmt: skip


def chat_template(case: Case) -> Iterator[Finding]:
    """chat_template_kwargs of the training data against those of serving."""
    trained = case.manifest.get("chat_template_kwargs")
    if trained is not None and case.chat_template_kwargs is not None and trained != case.chat_template_kwargs:
        yield case.found(
            "chat-template", "ERROR", f"data rendered with {json.dumps(trained)}, served with"
            f" {json.dumps(case.chat_template_kwargs)}", "answers in another style than the drafter saw",
        )  # fmt: skip
