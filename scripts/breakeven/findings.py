"""What the preflight can report: the registry of findings, which docs/checks.md prints, and the finding itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

LEVELS = ("ERROR", "WARN", "INFO")


@dataclass(frozen=True)
class Check:
    """One thing the preflight knows: its level(s), what it catches, on which engines, and the mend."""

    level: str
    what: str
    engines: str
    mend: str


CHECKS = {
    # what the checkpoint is
    "weights-unreadable": Check(
        "ERROR", "no safetensors, a pickle, a cut-off file or a missing shard", "both",
        "convert or copy the checkpoint again",
    ),
    "not-a-drafter": Check(
        "ERROR", "a checkpoint without `fc` that is a whole language model", "both",
        "give the drafter's folder, or use STANDALONE (SGLang) or draft_model (vLLM)",
    ),
    "eagle1-head": Check(
        "ERROR", "an EAGLE-1/2 head (fc [H, 2H], no d2t) served as EAGLE-3", "both",
        "use the algorithm EAGLE (SGLang) or eagle (vLLM), or train an EAGLE-3 drafter",
    ),
    "algorithm": Check(
        "ERROR", "the speculative algorithm's name does not fit the checkpoint", "both",
        "EAGLE-3 needs EAGLE3 (SGLang) or eagle3 (vLLM)",
    ),
    "format": Check(
        "ERROR", "the speculators format, or a config without model_type, where the engine cannot read it", "both",
        "export config.json in the LlamaForCausalLMEagle3 layout",
    ),
    "drafter-architecture": Check(
        "ERROR", "the engine's version has no class for the drafter's architecture", "both",
        "take a newer engine, or name the architecture as the engine does",
    ),
    "target-architecture": Check(
        "ERROR/INFO", "the engine's version cannot hand out this target's hidden states", "both",
        "take an engine version that supports EAGLE-3 for this target",
    ),
    "engine-version": Check(
        "ERROR/WARN", "stated and installed version differ, or the version is older than any that was read", "both",
        "state the version that will serve",
    ),
    # tensors
    "tensor-missing": Check(
        "ERROR", "a required tensor is not in the file", "both: uninitialised weights, no word", "export again",
    ),
    "tensor-name": Check(
        "ERROR", "a tensor is named as the engine does not read it", "both", "rename it (--fix does)",
    ),
    "tensor-extra": Check(
        "ERROR", "a tensor that the engine has no place for", "vLLM: fails to load; SGLang: dropped, no word",
        "export without it, or serve with an engine that knows it",
    ),
    "tensor-shape": Check("ERROR", "a tensor's shape contradicts the config", "both", "export again"),
    "head-shape": Check(
        "ERROR", "rows or columns of q, k, v, o contradict heads x head_dim",
        "both; vLLM narrows the weights without a word", "write the heads and head_dim of training into config.json",
    ),
    "fc-width": Check(
        "ERROR", "fc's columns are not (number of features) x (target's hidden size)", "both",
        "state the layers, num_aux_hidden_states and target_hidden_size as trained",
    ),
    "fc-skipped": Check(
        "ERROR", "the features are as wide as the embeddings, so fc is skipped", "SGLang, no word", "use more layers",
    ),
    "hidden-size": Check(
        "ERROR", "drafter and target widths differ without target_hidden_size or own embeddings", "both",
        "set target_hidden_size and ship embed_tokens",
    ),
    "draft-layers": Check(
        "ERROR", "num_hidden_layers contradicts the file or what the engine can build", "both",
        "write the drafter's own layer count (1)",
    ),
    "nonfinite": Check("ERROR", "NaN or infinite weights", "both: served, acceptance 0", "train or export again"),
    "lm-head-missing": Check(
        "ERROR/WARN", "no lm_head.weight", "vLLM: the target's head; SGLang: random unless draft_vocab_size is null",
        "ship the head",
    ),
    "lm-head-rows": Check(
        "ERROR", "lm_head rows are not draft_vocab_size", "both", "write draft_vocab_size = rows of lm_head",
    ),
    "lm-head-tied": Check(
        "ERROR", "tie_word_embeddings is true, so the drafter's own head is dropped", "SGLang, no word",
        "set tie_word_embeddings to false (--fix does)",
    ),
    "draft-vocab-size": Check(
        "ERROR", "config.json lacks draft_vocab_size", "SGLang: fails to start; vLLM: takes vocab_size",
        "write draft_vocab_size (--fix does)",
    ),
    "embeddings": Check(
        "ERROR/WARN", "embed_tokens differs from the target's rows",
        "vLLM keeps the drafter's own; SGLang takes the target's", "export without embed_tokens (--fix does)",
    ),
    # vocabulary
    "d2t-missing": Check(
        "ERROR", "a pruned head without d2t", "both: the first ids are drafted, no word", "export d2t (--fix does)",
    ),
    "d2t-absolute": Check(
        "ERROR", "d2t holds target ids; engines expect offsets (target id = j + d2t[j])", "both",
        "subtract 0, 1, 2, ... (--fix does)",
    ),
    "d2t-range": Check("ERROR", "j + d2t[j] leaves the target's vocabulary", "both", "export d2t again"),
    "d2t-duplicate": Check("ERROR", "two draft ids map to one target id", "both", "export d2t again"),
    "d2t-unsorted": Check(
        "ERROR", "mapped ids are not ascending, so head rows and ids may not belong together", "both",
        "export d2t and lm_head in ascending order of target ids",
    ),
    "d2t-t2d": Check("ERROR", "d2t and t2d name different target ids", "both read d2t only", "export both again"),
    "d2t-identity": Check(
        "WARN", "d2t maps to the first ids of the vocabulary and no t2d confirms it", "both", "export t2d as well",
    ),
    "d2t-shape": Check("ERROR", "d2t or t2d has a wrong length or dtype", "both", "int64 [draft vocab], bool [vocab]"),
    "d2t-full-vocabulary": Check(
        "ERROR", "d2t in the file of a drafter with the whole vocabulary", "vLLM >= 0.30.0: fails to load",
        "drop d2t (--fix does)",
    ),
    "vocabulary-end": Check(
        "WARN", "an end-of-text id of the target is not in the draft vocabulary", "both: it is never drafted",
        "keep it in when the vocabulary is chosen",
    ),
    "vocabulary-size": Check(
        "ERROR/WARN", "drafter and target vocab_size differ (WARN: in padding only)", "both",
        "use the target's vocab_size; never edit it to make a pair fit",
    ),
    "tokenizer": Check("ERROR", "drafter and target tokenizers differ", "both", "use a drafter for this target"),
    # layers
    "layer-ids": Check(
        "ERROR", "the engine captures other layers than the drafter was trained on", "both, no word",
        "write ids for both engines (--fix does)",
    ),
    "layer-ids-unstated": Check(
        "WARN", "neither config, manifest nor --layers says which layers were trained on", "both guess the default",
        "state --layers, or write the ids",
    ),
    "layer-ids-ambiguous": Check(
        "WARN", "the engines would capture different layers from these ids, and nothing says which is right", "both",
        "state --layers as trained",
    ),
    "layer-ids-runner": Check(
        "WARN", "vLLM's two model runners read these ids differently", "vLLM >= 0.22.0",
        "write the ids at the top level as well",
    ),
    "layer-ids-range": Check(
        "ERROR", "an id names a layer the engine never reaches", "both", "write ids within the target",
    ),
    "layer-order": Check(
        "ERROR", "the stated layers are not ascending; engines always feed them so", "both",
        "permute fc's columns to ascending layers, or train so",
    ),
    # numbers the config carries
    "norm-flag": Check(
        "ERROR", "a norm flag is set that the engine's version ignores", "ignored, no word: acceptance falls",
        "serve with a version that honours it, or train without",
    ),
    "norm-tensor": Check(
        "ERROR", "a norm's tensor is there without its flag, or the flag without its tensor", "both",
        "set the flag as trained",
    ),
    "norm-manifest": Check("ERROR", "a norm flag differs from the manifest's", "both", "write the flag as trained"),
    "rope-theta": Check(
        "ERROR", "RoPE base as the engine reads it differs from the one trained with", "both",
        "write it as rope_theta and in rope_parameters (--fix does)",
    ),
    "rope-spelling": Check(
        "ERROR/WARN", "the RoPE base is spelled as this version does not read it", "SGLang <= 0.5.9, vLLM on "
        "transformers 4", "write both spellings (--fix does)",
    ),
    "rope-scaling": Check(
        "ERROR", "rope_scaling and rope_parameters say different things", "both: rope_scaling holds, no word",
        "write the scaling of training in both",
    ),
    "rope-target": Check(
        "WARN", "RoPE base or scaling differs from the target's and no manifest says it was trained so", "both",
        "use the target's",
    ),
    "rope-mla": Check(
        "WARN", "an MLA drafter without RoPE scaling loses its base", "vLLM < 0.28.0", "take vLLM 0.28.0 or later",
    ),
    "positions": Check(
        "ERROR/WARN", "the drafter's max_position_embeddings is below the served length",
        "vLLM >= 0.27.0 raises it; older: garbage beyond it; SGLang: refuses to start",
        "write the target's max_position_embeddings (--fix does)",
    ),
    "dtype": Check(
        "ERROR/WARN", "drafter and target dtype differ", "vLLM casts; SGLang loads as configured (none: float16)",
        "write the target's dtype",
    ),
    "attention-bias": Check(
        "ERROR", "attention biases and attention_bias contradict each other or the engine", "SGLang drops them",
        "train without, or serve with vLLM",
    ),
    "quantization": Check(
        "INFO/WARN", "the drafter's quantization as it will be read", "both", "state the drafter's quantization",
    ),
    "mla-q-lora": Check("ERROR", "an MLA drafter without q_lora_rank", "both", "set q_lora_rank"),
    "mla-model-type": Check(
        "ERROR", "an MLA drafter that calls itself deepseek_v3 is taken for multi-token prediction", "vLLM",
        'write "model_type": "deepseek_v2"',
    ),
    "rope-interleave": Check(
        "ERROR", "an MLA drafter whose rotated dimensions are laid out otherwise than the engine turns them", "both",
        "train with interleaved pairs, and write rope_interleave: true",
    ),
    "attention-backend": Check(
        "WARN", "a drafter with plain attention under an MLA target takes the target's backend", "SGLang",
        "--speculative-draft-attention-backend flashinfer (or triton, fa3)",
    ),
    # how it is served
    "draft-tokens": Check(
        "ERROR/WARN", "steps, topk and draft tokens that cannot be reached or are changed silently", "SGLang",
        "steps = K, topk = 1, draft tokens = K + 1",
    ),
    "num-speculative-tokens": Check("ERROR", "K missing or below 1", "vLLM", "set num_speculative_tokens >= 1"),
    "tensor-parallel": Check(
        "ERROR/WARN", "heads or widths that the tensor parallel size does not divide", "both",
        "serve with a size that divides them",
    ),
    "chat-template": Check(
        "ERROR", "chat_template_kwargs of serving and of the training data differ", "both",
        "serve as the data was rendered",
    ),
}  # fmt: skip


@dataclass
class Finding:
    """One finding; `fix` mends (config, tensors) in place where the mend is certain."""

    id: str
    level: str
    message: str
    engine: str
    version: str
    effect: str
    mend: str
    allowed: bool = False
    fix: Callable[[dict, dict], None] | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The finding for check.json."""
        keys = ("id", "level", "message", "engine", "version", "effect", "mend", "allowed")
        return {**{key: getattr(self, key) for key in keys}, "fixable": self.fix is not None}


def checks_table() -> str:
    """docs/checks.md: every finding the preflight can report, as Markdown."""
    lines = [
        "# Preflight findings",
        "",
        "What `scripts/check_drafter.py` can report; written from the registry in `scripts/breakeven/findings.py` with",
        "`python scripts/check_drafter.py --list > docs/checks.md`. With an ERROR the script exits with 1, and the workflow",
        "starts no server for that arm; WARN and INFO do nothing. `--allow ID`, or `allow: [ID]` of an arm in the config,",
        "overrides one, visibly. `--fix OUT` writes a corrected copy where the mend is certain.",
        "",
        "| id | level | what | engines | mend |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| `{id}` | {c.level} | {c.what} | {c.engines} | {c.mend} |" for id, c in CHECKS.items()]
    return "\n".join(lines) + "\n"
