"""The Kubernetes job against Kubernetes' own schemas, and the jobs that Snakemake would run inside its pod.

tests/cloud/run
"""

import re
import subprocess

import pytest
import yaml

from project import ROOT, snakemake

pytestmark = pytest.mark.cloud

JOB = ROOT / "profiles/kubernetes/job.yaml"


def validate(path, version: str) -> subprocess.CompletedProcess:
    command = [ROOT / ".envs/cloud/bin/kubernetes-validate", "--strict", "-k", version, path]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("version", ["1.28", "1.33", "1.37"])
def test_the_job_is_what_kubernetes_takes(version):
    done = validate(JOB, version)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "right, wrong", [("claimName", "claim"), ("backoffLimit: 3", "backoffLimit: often"), ("image:", "picture:")]
)
def test_a_mistake_in_the_job_is_found(tmp_path, right, wrong):
    path = tmp_path / "job.yaml"
    path.write_text(JOB.read_text().replace(right, wrong))
    assert validate(path, "1.37").returncode != 0


def test_every_job_fits_into_the_pod():
    """What the job's own command line plans: no job asks for more GPUs than the pod has, measurements for all of it."""
    job = yaml.safe_load(JOB.read_text())
    [container] = job["spec"]["template"]["spec"]["containers"]
    overlay = re.search(r"--configfile (\S+)", container["args"][0])[1]
    done = snakemake(ROOT, "--dry-run", "--workflow-profile", "profiles/kubernetes", config=overlay)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    jobs = re.findall(r"^(?:local)?rule (\w+):\n(?:    .*\n)*?    resources: (.*)", done.stdout + done.stderr, re.M)
    asked = [(rule, dict(re.findall(r"(\w+)=(\w+)", resources))) for rule, resources in jobs]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert {(resources["gpu"], resources["machine"]) for rule, resources in asked if rule == "benchmark"} == {
        (str(gpus), "100")
    }
    assert {resources["gpu"] for rule, resources in asked if rule == "generate_responses"} == {str(gpus)}
    assert all(int(resources.get("gpu", 0)) <= gpus for _, resources in asked)
