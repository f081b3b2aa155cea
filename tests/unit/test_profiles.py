"""Profiles name rules that exist, and a pod's GPUs are those that its profile hands out."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROFILES = sorted((ROOT / "profiles").glob("*/profile.yaml"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.parent.name)
def test_a_profile_is_about_rules_that_exist(path):
    rules = set(re.findall(r"^rule (\w+):", "".join(p.read_text() for p in (ROOT / "rules").glob("*.smk")), re.M))
    profile = yaml.safe_load(path.read_text())
    assert set(profile.get("set-resources", {})) <= rules
    # A measuring job takes all of it (rules/benchmark.smk, rules/stepcost.smk): nothing runs beside it.
    assert profile["resources"]["machine"] == 100


def test_the_pod_has_the_gpus_of_its_profile():
    job = yaml.safe_load((ROOT / "profiles/kubernetes/job.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    profile = yaml.safe_load((ROOT / "profiles/kubernetes/profile.yaml").read_text())
    assert container["resources"]["limits"]["nvidia.com/gpu"] == profile["resources"]["gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (ROOT / re.search(r"--configfile (\S+)", container["args"][0])[1]).is_file()


def test_every_rule_on_a_gpu_asks_for_time_and_memory():
    """The profiles' defaults are for the small ones."""
    for path in (ROOT / "rules").glob("*.smk"):
        for rule in re.split(r"^(?=rule )", path.read_text(), flags=re.M)[1:]:
            if "gpu=" in rule:
                assert "runtime=growing(" in rule and "mem_mb=growing(" in rule, rule.splitlines()[0]
                # Those that run beside others get GPUs of their own.
                assert "machine=100" in rule or "scripts/on_gpus.py {resources.gpu} " in rule, rule.splitlines()[0]
