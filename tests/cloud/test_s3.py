"""Shards in an object store: written and read back through Snakemake's storage plugin and a real S3 server on this machine.

tests/cloud/run
"""

import hashlib
import re
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest

from project import ROOT, SMALL, linked_copy, planned, snakemake

pytestmark = [pytest.mark.cloud, pytest.mark.engines]

OVERLAY = 'storage: {hidden_states: "s3://breakeven/small/hidden_states"}\n'
SHARDS = (
    "shard-000000.manifest.json",
    "shard-000000.safetensors",
    "shard-000024.manifest.json",
    "shard-000024.safetensors",
)


@pytest.fixture(scope="module")
def server():
    """The URL of an empty S3 server; Snakemake and the jobs it starts find it by their environment."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    command = [ROOT / ".envs/cloud/bin/moto_server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ENDPOINT_URL", url), ("ACCESS_KEY", "key"), ("SECRET_KEY", "secret")):
            patch.setenv(f"SNAKEMAKE_STORAGE_S3_{name}", value)
        try:
            for _ in range(100):
                try:
                    urllib.request.urlopen(url).close()
                    break
                except OSError:
                    assert process.poll() is None, "the S3 server ended by itself"
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def test_hidden_states_lie_in_the_store_and_come_back(finished, server, tmp_path):
    """Extraction writes there; vocabulary and training read from there, and end with the same drafter, bit for bit."""
    work = linked_copy(finished, tmp_path / "work")
    shutil.rmtree(work / "results/hidden_states")
    shutil.rmtree(work / "results/drafters")
    (work / "storage.yaml").write_text(OVERLAY)
    config = [SMALL, "storage.yaml"]
    until = ("--until", "train_drafter")
    jobs = {"extract_hidden_states": 2, "build_vocabulary": 1, "train_drafter": 1}
    assert planned(work, *until, config=config) == jobs
    done = snakemake(work, *until, config=config)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]

    bucket = f"{server}/breakeven"
    listed = urllib.request.urlopen(bucket).read().decode()
    assert re.findall("<Key>(.*?)</Key>", listed) == [f"small/hidden_states/{name}" for name in SHARDS]
    for name in SHARDS:
        stored = urllib.request.urlopen(f"{bucket}/small/hidden_states/{name}").read()
        local = (finished / "results/hidden_states" / name).read_bytes()
        assert hashlib.sha256(stored).digest() == hashlib.sha256(local).digest(), name
    # Nothing stays on the disk of the machine but what the stages after it read.
    assert not (work / "results/hidden_states").exists()
    assert not [path for path in (work / ".snakemake/storage").rglob("*") if path.is_file()]
    weights = "results/drafters/own/checkpoint/model.safetensors"
    assert (work / weights).read_bytes() == (finished / weights).read_bytes()
    assert planned(work, *until, config=config) == {}

    lost = f"{bucket}/small/hidden_states/{SHARDS[1]}"
    urllib.request.urlopen(urllib.request.Request(lost, method="DELETE")).close()
    assert planned(work, *until, config=config) == jobs | {"extract_hidden_states": 1}
