"""A real SGLang server through scripts/benchmark.py: acceptance, the wrong flag, a server that dies, offline generation."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from breakeven import configuration
from breakeven.acceptance import agreement
from breakeven.engines import sglang
from places import DRAFTER, ENGINE_PYTHON, ROOT, SGLANG_PYTHON

PYTHON = {"sglang": SGLANG_PYTHON, "vllm": ENGINE_PYTHON}
PROTOCOL = {"name": "test", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def target(finished):
    return finished / "results/target"


def command(folder, target, arm, max_tokens=PROTOCOL["max_tokens"]):
    """The benchmark's command line for an arm, with the default config's settings of its engine."""
    engine = CONFIG["engines"][arm["engine"]]
    environment = {
        name: "1" if name == "OMP_NUM_THREADS" else value for name, value in engine["environment"]["cpu"].items()
    }
    settings = {"startup_timeout": 400, "flags": engine["flags"]["cpu"], "environment": environment}
    words = [sys.executable, ROOT / "scripts" / "benchmark.py", "--arm", json.dumps(arm), "--pass", "1"]
    words += [
        "--engine-settings",
        json.dumps(settings),
        "--protocol",
        json.dumps(PROTOCOL | {"max_tokens": max_tokens}),
    ]
    words += ["--prompts", ROOT / "resources" / "reference-prompts.jsonl", "--engine-python", PYTHON[arm["engine"]]]
    words += ["--target", target, "--out", folder / "pass-1.parquet"]
    if arm.get("drafter"):
        words += ["--checkpoint", DRAFTER]
    return [str(word) for word in words]


def run(folder, target, max_tokens, **arm):
    words = command(folder, target, {"engine": "sglang"} | arm, max_tokens)
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def measured(tmp_path_factory, target):
    """Rows and manifest of an arm, each arm served once."""
    cache = {}

    def get(name, max_tokens=PROTOCOL["max_tokens"], **arm):
        if name not in cache:
            folder = tmp_path_factory.mktemp(name)
            done = run(folder, target, max_tokens, name=name, **arm)
            assert done.returncode == 0, done.stderr[-3000:]
            rows = pq.read_table(folder / "pass-1.parquet").to_pylist()
            cache[name] = rows, json.loads((folder / "pass-1.manifest.json").read_text())
        return cache[name]

    return get


EAGLE3 = {"drafter": "own", "k": 3}


def curve(rows):
    """(steps, accepted per position) of all requests."""
    return sum(row["steps"] for row in rows), [sum(row["accepted_per_position"][i] for row in rows) for i in range(3)]


def test_plain_decoding(measured):
    rows, manifest = measured("plain")
    assert [row["completion_tokens"] for row in rows] == [PROTOCOL["max_tokens"]] * len(rows)
    assert all(row["steps"] is None and row["ttft_s"] < row["e2e_s"] for row in rows)
    assert manifest["server"]["running"]["max-running-requests"] == 4
    assert not [found for found in manifest["sanity"].values() if found["problem"]]


def test_eagle3_accepts_and_writes_the_same_text(measured):
    rows, manifest = measured("k3", **EAGLE3)
    steps, accepted = curve(rows)
    assert accepted[0] > 0.2 * steps and accepted[0] >= accepted[1] >= accepted[2] > 0
    assert manifest["server"]["counters"]["steps"] == steps
    assert manifest["server"]["running"]["speculative-num-draft-tokens"] == 4
    plain, _ = measured("plain")
    same = [a["output_token_ids"][:8] == b["output_token_ids"][:8] for a, b in zip(rows, plain, strict=True)]
    assert sum(same) >= len(same) - 1  # bf16: a near-tie may fall the other way


@pytest.mark.nightly
def test_a_tree_accepts_at_least_as_much_as_its_chain(measured):
    chain, tree = (curve(measured(*arm[:1], **arm[1])[0]) for arm in (("k3", EAGLE3), ("tree", TREE)))
    assert 1 + sum(tree[1]) / tree[0] > 1 + sum(chain[1]) / chain[0]


TREE = EAGLE3 | {"options": {"topk": 4, "draft_tokens": 16}}


@pytest.mark.nightly
@pytest.mark.parametrize("arm", [{"method": "ngram", "k": 3}, {"method": "draft_model", "k": 3}])
def test_drafts_that_need_no_training(measured, arm):
    rows, _ = measured(arm["method"], **arm)
    steps, accepted = curve(rows)
    if arm["method"] == "draft_model":  # the target drafts for itself: most is accepted, see docs/engines.md
        assert accepted[0] > 0.85 * steps and accepted[2] > 0.6 * steps
    else:
        assert sum(accepted) > 0


# Every name that is wrong has its test beside the check (tests/unit/test_preflight.py).
@pytest.mark.parametrize("name, allow", [("EAGLE", []), ("nextn", ["algorithm"])])
def test_the_wrong_flag_is_refused_before_a_server_starts(tmp_path, target, name, allow):
    """The check that an arm waits for, with the options that the workflow gives it."""
    arm = EAGLE3 | {"engine": "sglang", "options": {"algorithm": name}, "allow": allow}
    words = [sys.executable, ROOT / "scripts" / "check_drafter.py", "--checkpoint", DRAFTER, "--target", target]
    words += ["--engine-python", PYTHON["sglang"], "--json", tmp_path / "check.json"]
    words += configuration.check_options(CONFIG | {"arms": {"wrong": arm}}, "wrong")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == (0 if allow else 1), done.stdout + done.stderr
    found = {finding["id"]: finding for finding in json.loads((tmp_path / "check.json").read_text())["findings"]}
    assert f"--speculative-algorithm is {name}" in found["algorithm"]["message"]
    assert found["algorithm"]["allowed"] is bool(allow)


def test_the_wrong_flag_where_it_is_allowed(measured):
    # Nothing is accepted, so that each token is a step.
    rows, manifest = measured("wrong", 16, options={"algorithm": "EAGLE"}, allow=["algorithm"], **EAGLE3)
    steps, accepted = curve(rows)
    right = curve(measured("k3", **EAGLE3)[0])
    assert 1 + sum(accepted) / steps < 1.15 < 1 + sum(right[1]) / right[0]
    assert manifest["parameters"]["allow"] == ["algorithm"]
    assert manifest["server"]["running"]["speculative-algorithm"] == "EAGLE"
    plain, _ = measured("plain")
    assert rows[0]["output_token_ids"][:8] == plain[0]["output_token_ids"][:8]


def test_both_engines_accept_the_same_at_every_position(measured):
    ours, theirs = measured("k3", **EAGLE3), measured("vllm-k3", engine="vllm", **EAGLE3)
    assert agreement(curve(ours[0]), curve(theirs[0])).agree


def test_a_server_killed_while_it_is_measured(tmp_path, target):
    words = command(tmp_path, target, {"engine": "sglang", "name": "killed"})
    job = subprocess.Popen(words, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        log = tmp_path / "pass-1.server.log"
        while job.poll() is None and not (log.is_file() and "fired up and ready" in log.read_text()):
            time.sleep(0.5)
        time.sleep(3)
        children = psutil.Process(job.pid).children(recursive=True)
        next(child for child in children if "launch_server" in " ".join(child.cmdline())).send_signal(signal.SIGKILL)
        error = job.communicate(timeout=120)[1].decode()
    finally:
        job.kill()
    assert job.returncode == 1 and "its log ends:" in error
    assert not (tmp_path / "pass-1.parquet").exists()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


def test_responses_offline(tmp_path, target):
    code = (
        "import json, sys\n"
        "from breakeven.engines import sglang\n"
        "if __name__ == '__main__':\n"
        "    prompts = [[1, 504, 314], [1, 9690, 198, 2683]]\n"
        "    sampling = [{'max_tokens': n, 'temperature': 0, 'top_p': 1} for n in (5, 9)]\n"
        "    done = list(sglang.generate(sys.argv[1], prompts, sampling, json.loads(sys.argv[2])))\n"
        "    print('DONE', json.dumps(sorted(done)))\n"
    )
    (tmp_path / "offline.py").write_text(code)
    settings = CONFIG["responses"]["settings"]["sglang"]["cpu"]
    environment = sglang.environment("cpu") | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{sglang.CPU_OPERATORS}:{ROOT / 'scripts'}"
    done = subprocess.run(
        [PYTHON["sglang"], tmp_path / "offline.py", target, json.dumps(settings)],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | environment,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("DONE")), None)
    assert line, done.stderr[-3000:]
    for (index, tokens, reason), most in zip(json.loads(line[5:]), (5, 9), strict=True):
        assert len(tokens) == most if reason == "length" else len(tokens) <= most
        assert index in (0, 1) and reason in ("length", "stop")
