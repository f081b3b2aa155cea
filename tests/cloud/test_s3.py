"""Shards in an object store: written and read back through Snakemake's storage plugin and a real S3 server on this machine.

tests/cloud/run
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest

from breakeven import artefacts
from project import ROOT, SMALL, linked_copy, planned, snakemake

pytestmark = [pytest.mark.cloud, pytest.mark.engines]

OVERLAY = """
storage: {responses: "s3://breakeven/small/responses", hidden_states: "s3://breakeven/small/hidden_states"}
"""

# Runs where the plugin runs, with its client.
CLIENT = """
import boto3, hashlib, json, os, sys
setting = {name: os.environ["SNAKEMAKE_STORAGE_S3_" + name] for name in ("ENDPOINT_URL", "ACCESS_KEY", "SECRET_KEY")}
client = boto3.resource("s3", endpoint_url=setting["ENDPOINT_URL"], region_name="us-east-1",
                        aws_access_key_id=setting["ACCESS_KEY"], aws_secret_access_key=setting["SECRET_KEY"])
bucket = client.Bucket("breakeven")
bucket.create()
added, deleted = json.loads(sys.argv[1])
for key, path in added.items():
    bucket.upload_file(path, key)
for key in deleted:
    bucket.Object(key).delete()
print(json.dumps({o.key: hashlib.sha256(o.get()["Body"].read()).hexdigest() for o in bucket.objects.all()}))
"""


def stored(added: dict[str, str] | None = None, deleted: tuple[str, ...] = ()) -> dict[str, str]:
    """sha256 of each object in the bucket, by its key, after adding files (key: path) and deleting some."""
    command = [ROOT / ".envs/cluster/bin/python", "-c", CLIENT, json.dumps([added or {}, deleted])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout)


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


def test_shards_lie_in_the_store_and_come_back(finished, server, tmp_path):
    """Responses that were copied there are read, hidden states written and read; the drafter is the same, bit for bit."""
    work = linked_copy(finished, tmp_path / "work")
    shards = {
        folder: {f"small/{folder}/{path.name}": str(path) for path in (finished / "results" / folder).iterdir()}
        for folder in ("responses", "hidden_states")
    }
    assert [len(files) for files in shards.values()] == [4, 4]
    stored(added=shards["responses"])
    for folder in (*shards, "drafters"):
        shutil.rmtree(work / "results" / folder)
    (work / "storage.yaml").write_text(OVERLAY)
    config = [SMALL, "storage.yaml"]
    until = ("--until", "train_drafter")
    jobs = {"extract_hidden_states": 2, "build_vocabulary": 1, "train_drafter": 1}
    assert planned(work, *until, config=config) == jobs
    done = snakemake(work, *until, config=config)
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]

    wanted = shards["responses"] | shards["hidden_states"]
    assert stored() == {key: artefacts.sha256(path) for key, path in wanted.items()}
    # Nothing stays on the disk of the machine but what later stages read.
    assert not [path for folder in shards for path in work.glob(f"results/{folder}/*")]
    assert not [path for path in (work / ".snakemake/storage").rglob("*") if path.is_file()]
    weights = "results/drafters/own/checkpoint/model.safetensors"
    assert (work / weights).read_bytes() == (finished / weights).read_bytes()
    assert not planned(work, config=config).keys() & jobs.keys()

    assert len(stored(deleted=("small/hidden_states/shard-000000.safetensors",))) == len(wanted) - 1
    assert planned(work, *until, config=config) == jobs | {"extract_hidden_states": 1}
