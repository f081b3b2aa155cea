# All Python of the rules: which files, which parameters. Nothing here depends on time, machine or order.
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

sys.path.insert(0, str(Path(workflow.basedir) / "scripts"))

from breakeven import artefacts, configuration, dependencies
from breakeven.cli import UserError

try:
    configuration.drop_null(config)
    configuration.add_points(config)
    configuration.check(
        config, Path(workflow.basedir) / "schemas" / "config.schema.yaml"
    )
except UserError as error:
    raise WorkflowError(str(error)) from None

# A job ends with the Snakemake that started it, even one that was killed (breakeven/cli.py).
shell.prefix(f"set -euo pipefail; export BREAKEVEN_PARENT={os.getpid()}; ")

# Measuring jobs take all 100 of it. `--resources gpu=4` replaces the profile's list, and what has no limit holds nothing back.
if "machine" not in workflow.global_resources:
    workflow.register_resource("machine", 100)

HARDWARE = config["hardware"]
ENGINES = configuration.engines_used(config)
ENVIRONMENTS = [
    "workflow",
    f"model-{HARDWARE}",
    *(f"{engine}-{HARDWARE}" for engine in ENGINES),
]
SHARDS = configuration.shards(config)
TRAINED = configuration.trained_drafters(config)
FETCHED = configuration.fetched_drafters(config)
REPORTED = configuration.reported_drafters(config)
DRAFTER_MANIFESTS = configuration.drafter_manifests(config)
REPLAYED = configuration.replayed_arms(config)
BENCHMARK_PROMPTS = configuration.benchmark_prompts(config)
LAYERS = configuration.layers_option(config)
ONLINE = config["hidden_states"]["mode"] == "online"
RESPONSES_ENGINE = config["responses"]["engine"]
RESPONSES_ENVIRONMENT = (
    "workflow" if RESPONSES_ENGINE == "endpoint" else RESPONSES_ENGINE
)
STATES_ENGINE = config["hidden_states"]["engine"]
STATES_ENVIRONMENT = "model" if STATES_ENGINE == "transformers" else STATES_ENGINE
STORED_CODEC = "none" if ONLINE else config["hidden_states"]["codec"]

if config["storage"] and not importlib.util.find_spec("snakemake_storage_plugin_s3"):
    raise WorkflowError(
        f"config, storage: snakemake-storage-plugin-s3 is not beside {sys.executable}; run `make cluster` and use"
        " .envs/cluster/bin/snakemake"
    )

NO_CURVE = (
    "config, data_curve: there is none; set it, for example"
    " {drafter: own, samples: [10000, 20000, 44000, 88000], k: [3, 5]}, as experiments/data-curve.yaml does"
)

# Whatever measurements wait for goes before them, so that all arms become ready together and their passes interleave.
PREPARING = 5000


wildcard_constraints:
    arm="|".join(config["arms"]),
    drafter="|".join(TRAINED) or "none",
    published="|".join(FETCHED) or "none",
    engine="|".join(ENGINES),
    protocol="|".join(config["protocols"]),
    shard=r"\d{6}\d*",
    number=r"\d+",


def flavour(name):
    """An environment's folder: the workflow's own has one flavour, the others one for each kind of hardware."""
    return name if name in ENVIRONMENTS else f"{name}-{HARDWARE}"


def environment(name):
    """The input that ties a rule to the environment it runs in."""
    return f".envs/{flavour(name)}/ready.txt"


def python(name):
    return f".envs/{flavour(name)}/bin/python"


def script(name, *modules):
    """A script and every library module it imports, itself first; `modules` are those it loads by name."""
    return dependencies.files(workflow.basedir, f"scripts/{name}.py", *modules)


def engine_files(name):
    """What runs an engine: its module, and on the CPU the operators that stand in for SGLang's own."""
    stand_in = sorted(
        path.relative_to(workflow.basedir).as_posix()
        for path in Path(workflow.basedir).glob(f"envs/{name}-{HARDWARE}/**/*.py")
    )
    return [f"scripts/breakeven/engines/{name}.py", *stand_in]


def by_hardware(section):
    """The part of a config section that belongs to this hardware."""
    return section[HARDWARE]


def as_json(value):
    return configuration.as_json(value)


def response_settings(section, engine=RESPONSES_ENGINE):
    """An engine's own part of responses.settings or responses.environment; of an endpoint, what its model is called."""
    if engine == "endpoint":
        model = {"model": config["responses"]["endpoint"].get("model")}
        return as_json(model if section == "settings" else {})
    return as_json(by_hardware(config["responses"][section][engine]))


def endpoint_option(wildcards, threads):
    """How a running server is reached. Takes threads, so that Snakemake does not track it: an address changes no response."""
    if RESPONSES_ENGINE != "endpoint":
        return ""
    endpoint = {"concurrency": 64} | dict(config["responses"]["endpoint"])
    endpoint.pop("model", None)
    return ["--endpoint", as_json(endpoint)]


def engine_modules(engine):
    """An engine's files and, where it extracts, the connector that runs inside it."""
    connector = f"scripts/breakeven/engines/{engine}_connector.py"
    there = Path(workflow.basedir, connector).is_file()
    return engine_files(engine) + ([connector] if there else [])


def states_settings(section):
    """The settings or the environment of the engine that extracts; transformers takes none."""
    return (
        "{}"
        if STATES_ENGINE == "transformers"
        else response_settings(section, STATES_ENGINE)
    )


def shard_file(folder, name):
    """A shard's file: in results/, or in the object store that config, storage, names for its folder."""
    store = config["storage"].get(folder)
    return storage.s3(f"{store}/{name}") if store else f"results/{folder}/{name}"


def shards(folder, suffix):
    return [shard_file(folder, f"shard-{shard}.{suffix}") for shard in SHARDS]


def sequences(suffix):
    """What drafters are trained and judged on, or its manifests: hidden-state shards, or online response shards."""
    folder, data = (
        ("responses", "parquet") if ONLINE else ("hidden_states", "safetensors")
    )
    return shards(folder, data if suffix == "data" else suffix)


def sequences_option():
    return "--responses" if ONLINE else "--hidden-states"


def training_option():
    """Stored hidden states say themselves which layers they are."""
    tokens = config["hidden_states"]["batch_tokens"]
    online = f"--layers {LAYERS} --batch-tokens {tokens} --responses"
    return online if ONLINE else "--hidden-states"


def arm_of(wildcards):
    return config["arms"][wildcards.arm]


def arm_json(wildcards):
    return as_json(
        {"name": wildcards.arm}
        | {k: v for k, v in arm_of(wildcards).items() if k != "protocol"}
    )


def arm_script(wildcards):
    return script("benchmark", *engine_files(arm_of(wildcards)["engine"]))


def arm_environment(wildcards):
    return environment(arm_of(wildcards)["engine"])


def arm_python(wildcards):
    return python(arm_of(wildcards)["engine"])


def arm_check(wildcards):
    """What the preflight found about an arm with a drafter; with an error that is not allowed no server is started."""
    gated = arm_of(wildcards).get("drafter")
    return f"results/benchmarks/{wildcards.arm}/check.json" if gated else []


def arm_check_option(wildcards):
    check = arm_check(wildcards)
    return f"--check {check}" if check else ""


def check_options(wildcards):
    return configuration.check_options(config, wildcards.arm)


def arm_conda(wildcards):
    return f"../envs/{arm_of(wildcards)['engine']}-{HARDWARE}.yaml"


def arm_settings(wildcards):
    return engine_settings(arm_of(wildcards)["engine"])


def engine_settings(name):
    engine = config["engines"][name]
    return as_json(
        {
            "startup_timeout": engine["startup_timeout"],
            "flags": by_hardware(engine["flags"]),
            "environment": by_hardware(engine["environment"]),
        }
    )


def arm_protocol(wildcards):
    """A protocol less its prompt file, which is an input, and its numbers of passes, which shape no pass."""
    name = arm_of(wildcards)["protocol"]
    asked = {
        key: value
        for key, value in config["protocols"][name].items()
        if key not in ("prompts", "passes", "max_passes")
    }
    return as_json({"name": name} | asked)


def arm_prompts(wildcards):
    return config["protocols"][arm_of(wildcards)["protocol"]]["prompts"]


def step_cost_vocabulary_option():
    """Draft vocabulary of the random drafter: as configured, else of the first trained drafter, else the target's."""
    sizes = [config["drafters"][name]["vocabulary_size"] for name in TRAINED]
    size = config["stepcost"]["vocabulary_size"] or next(iter(sizes), None)
    return f"--vocabulary-size {size}" if size else ""


def step_cost_settings():
    return as_json(
        {k: v for k, v in config["stepcost"].items() if k != "vocabulary_size"}
    )


def samples_option(wildcards):
    samples = config["drafters"][wildcards.drafter].get("samples")
    return f"--samples {samples}" if samples else ""


def most_samples_option(wildcards, threads):
    """What the prompts must suffice for. Takes threads, so that Snakemake does not track it: it selects no other prompts."""
    most = configuration.most_samples(config)
    return f"--samples {most}" if most else ""


def published_files(wildcards):
    """The files of a published drafter whose repository is a local folder."""
    return configuration.local_files(
        config["drafters"][wildcards.published]["checkpoint"]["repo"]
    )


def checkpoint_folder(drafter):
    return configuration.checkpoint_folder(config, drafter)


def checkpoint_files(drafter):
    """The tracked files of a drafter: a trained or fetched one's manifest, or the files of a given checkpoint."""
    return configuration.checkpoint_files(config, drafter)


def start_of(wildcards):
    """What a drafter's training starts from, as train_drafter.py takes it."""
    return configuration.start_of(config, wildcards.drafter)


def start_files(wildcards):
    return configuration.start_files(config, wildcards.drafter)


def gpus(rule):
    return configuration.gpus(config, rule)


def parity_files():
    """What must hold before a drafter is trained: each engine that serves it captures the layers that were extracted."""
    return [
        f"results/parity/{name}.json" for name in configuration.parity_engines(config)
    ]


def parity_states():
    """The first shard's hidden states; online there are none."""
    return [] if ONLINE else shards("hidden_states", "safetensors")[0]


def parity_states_option():
    return "" if ONLINE else "--hidden-states"


def parity_gpus(wildcards):
    return configuration.gpus(config, "check_parity", {"engine": wildcards.engine})


def states_gpus(wildcards):
    return gpus("extract_hidden_states")


def response_gpus(wildcards):
    return gpus("generate_responses")


def drafter_gpus(wildcards):
    return configuration.gpus(
        config, "train_drafter", config["drafters"][wildcards.drafter]
    )


def drafter_sharded(wildcards):
    """An option of train_drafter.py; a resource, as `gpu` is, since it does not change the result."""
    return "--sharded" if config["drafters"][wildcards.drafter].get("sharded") else ""


def drafter_threads(wildcards):
    """Each rank prepares its own batches."""
    return config["threads"] * max(1, drafter_gpus(wildcards))


def arm_gpus(wildcards):
    return configuration.gpus(config, "benchmark", arm_of(wildcards))


def engine_gpus(wildcards):
    return configuration.gpus(config, "benchmark", {"engine": wildcards.engine})


def gpus_option():
    """The GPUs that Snakemake hands out, where the profile or the command line says."""
    handed_out = workflow.global_resources.get("gpu").value
    return "" if handed_out is None else f"--gpus {handed_out}"


def growing(amount, of_gpus=lambda wildcards: 1):
    """A resource that grows with each attempt at a job, so that one that was killed for it succeeds later; for each GPU."""
    return lambda wildcards, attempt: amount * attempt * max(1, of_gpus(wildcards))


def arm_checkpoint(wildcards):
    drafter = arm_of(wildcards).get("drafter")
    return checkpoint_files(drafter) if drafter else []


def arm_folder(wildcards):
    return checkpoint_folder(arm_of(wildcards)["drafter"])


def arm_checkpoint_option(wildcards):
    drafter = arm_of(wildcards).get("drafter")
    return ["--checkpoint", checkpoint_folder(drafter)] if drafter else []


def pass_priority(wildcards):
    """First passes of all arms before second ones, so that slow drift of the machine hits every arm alike."""
    return 1000 - int(wildcards.number)


def benchmark_passes(arm):
    """All passes an arm may have; those beyond the protocol's first ones are empty where it is decided before."""
    most = configuration.most_passes(config, config["arms"][arm]["protocol"])
    return expand(
        "results/benchmarks/{arm}/pass-{number}.parquet",
        arm=arm,
        number=range(1, most + 1),
    )


def peers(wildcards):
    """Arms of one engine and protocol: those that are compared with each other."""
    return [
        name
        for name, arm in config["arms"].items()
        if (arm["engine"], arm["protocol"]) == (wildcards.engine, wildcards.protocol)
    ]


def earlier_passes(wildcards):
    return expand(
        "results/benchmarks/{arm}/pass-{number}.parquet",
        arm=peers(wildcards),
        number=range(1, int(wildcards.number)),
    )


def further_file(wildcards):
    """What says which arms need a pass beyond the protocol's first ones; the first ones are run in any case."""
    arm = arm_of(wildcards)
    if int(wildcards.number) <= config["protocols"][arm["protocol"]]["passes"]:
        return []
    return f"results/benchmarks/{arm['engine']}-{arm['protocol']}-pass-{wildcards.number}.json"


def further_option(wildcards):
    path = further_file(wildcards)
    return f"--further {path}" if path else ""


def offline_tables():
    """Held-out acceptance of each drafter, and the replay of each EAGLE-3 arm."""
    drafters = sorted(
        {config["arms"][name]["drafter"] for name in REPLAYED} & set(TRAINED)
    )
    return {
        "held_out": [f"results/drafters/{name}/offline.parquet" for name in drafters],
        "replays": [f"results/benchmarks/{name}/offline.parquet" for name in REPLAYED],
    }


def what_if_files():
    return [f"results/benchmarks/{name}/what_if.parquet" for name in REPLAYED]


def walk_manifests():
    """Counts by output and by place in the output stand in the manifests of the walks."""
    walks = [path for paths in offline_tables().values() for path in paths]
    return [str(artefacts.manifest_path(path)) for path in [*walks, *what_if_files()]]


def step_cost_files():
    """Step costs that enter the verdict: those that have been measured (`snakemake step_cost`); none are asked for."""
    paths = [f"results/stepcost/{engine}.parquet" for engine in ENGINES]
    return [path for path in paths if Path(path).is_file()]


def point_tables(wildcards):
    """The walk of each point of the data curve; asking for the curve of a config without one is an error."""
    points = configuration.points(config)
    if not points:
        raise WorkflowError(NO_CURVE)
    return [f"results/drafters/{name}/offline_by_sequence.parquet" for name in points]


def points_options():
    """N=FILE of each point, as data_curve.py takes them."""
    return [
        f"{samples}=results/drafters/{name}/offline_by_sequence.parquet"
        for name, samples in configuration.points(config).items()
    ]


def served_summary():
    """The comparison and its manifest, where the curve is to show what its arms measured."""
    served = (config["data_curve"] or {}).get("served", False)
    files = [
        "results/comparison/summary.parquet",
        "results/comparison/summary.manifest.json",
    ]
    return files if served else []


def passes_options():
    """ARM=N for every arm, as compare.py takes them: passes that are there from a former config are not read."""
    return [
        f"{name}={configuration.most_passes(config, arm['protocol'])}"
        for name, arm in config["arms"].items()
    ]


def offline_options():
    """NAME=FILE of each replay and of each drafter's held-out walk, as compare.py takes them."""
    tables = offline_tables()
    return [
        f"{Path(path).parent.name}={path}"
        for path in tables["replays"] + tables["held_out"]
    ]


def manifests():
    """Every manifest that the report's provenance shows."""
    found = ["results/target/manifest.json"]
    if TRAINED:
        found += [
            "results/prompts/pool.manifest.json",
            "results/prompts/selection.json",
        ]
        found += shards("responses", "manifest.json")
        found += [] if ONLINE else shards("hidden_states", "manifest.json")
        for drafter in REPORTED:
            found += [
                f"results/drafters/{drafter}/vocabulary.manifest.json",
                f"results/drafters/{drafter}/checkpoint/manifest.json",
            ]
    passes = [path for arm in config["arms"] for path in benchmark_passes(arm)]
    return found + [path.replace(".parquet", ".manifest.json") for path in passes]


def training_options():
    """NAME=FILE of each trained drafter's curves, as report.py takes them."""
    return [
        f"{name}=results/drafters/{name}/checkpoint/training.parquet"
        for name in REPORTED
    ]


def held_out_options():
    """NAME=FILE of each drafter's held-out walk, as report.py takes them."""
    return [f"{Path(path).parent.name}={path}" for path in offline_tables()["held_out"]]


def data_curve_option():
    """The data curve, where it has been measured. No input: a stale one must not train its points for a page."""
    path = Path("results/data_curve/curve.parquet")
    shown = configuration.points(config) and path.is_file()
    return f"--data-curve {path.as_posix()}" if shown else ""


def data_curve_content():
    """What the page shows of the data curve, by its hash: another one makes the page anew."""
    option = data_curve_option()
    return artefacts.sha256(option.partition(" ")[2]) if option else ""


def show_summary():
    """Verdicts, next steps and the page's path at the end of a run that has a page."""
    if Path("results/report/index.html").is_file():
        own = python("workflow")
        subprocess.run(
            [own if Path(own).is_file() else sys.executable, script("summary")[0]],
            check=False,
        )
