"""Hidden states and responses by real engines: vLLM's extraction, parity of what engines capture, a server that runs already."""

import contextlib
import json
import os
import subprocess
import time

import pytest
import requests
import yaml

from breakeven import artefacts, servers, tables
from breakeven.engines import Speculation, vllm
from places import ENGINE_PYTHON, MODEL_PYTHON, ROOT, SGLANG_PYTHON

pytestmark = pytest.mark.engines
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())["responses"]
COUNT = 4
PYTHON = {"vllm": ENGINE_PYTHON, "sglang": SGLANG_PYTHON}


def settings(engine):
    environment = CONFIG["environment"][engine]["cpu"]
    small = {"VLLM_CPU_KVCACHE_SPACE": "1"} if engine == "vllm" else {}
    return [
        "--settings",
        json.dumps(CONFIG["settings"][engine]["cpu"]),
        "--environment",
        json.dumps(environment | small),
    ]


def script(python, name, *words, **kwargs):
    command = [python, ROOT / "scripts" / name, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **kwargs)


@pytest.fixture(scope="module")
def responses(finished, tmp_path_factory):
    """The first sequences of a finished shard, as a shard of its own."""
    path = tmp_path_factory.mktemp("responses") / "shard-000000.parquet"
    rows = artefacts.read_table(finished / "results/responses/shard-000000.parquet", tables.RESPONSES).slice(0, COUNT)
    artefacts.write_table(path, rows, tables.RESPONSES)
    return path


@pytest.fixture(scope="module")
def extracted(finished, responses, tmp_path_factory):
    """(shard, what its script said), extracted by vLLM in steps that cut prompts in two."""
    out = tmp_path_factory.mktemp("states") / "shard-000000.safetensors"
    words = ["--target", finished / "results/target", "--responses", responses, "--engine", "vllm", *settings("vllm")]
    done = script(ENGINE_PYTHON, "extract_hidden_states.py", *words, "--batch-tokens", 256, "--out", out)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def test_vllm_writes_the_store_that_transformers_writes(finished, extracted):
    mine = artefacts.read_manifest(artefacts.manifest_path(extracted), "hidden_states")
    theirs = artefacts.read_manifest(finished / "results/hidden_states/shard-000000.manifest.json", "hidden_states")
    assert {key: mine["parameters"][key] for key in ("layers", "codec", "hidden_size")} == {
        key: theirs["parameters"][key] for key in ("layers", "codec", "hidden_size")
    }
    assert mine["parameters"]["engine"] == "vllm"
    assert mine["canary"]["greedy_share"] >= 0.95 and mine["counts"]["sequences"] == COUNT
    assert [path.name for path in sorted(extracted.parent.iterdir())] == [
        "shard-000000.manifest.json",
        "shard-000000.safetensors",
    ]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_an_engine_captures_is_what_was_extracted(finished, responses, extracted, tmp_path, engine):
    """Every layer is the nearest of all, in both engines, and vLLM's store is as near as its own next run."""
    states = extracted if engine == "vllm" else finished / "results/hidden_states/shard-000000.safetensors"
    words = ["--target", finished / "results/target", "--responses", responses, "--hidden-states", states]
    words += ["--engine", engine, *settings(engine), "--sequences", 2, "--out", tmp_path / "parity.json"]
    done = script(PYTHON[engine], "check_parity.py", *words)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    rows = artefacts.read_json(tmp_path / "parity.json")["layers"]
    assert [row["nearest"] for row in rows] == [row["layer"] for row in rows] == [2, 15, 27]
    assert all(row["difference"] < row["next_layer"] and row["stored"] < row["next_layer"] for row in rows)
    assert "| layer | nearest |" in done.stdout  # behind what the engine writes there


def test_responses_of_another_target_are_refused_and_nothing_stays(finished, responses, tmp_path):
    rows = artefacts.read_table(responses, tables.RESPONSES).to_pylist()
    for row in rows:
        row["response_token_ids"] = row["response_token_ids"][::-1]
    artefacts.write_table(tmp_path / "wrong.parquet", rows, tables.RESPONSES)
    out = tmp_path / "states" / "shard-000000.safetensors"
    words = ["--target", finished / "results/target", "--responses", tmp_path / "wrong.parquet", "--engine", "vllm"]
    done = script(ENGINE_PYTHON, "extract_hidden_states.py", *words, *settings("vllm"), "--out", out)
    assert done.returncode == 1 and "of the greedy response tokens are this target's greedy choice" in done.stderr
    assert list(out.parent.iterdir()) == []


@pytest.fixture(scope="module")
def server(finished, tmp_path_factory):
    """A vLLM server with a key, as a user may have it running: its address."""
    port = servers.free_port()
    flags = {"dtype": "bfloat16", "max-model-len": 1024, "max-num-seqs": 4, "enforce-eager": True, "api-key": "secret"}
    command = vllm.command(ENGINE_PYTHON, str(finished / "results/target"), "mine", port, Speculation(), flags, set())
    environment = vllm.environment("cpu") | {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    log, url = tmp_path_factory.mktemp("server") / "log.txt", f"http://127.0.0.1:{port}"
    # servers.serve checks the served name without a key.
    with (
        open(log, "w") as file,
        subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=file) as process,
    ):
        try:
            while not answers(url):
                assert process.poll() is None, log.read_text()[-4000:]
                time.sleep(0.5)
            yield f"{url}/v1"
        finally:
            process.terminate()


def answers(url):
    with contextlib.suppress(requests.ConnectionError):
        return requests.get(f"{url}/health", timeout=5).status_code == 200


def test_responses_of_a_running_server(finished, server, tmp_path, monkeypatch):
    out = tmp_path / "responses" / "shard-000000.parquet"
    words = ["--target", finished / "results/target", "--pool", finished / "results/prompts/pool.parquet", "--start", 0]
    words += ["--count", 3, "--engine", "endpoint", "--sampling", '{"max_tokens": 24, "temperature": 0, "seed": 0}']
    words += ["--out", out, "--endpoint"]
    endpoint = {"base_url": server, "concurrency": 2, "key_variable": "KEY_OF_THIS_TEST"}
    monkeypatch.setenv("KEY_OF_THIS_TEST", "wrong")
    done = script("python", "generate_responses.py", *words, json.dumps(endpoint))
    assert done.returncode == 1 and "answers 401" in done.stderr and not out.exists()

    monkeypatch.setenv("KEY_OF_THIS_TEST", "secret")
    done = script("python", "generate_responses.py", *words, json.dumps(endpoint))
    assert done.returncode == 0, done.stderr[-4000:]
    rows = artefacts.read_table(out, tables.RESPONSES).to_pylist()
    assert len(rows) == 3 and {row["engine"] for row in rows} == {"endpoint"}
    for row in rows:
        assert (len(row["response_token_ids"]) == 24) == (row["finish_reason"] == "length")
    written = artefacts.manifest_path(out).read_text()
    assert "secret" not in written and server not in written

    # They are this target's own tokens: transformers would have chosen them too.
    states = tmp_path / "states" / "shard-000000.safetensors"
    words = ["--target", finished / "results/target", "--responses", out, "--out", states]
    done = script(MODEL_PYTHON, "extract_hidden_states.py", *words)
    assert done.returncode == 0, done.stderr[-4000:]
