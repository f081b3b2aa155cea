"""What an experiment takes before it runs: jobs, tokens, bytes, model loads and time of each stage, and whether it fits.

Nothing is invented. Lengths and rates are those of finished jobs, else those that the config states (`budget`), else
lengths are bounds and times are unknown. A stage counts as done where its file lies; whether that file is up to date is
for Snakemake to say.
"""

import csv
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from breakeven import artefacts, configuration, conventions, load, selection
from breakeven.cli import UserError

GB = 1e9


@dataclass
class Found:
    """What lies in results/ and what is known about the target, as `survey` reads it."""

    done: set[str] = field(default_factory=set)  # files below results/
    shape: dict[str, Any] | None = None  # the target's config.json (its text part)
    shape_from: str = "unknown"
    prompt_tokens: float | None = None  # mean of the finished responses
    response_tokens: float | None = None
    tokens_per_second: dict[str, float] = field(default_factory=dict)  # by stage, of finished jobs
    startup_seconds: dict[str, float] = field(default_factory=dict)  # by engine, of finished passes
    prompts: dict[str, int] = field(default_factory=dict)  # prompts of each protocol


@dataclass
class Stage:
    """One row of the plan. tokens, bytes, seconds and loads are those of the jobs to do; None: unknown or not meant."""

    name: str
    done: int
    to_do: int
    tokens: float | None = None
    bytes: float | None = None
    loads: int = 0  # how often the target or an engine with it is loaded
    seconds: float | None = None  # loads included
    timed: bool = False  # whether a time is meant to be known at all
    gpus: int = 0


@dataclass
class Plan:
    stages: list[Stage]
    notes: list[str]
    bytes_per_token: int | None  # of the hidden states
    tokens: float  # whose hidden states are to be stored

    def bytes(self) -> float:
        return sum(stage.bytes or 0 for stage in self.stages)


def outputs(config: dict[str, Any]) -> dict[str, list[str]]:
    """One file below results/ for each job, by stage (the rule's name), in the order of the flow."""
    trained = configuration.reported_drafters(config)
    arms = config["arms"]
    drafting = [name for name, arm in arms.items() if arm.get("drafter")]
    replayed = configuration.replayed_arms(config)
    shards = configuration.shards(config) if trained else []
    walked = [name for name in trained if name in {arms[arm]["drafter"] for arm in replayed}]
    passes = [
        (name, number)
        for name, arm in arms.items()
        for number in range(1, configuration.most_passes(config, arm["protocol"]) + 1)
    ]
    return {
        "fetch_target": ["target/manifest.json"],
        "random_drafter": ["stepcost/drafter/manifest.json"]
        if any(drafter.get("checkpoint") == "random" for drafter in config["drafters"].values())
        else [],
        "fetch_drafter": [f"published/{name}/manifest.json" for name in configuration.fetched_drafters(config)],
        "curate_prompts": ["prompts/pool.parquet"] if trained else [],
        "select_prompts": ["prompts/selection.json"] if trained else [],
        "generate_responses": [f"responses/shard-{shard}.parquet" for shard in shards],
        "extract_hidden_states": []
        if online(config)
        else [f"hidden_states/shard-{shard}.safetensors" for shard in shards],
        "check_parity": [f"parity/{engine}.json" for engine in configuration.parity_engines(config)],
        "build_vocabulary": [f"drafters/{name}/vocabulary.safetensors" for name in trained],
        "train_drafter": [f"drafters/{name}/checkpoint/manifest.json" for name in trained],
        "evaluate_drafter": [f"drafters/{name}/offline.parquet" for name in walked],
        "check_drafter": [f"benchmarks/{name}/check.json" for name in drafting],
        "benchmark": [f"benchmarks/{name}/pass-{number}.parquet" for name, number in passes],
        "replay_served": [f"benchmarks/{name}/offline.parquet" for name in replayed],
        "compare": ["comparison/summary.parquet"],
        "report": ["report/index.html"],
    }


def online(config: dict[str, Any]) -> bool:
    """Whether hidden states are made inside training and never stored."""
    return config["hidden_states"].get("mode") == "online"


def plan(config: dict[str, Any], found: Found) -> Plan:
    """The plan of an experiment; pure."""
    stated = config.get("budget") or {}
    notes = [f"target: {found.shape_from}"]
    prompt, response, how = lengths(config, found)
    notes.append(f"tokens of a response and its prompt: {how}")

    per_token, layers = None, None
    if found.shape is not None:
        layers = conventions.layers_option(configuration.layers_option(config), found.shape["num_hidden_layers"])
        hidden_size, codec = found.shape["hidden_size"], config["hidden_states"].get("codec", "bfloat16")
        per_token = selection.bytes_per_token(hidden_size, len(layers), codec)
        states = (len(layers) + 1) * hidden_size * (2 if codec == "bfloat16" else 1)
        notes.append(
            f"hidden states: {per_token:,} bytes a token: ({len(layers)} layers + the last) x {hidden_size} in {codec} are"
            f" {states:,}, the other {per_token - states} are token id, greedy successor, mask"
            + ("" if codec == "bfloat16" else " and scales")
        )

    per_shard = config["prompts"]["shard_size"] * config["responses"]["samples_per_prompt"]
    held_out = config["prompts"]["held_out_fraction"]
    stages, stored = [], 0.0
    for name, files in outputs(config).items():
        todo = [file for file in files if file not in found.done]
        if not files:
            continue
        stage = Stage(name, len(files) - len(todo), len(todo), gpus=configuration.gpus(config, name))
        if name == "generate_responses":
            stage.tokens = len(todo) * per_shard * response
            stage.bytes = len(todo) * per_shard * (prompt + response) * 4  # token ids as int32, before compression
            stage.loads = 0 if config["responses"]["engine"] == "endpoint" else len(todo)
        elif name == "extract_hidden_states":
            stage.tokens = stored = len(todo) * per_shard * (prompt + response)
            stage.bytes = None if per_token is None else stored * per_token
            stage.loads = len(todo)
        elif name == "train_drafter":
            drafters = [config["drafters"][Path(file).parts[1]] for file in todo]
            stage.gpus = max((configuration.gpus(config, name, drafter) for drafter in drafters), default=0)
            seen = [_training_samples(config, drafter, held_out) * _epochs(drafter) for drafter in drafters]
            stage.tokens = sum(seen) * response
            sizes = [drafter_bytes(found.shape, len(layers or []), drafter["vocabulary_size"]) for drafter in drafters]
            stage.bytes = None if None in sizes else sum(sizes)
            stage.loads = len(todo) if online(config) else 0
        elif name == "build_vocabulary":
            sizes = [config["drafters"][Path(file).parts[1]]["vocabulary_size"] for file in todo]
            stage.bytes = sum(8 * size for size in sizes) + len(todo) * (found.shape or {}).get("vocab_size", 0)
        elif name == "benchmark":
            arms = [config["arms"][Path(file).parts[1]] for file in todo]
            stage.tokens = sum(
                load.requests(found.prompts.get(arm["protocol"], 0), protocol) * protocol["max_tokens"]
                for arm in arms
                for protocol in [config["protocols"][arm["protocol"]]]
            )
            stage.loads = len(todo)
            stage.gpus = max((configuration.gpus(config, name, arm) for arm in config["arms"].values()), default=0)
        elif name in ("replay_served", "check_parity") or (name == "evaluate_drafter" and online(config)):
            stage.loads = len(todo)
        if name in TIMED:
            notes += _time(stage, config, found, stated)
        stages.append(stage)
    loads, minutes = sum(stage.loads for stage in stages), stated.get("load_minutes")
    if loads and minutes is not None:
        notes.append(
            f"model loads: {loads} of {minutes:g} min, as the config states (budget.load_minutes), are"
            f" {_duration(60 * minutes * loads)}; larger shards (prompts.shard_size) take fewer"
        )
    if any(stage.name == "fetch_target" and stage.to_do for stage in stages):
        notes.append("the target itself is not in the bytes: its size is not known before it is fetched")
    return Plan(stages, notes, per_token, stored)


TIMED = ("generate_responses", "extract_hidden_states", "train_drafter", "benchmark")


def lengths(config: dict[str, Any], found: Found) -> tuple[float, float, str]:
    """Mean tokens of a prompt and of its response, and where they come from."""
    if found.response_tokens is not None:
        p, r = found.prompt_tokens, found.response_tokens
        return p, r, f"{p:.0f} + {r:.0f}, the mean of the finished responses"
    most_prompt, most_response = config["prompts"]["max_tokens"], config["responses"]["sampling"]["max_tokens"]
    stated = (config.get("budget") or {}).get("tokens_per_sample")
    if stated:
        r = min(stated, most_response)
        return (
            stated - r,
            r,
            f"{stated:,} together, as the config states (budget.tokens_per_sample), at most {r:,} of them a response",
        )
    return most_prompt, most_response, f"{most_prompt} + {most_response}, the most that the config allows"


def _training_samples(config: dict[str, Any], drafter: dict[str, Any], held_out: float) -> float:
    every = config["prompts"]["size"] * config["responses"]["samples_per_prompt"] * (1 - held_out)
    return min(every, drafter.get("samples") or every)


def _epochs(drafter: dict[str, Any]) -> int:
    return drafter["settings"].get("epochs", 1)


def _time(stage: Stage, config: dict[str, Any], found: Found, stated: dict[str, Any]) -> list[str]:
    """Set a stage's seconds, from rates of finished jobs (loads included, but for benchmarks) or stated ones."""
    stage.timed = True
    if not stage.to_do:
        stage.seconds = 0
        return []
    measured = found.tokens_per_second.get(stage.name)
    rate = measured or (stated.get("tokens_per_second") or {}).get(stage.name)
    if not rate or stage.tokens is None:
        return []
    seconds, source = stage.tokens / rate, "measured on finished jobs" if measured else "as the config states"
    if measured and stage.name != "benchmark":
        stage.seconds = seconds
        return [f"{stage.name}: {rate:,.0f} tokens/s, {source}, model loads included"]
    load = stated.get("load_minutes")
    load = None if load is None else 60 * load
    if stage.name == "benchmark" and found.startup_seconds:
        used = [
            found.startup_seconds[arm["engine"]]
            for arm in config["arms"].values()
            if arm["engine"] in found.startup_seconds
        ]
        load = sum(used) / len(used) if used else load
    if load is None and stage.loads:
        return [f"{stage.name}: {rate:,.0f} tokens/s, {source}; what a load takes is unknown (budget.load_minutes)"]
    stage.seconds = seconds + stage.loads * (load or 0)
    loads = f", and {load / 60:.1f} min for each load" if stage.loads else ""
    return [f"{stage.name}: {rate:,.0f} tokens/s, {source}{loads}"]


def drafter_bytes(shape: dict[str, Any] | None, n_layers: int, draft_vocabulary: int) -> int | None:
    """Bytes of an exported drafter (bf16): fc, one decoder layer of the target's kind (Llama, MLA), norms, head and maps.

    None for a target whose shape is unknown.
    """
    if shape is None:
        return None
    h, heads = shape["hidden_size"], shape["num_attention_heads"]
    kv, dim = shape.get("num_key_value_heads") or heads, shape.get("head_dim") or h // heads
    attention = 2 * h * (heads + 2 * kv) * dim + heads * dim * h
    if "kv_lora_rank" in shape:
        q, c, nope, rope, v = (
            shape[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        attention = 2 * h * (q + c + rope) + q * heads * (nope + rope) + c * heads * (nope + v) + heads * v * h + q + c
    parameters = n_layers * h * h + attention + 3 * h * shape["intermediate_size"] + 4 * h + draft_vocabulary * h
    return 2 * parameters + 8 * draft_vocabulary + shape["vocab_size"]


def gpu_notes(planned: Plan, available: int | None) -> list[str]:
    """Which jobs take several GPUs, and a warning where Snakemake hands out fewer: it would start them nevertheless."""
    wide = {stage.name: stage.gpus for stage in planned.stages if stage.gpus > 1}
    if not wide:
        return []
    said = "GPUs of a job: " + ", ".join(f"{name} {gpus}" for name, gpus in wide.items()) + ", the others 1 or none"
    most = max(wide.values())
    if available is not None and available < most:
        said += f"; {available} is handed out here, so say what there is: --resources gpu={most}, or a profile"
    return [said]


def check(planned: Plan, config: dict[str, Any], found: Found, folder: Path, free: int) -> None:
    """Raise a UserError where the plan writes more than `free` bytes: the numbers, and what each lever would save."""
    needed = planned.bytes()
    if needed <= free:
        return
    said = f"{folder}: the stages to do write {needed / GB:,.1f} GB and {free / GB:,.1f} GB are free"
    if planned.tokens and planned.bytes_per_token:
        n_layers = len(conventions.layers_option(configuration.layers_option(config), found.shape["num_hidden_layers"]))
        hidden_size, tokens = found.shape["hidden_size"], planned.tokens
        int8 = selection.bytes_per_token(hidden_size, n_layers, "int8") * tokens / GB
        said += (
            f"; the hidden states are {planned.bytes_per_token * tokens / GB:,.1f} GB of it ({tokens:,.0f} tokens of"
            f" {planned.bytes_per_token:,} bytes): hidden_states.codec int8 makes that {int8:,.1f} GB,"
            f" hidden_states.mode online 0, each layer less (hidden_states.layers) saves"
            f" {planned.bytes_per_token / (n_layers + 1) * tokens / GB:,.1f} GB, and so do fewer or shorter samples"
            f" (prompts.size, responses.samples_per_prompt, responses.sampling.max_tokens); at most"
            f" {free // planned.bytes_per_token:,} tokens fit"
        )
    raise UserError(said + "; or put results/ on a larger disk")


# --- what there is ------------------------------------------------------------------------------------------------


def survey(config: dict[str, Any], results: Path, logs: Path, resources: Path) -> Found:
    """Read what finished jobs left in results/ and logs/, and the target's shape; nothing of another target's run."""
    found = Found()
    every = outputs(config)
    found.shape, found.shape_from = target_shape(config["target"], results, resources)
    for name, protocol in config["protocols"].items():
        lines = Path(protocol["prompts"]).read_text().splitlines()
        found.prompts[name] = sum(1 for line in lines if line.strip())
    if fetched_from(config["target"], results) is False:
        found.shape_from += f"; what lies in {results} is of another target and counts as not done"
        return found
    found.done = {file for files in every.values() for file in files if (results / file).is_file()}

    counts = [_counts(results / file, "responses") for file in every["generate_responses"] if file in found.done]
    total = sum(count.get("responses", 0) for count in counts)
    if total:
        found.prompt_tokens = sum(count["prompt_tokens"] for count in counts) / total
        found.response_tokens = sum(count["response_tokens"] for count in counts) / total
    for stage, artefact, key in (
        ("generate_responses", "responses", "response_tokens"),
        ("extract_hidden_states", "hidden_states", "tokens"),
    ):
        jobs = [
            (_counts(results / file, artefact).get(key, 0), _seconds(logs / stage / f"{Path(file).stem}.tsv"))
            for file in every[stage]
            if file in found.done
        ]
        _rate(found, stage, jobs)
    jobs = []
    for file in every["train_drafter"]:
        if file in found.done:
            manifest = artefacts.read_manifest(results / file, "drafter")
            epochs = manifest["parameters"].get("settings", {}).get("epochs", 1)
            tokens = epochs * manifest["counts"].get("training_response_tokens", 0)
            jobs.append((tokens, _seconds(logs / "train_drafter" / f"{Path(file).parts[1]}.tsv")))
    _rate(found, "train_drafter", jobs)

    jobs, startup = [], {}
    for file in every["benchmark"]:
        if file in found.done:
            manifest = artefacts.read_manifest(artefacts.manifest_path(results / file), "benchmark")
            if "server" in manifest:
                startup.setdefault(manifest["parameters"]["engine"], []).append(manifest["server"]["startup_s"])
                rows = artefacts.read_table(results / file)
                begins, lasted = rows["sent_at"].to_pylist(), rows["e2e_s"].to_pylist()
                seconds, _ = load.in_flight(begins, [a + b for a, b in zip(begins, lasted, strict=True)], 1)
                jobs.append((manifest["counts"]["completion_tokens"], seconds))
    _rate(found, "benchmark", jobs)
    found.startup_seconds = {engine: sum(seconds) / len(seconds) for engine, seconds in startup.items()}
    return found


def _counts(path: Path, artefact: str) -> dict[str, Any]:
    manifest = artefacts.manifest_path(path)
    return artefacts.read_manifest(manifest, artefact)["counts"] if manifest.is_file() else {}


def _seconds(path: Path) -> float | None:
    """Run time of a job from Snakemake's benchmark file; of the last attempt where there were several."""
    if not path.is_file():
        return None
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return float(rows[0]["s"]) if rows else None


def _rate(found: Found, stage: str, jobs: list[tuple[float, float | None]]) -> None:
    timed = [(tokens, seconds) for tokens, seconds in jobs if tokens and seconds]
    if timed:
        found.tokens_per_second[stage] = sum(t for t, _ in timed) / sum(s for _, s in timed)


def fetched_from(source: dict[str, Any], results: Path) -> bool | None:
    """Whether the target in `results` was fetched from `source` (config, target); None where there is none."""
    manifest = results / "target" / "manifest.json"
    if not manifest.is_file():
        return None
    origin = artefacts.read_manifest(manifest, "target")["parameters"]["source"]
    asked = {"kind": source["source"], **source}
    asked |= {key: str(Path(asked[key])) for key in ("path", "config") if key in asked}
    return all(origin[key] == asked.get(key) for key in ORIGIN if key in origin)


ORIGIN = ("kind", "package", "path", "repo", "revision", "config")  # what a target's manifest says of its source


def target_shape(source: dict[str, Any], results: Path, resources: Path) -> tuple[dict[str, Any] | None, str]:
    """The target's config without its weights, and where it was read.

    The target fetched from this source, else a local folder, else a file in `resources` that describes this repository
    or package, else the hub. None where none of them has it.
    """
    fetched = results / "target" / "config.json"
    if fetched.is_file() and fetched_from(source, results):
        return conventions.text_config(artefacts.read_json(fetched)), "the shape of the fetched target"
    name = source.get("path") or source.get("repo") or source["package"].split("==")[0]
    local = Path(source["config"]) if source["source"] == "random" else Path(name) / "config.json"
    if local.is_file():
        return conventions.text_config(artefacts.read_json(local)), f"the shape in {local}"
    if source["source"] == "path":
        raise UserError(f"target.path: {local} is no file; give the folder of a transformers checkpoint")
    for path in sorted(resources.glob("*.json")):
        described = artefacts.read_json(path)
        if name in described["describes"]:
            return conventions.text_config(described["config"]), (
                f"not fetched; the shape of {name} is taken from {path}, which holds published facts, no download"
            )
    shape, why = _from_hub(source) if source["source"] == "hub" else (None, "it is not fetched")
    if shape is not None:
        return shape, f"the shape of {name} at {source['revision']}, read from the hub"
    return None, (
        f"the shape of {name} is unknown ({why}), and with it all bytes; fetch the target or describe it in"
        f" {resources}/NAME.json"
    )


def _from_hub(source: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        path = hf_hub_download(source["repo"], "config.json", revision=source["revision"])
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, ValueError, OSError):
        return None, "the hub cannot be reached or does not have it"
    return conventions.text_config(artefacts.read_json(path)), ""


def free_bytes(folder: Path) -> int:
    """Free space of the file system that holds, or will hold, `folder`."""
    return shutil.disk_usage(next(p for p in [folder, *folder.absolute().parents] if p.exists())).free


# --- the table ----------------------------------------------------------------------------------------------------


def table(planned: Plan, hardware: str) -> str:
    """The plan as an aligned Markdown table, with its notes below."""
    head = ["stage", "done", "to do", "tokens", "writes", "model loads", "time", "GPU hours"]
    rows = []
    for stage in planned.stages:
        hours = stage.seconds / 3600 * stage.gpus if stage.seconds is not None and stage.gpus else None
        unknown = "unknown" if stage.timed else ""
        rows.append(
            [
                stage.name,
                str(stage.done),
                str(stage.to_do),
                "" if stage.tokens is None else f"{stage.tokens:,.0f}",
                _size(stage) if stage.to_do else "",
                str(stage.loads or ""),
                unknown if stage.seconds is None else _duration(stage.seconds),
                (unknown if stage.gpus else "") if hours is None else f"{hours:,.1f}",
            ]
        )
    loads = sum(stage.loads for stage in planned.stages)
    done, to_do = sum(s.done for s in planned.stages), sum(s.to_do for s in planned.stages)
    rows.append(["together", str(done), str(to_do), "", _bytes(planned.bytes()), str(loads or ""), "", ""])
    if hardware == "cpu":
        head, rows = head[:-1], [row[:-1] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *others]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(head), line(rule), *map(line, rows), "", *(f"- {note}" for note in planned.notes)]) + "\n"


def _size(stage: Stage) -> str:
    known = ("generate_responses", "extract_hidden_states", "build_vocabulary", "train_drafter")
    return _bytes(stage.bytes) if stage.bytes is not None else "unknown" if stage.name in known else ""


def _bytes(value: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.0f} B"


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"
