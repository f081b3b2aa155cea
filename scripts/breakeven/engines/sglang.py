"""SGLang: offline generation, the server's command line, what it really runs, and what its numbers mean.

Facts were read from SGLang 0.5.9 and 0.5.23 and seen with 0.5.23 on the CPU (docs/engines.md). Acceptance comes from each
request's meta_info: its gauges in /metrics hold the last log interval only, its counters know no accepted tokens.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from breakeven import conventions
from breakeven.cli import UserError
from breakeven.engines import TENSOR_PARALLEL, Counters, Reply, Speculation, options, samples, tensor_parallel

NAME = "sglang"
DISTRIBUTIONS = ("sglang",)
METHODS = ("none", "eagle3", "ngram", "draft_model")
ALGORITHMS = {"eagle3": "EAGLE3", "ngram": "NGRAM", "draft_model": "STANDALONE"}
# Every verification step is counted, also one whose draft the n-gram table could not fill.
SKIPS_UNDRAFTED = ()
CONCURRENCY_FLAG = "max-running-requests"
CACHE_SETTING = "max-total-tokens or mem-fraction-static in the flags"
KNOWN_FAILURES: dict[str, str] = {}
# Stand-ins for the operators that only a build from source has; see its README.
CPU_OPERATORS = Path(__file__).parents[3] / "envs" / "sglang-cpu"
# meta_info of one request: the names of 0.5.23, then of 0.5.9.
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")


def environment(hardware: str) -> dict[str, str]:
    """Variables every run of this engine gets; an arm's or the config's own go on top."""
    variables = {"HF_HUB_OFFLINE": "1"}
    if hardware == "cpu":
        # Relative where it can be, so that a manifest does not name this machine's folders.
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.path.relpath(CPU_OPERATORS)}
    return variables


FORCES_ACCEPTANCE_ON = ("cpu", "cuda")


def forced_acceptance(length: float) -> tuple[dict[str, Any], dict[str, str]]:
    """(options of an arm, environment) of a server whose acceptance length is `length`, the bonus token included.

    Each step takes the whole number below or above, so that the mean is `length`; the output is garbage by design
    (0.5.23, srt/speculative/spec_utils.py: sample_simulated_acc_len).
    """
    return {}, {"SGLANG_SIMULATE_ACC_LEN": str(length), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


def algorithm(speculation: Speculation) -> str | None:
    """The name that --speculative-algorithm gets; None without speculation."""
    return speculation.options.get("algorithm", ALGORITHMS.get(speculation.method))


def draft_numbers(speculation: Speculation) -> tuple[int, int, int | None]:
    """(steps, topk, draft tokens): a chain of K drafts is K, 1, K + 1, since SGLang counts the root as a draft token."""
    chosen = speculation.options
    steps, topk = chosen.get("steps", speculation.k), chosen.get("topk", 1)
    return steps, topk, chosen.get("draft_tokens", steps + 1 if topk == 1 else None)


def refuse(speculation: Speculation, temperature: float, hardware: str) -> str | None:
    """Why this combination cannot be measured, or None. It names the rule by which SGLang would change it silently."""
    if speculation.method not in METHODS:
        return f"sglang knows no speculation method {speculation.method!r} here; use one of {', '.join(METHODS)}"
    if speculation.method == "none":
        return None
    known = ("algorithm", "steps", "topk", "draft_tokens")
    for name in speculation.options:
        if name not in known and not name.startswith("speculative-"):
            return (
                f"options.{name}: sglang's options are {', '.join(known)} and long options that begin with speculative-"
            )
    steps, topk, tokens = draft_numbers(speculation)
    given = f"steps {steps}, topk {topk}, draft_tokens {tokens}"
    if not all(isinstance(value, int) and value >= 1 for value in (steps, topk, tokens or 1)):
        return f"{given}: whole numbers of 1 or more are needed"
    if steps != speculation.k:
        return f"{given}, but k is {speculation.k}: K is the longest draft, so steps must be K; leave options.steps out"
    if tokens is None:
        return f"{given}: a tree (topk above 1) needs options.draft_tokens, the nodes to verify with the root"
    if topk == 1 and tokens != steps + 1:
        return (
            f"{given}: with topk 1 SGLang sets the draft tokens to steps + 1 = {steps + 1} and only warns in its log;"
            f" for {tokens - 1} drafted tokens write k: {tokens - 1}"
        )
    most = conventions.most_draft_tokens(steps, topk)
    if speculation.method != "ngram" and tokens > most:
        return f"{given}: at most {most} draft tokens can be reached with these steps and topk, the root included"
    if hardware == "cpu" and temperature > 0:
        return (
            f"temperature {temperature} with speculation: on the CPU SGLang verifies greedily whatever the temperature,"
            " so its text would not be the baseline's; use a protocol with temperature 0, or hardware: cuda"
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
    """The server's command line. `flags` are SGLang's own long options without dashes; True gives a bare switch, False leaves it out."""
    for name in flags:
        if name.startswith("speculative-"):
            raise UserError(f"flag {name}: speculation belongs into the arm's method, drafter, k and options")
    if flags.get(CONCURRENCY_FLAG, False) is False:
        raise UserError(
            f"flag {CONCURRENCY_FLAG} is missing: SGLang sets it to 48 where an arm speculates and to another number where none"
            " does, so the arms would not be comparable; write it into the engine's flags"
        )
    words = [python, "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", served_name]
    words += ["--host", "127.0.0.1", "--port", str(port)]
    return words + options(flags | {"enable-metrics": True} | speculative_flags(model, speculation, flags))


def speculative_flags(model: str, speculation: Speculation, flags: dict[str, Any]) -> dict[str, Any]:
    """An arm's speculation as long options; a draft_model arm without a drafter has the target as its own."""
    if speculation.method == "none":
        return {}
    steps, topk, tokens = draft_numbers(speculation)
    flags: dict[str, Any] = {"speculative-algorithm": algorithm(speculation)}
    if speculation.method == "ngram":
        # Its breadth is what becomes eagle_topk, and its steps bound nothing: the tree of n - 1 nodes does.
        flags |= {"speculative-ngram-min-bfs-breadth": 1, "speculative-ngram-max-bfs-breadth": topk}
        flags |= {"speculative-num-steps": steps}
    else:
        flags |= {"speculative-draft-model-path": speculation.drafter or model}
        flags |= {"speculative-num-steps": steps, "speculative-eagle-topk": topk}
    flags["speculative-num-draft-tokens"] = tokens
    return flags | {name: value for name, value in speculation.options.items() if name.startswith("speculative-")}


def optional_flags() -> set[str]:
    """Optional flags that the installed SGLang knows: none are used."""
    if importlib.util.find_spec("sglang") is None:
        raise UserError("sglang is not installed in this environment")
    return set()


def check_settings(
    session, url: str, model: str, speculation: Speculation, flags: dict[str, Any], log: Path
) -> dict[str, Any]:
    """What the server says it runs, for every option that was asked for; one that differs is a UserError.

    SGLang has no option for how many GPUs a drafter is spread over: as many as the target's attention (0.5.23,
    srt/speculative/draft_parallel.py).
    """
    response = session.get(f"{url}/server_info", timeout=60)
    if response.status_code == 404:
        response = session.get(f"{url}/get_server_info", timeout=60)  # 0.5.5 and before
    response.raise_for_status()
    asked = {name: value for name, value in flags.items() if name not in TENSOR_PARALLEL}
    asked |= {"tp-size": tensor_parallel(flags)} | speculative_flags(model, speculation, flags)
    return compare_settings(response.json(), asked)


def compare_settings(running: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """The running value of every asked option; a difference is a UserError that names both."""
    found = {}
    for name, value in asked.items():
        key = name.replace("-", "_")
        if key not in running:
            continue  # an alias or a switch that is stored under another name
        found[name] = running[key]
        if value is False and not isinstance(running[key], bool):
            continue  # left out
        same = running[key] == value or str(running[key]).upper() == str(value).upper()
        if not (same or parsed(running[key]) == parsed(value)):
            raise UserError(
                f"SGLang was asked for --{name} {value} and runs {running[key]}; ask for what it can run, or for another"
                " combination of options"
            )
    return found


def parsed(value: Any) -> Any:
    """What a text of JSON says, as --json-model-override-args is kept; anything else as it is."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):
        return value


def request(model: str, prompt: list[int], sampling: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(path, body) of a streaming request to SGLang's own interface, token ids in and out."""
    return "/generate", {"input_ids": prompt, "sampling_params": sampling_params(sampling), "stream": True}


def sampling_params(sampling: dict[str, Any]) -> dict[str, Any]:
    """Our names in SGLang's. It honours a seed only with enable-deterministic-inference."""
    names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    return {names.get(name, name): value for name, value in sampling.items()}


def read_event(event: dict[str, Any], reply: Reply) -> None:
    """Add one server-sent event to a reply: SGLang repeats all tokens so far, or sends the new ones if told to."""
    if "error" in event:
        raise UserError(f"the server answered with an error: {event['error']}")
    meta, tokens, text = event["meta_info"], event.get("output_ids") or [], event.get("text") or ""
    finish = meta.get("finish_reason")
    if finish and finish["type"] == "abort":
        raise UserError(f"the server aborted the request: {finish.get('message')}")
    reply.completion_tokens = meta["completion_tokens"]
    reply.cached_tokens = meta.get("cached_tokens")
    if len(tokens) < reply.completion_tokens:
        reply.token_ids, reply.text = reply.token_ids + tokens, reply.text + text
    else:
        reply.token_ids, reply.text = tokens, text
    if finish:
        reply.finish_reason = finish["type"]
        reply.histogram = next((meta[name] for name in HISTOGRAM if name in meta), None)
        reply.drafted = next((meta[name] for name in DRAFTED if name in meta), None)
        steps = meta.get("spec_verify_ct")
        if reply.histogram is not None and steps is not None and sum(reply.histogram) != steps:
            raise UserError(f"the server reports {steps} verification steps and a histogram of {sum(reply.histogram)}")


def read_counters(text: str, served_name: str) -> Counters:
    """Token and step counters of /metrics, over all labels. No accepted tokens; steps in 0.5.23, not yet in 0.5.9."""
    totals: dict[str, float] = {}
    for name, _, value in samples(text, NAME, served_name):
        totals[name] = totals.get(name, 0) + value
    steps = totals.get("spec_verify_calls_total")
    return Counters(
        steps=None if steps is None else int(steps),
        drafted=None,
        accepted=None,
        accepted_per_position=None,
        completion_tokens=int(totals.get("generation_tokens_total", 0)),
        prompt_tokens=int(totals.get("prompt_tokens_total", 0)),
        preempted=int(totals.get("num_retracted_requests_total", 0)),
    )


def score(session, url: str, model: str, prompt: list[int], output: list[int]) -> float | None:
    """Mean log-probability (nats a token) of `output` after `prompt` under the served target, by its prompt scoring."""
    body = {
        "input_ids": prompt + output,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
    }
    response = session.post(f"{url}/generate", json=body, timeout=300)
    if response.status_code != 200:
        return None
    entries = response.json()["meta_info"]["input_token_logprobs"][-len(output) :]
    if [entry[1] for entry in entries] != output:
        return None
    return sum(entry[0] for entry in entries) / len(entries)


def template_tokens(session, url: str, model: str, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> list[int]:
    """Token ids that the server's own chat template makes of a conversation."""
    body = {"model": model, "messages": messages, "add_generation_prompt": True, "chat_template_kwargs": kwargs}
    response = session.post(f"{url}/tokenize", json=body, timeout=60)
    response.raise_for_status()
    return response.json()["tokens"]


def generate(
    model: str, prompts: list[list[int]], sampling: list[dict[str, Any]], settings: dict[str, Any]
) -> Iterator[tuple[int, list[int], str]]:
    """Generate offline; yields (index, response token ids, finish reason) in the order of completion.

    sampling[i]: temperature, max_tokens, top_p, seed. settings: arguments of sglang.Engine. The engine's processes are
    children of this one and die with it; `environment`, PYTHONPATH included, must be in force before.
    """
    import asyncio

    import sglang

    engine = sglang.Engine(model_path=model, **settings)

    async def one(index: int) -> tuple[int, list[int], str]:
        answer = await engine.async_generate(input_ids=prompts[index], sampling_params=sampling_params(sampling[index]))
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "abort":
            raise UserError(f"SGLang aborted request {index}: {finish.get('message')}")
        return index, answer["output_ids"], finish["type"]

    try:
        waiting = {engine.loop.create_task(one(index)) for index in range(len(prompts))}
        while waiting:
            done, waiting = engine.loop.run_until_complete(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
            for task in done:
                yield task.result()
    finally:
        engine.shutdown()


def capture(
    model: str, sequences: list[list[int]], layers: list[int], config: dict[str, Any], settings: dict[str, Any]
) -> Any:
    """Hidden states [T, A, H] (torch, float32) of all sequences, as an EAGLE-3 drafter of these layers is fed (0.5.23).

    SGLang gets the layer ids that such a drafter's config.json carries for it, none for the default layers. It does not
    give the output of the last layer before the norm, so this is no extraction.
    """
    import sglang
    import torch

    ids = conventions.export_ids(layers, conventions.family(config), config["num_hidden_layers"]).get(
        "eagle_config", {}
    )
    forced = {
        "enable_return_aux_hidden_states": True,
        "speculative_algorithm": "EAGLE3",  # names the convention; without a drafter nothing speculates
        "return_aux_hidden_state_layer_ids": ids.get("eagle_aux_hidden_state_layer_ids"),
        "disable_radix_cache": True,
    }
    engine = sglang.Engine(model_path=model, **settings | forced)
    try:
        answers = engine.generate(
            input_ids=sequences, sampling_params={"max_new_tokens": 1, "temperature": 0}, return_hidden_states=True
        )
    finally:
        engine.shutdown()
    states = []
    for sequence, answer in zip(sequences, answers, strict=True):
        # One list of rows for each part of the prompt that was read at once.
        rows = torch.cat(
            [
                torch.tensor(part).view(-1, len(layers) * config["hidden_size"])
                for part in answer["meta_info"]["hidden_states"]
            ]
        )
        if len(rows) < len(sequence):
            raise UserError(f"SGLang gave hidden states of {len(rows)} of {len(sequence)} tokens")
        states.append(rows[: len(sequence)].view(len(sequence), len(layers), -1))
    return torch.cat(states)
