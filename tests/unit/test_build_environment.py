"""The environment builder: pip's settings reach uv, the running environment is not pulled away, failures are named."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/build_environment.py"


@pytest.fixture
def builder(monkeypatch):
    spec = importlib.util.spec_from_file_location("build_environment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("UV_FIND_LINKS", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in [n for n in module.os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    return module


def test_pips_settings_become_uvs(builder, monkeypatch):
    said = "global.find-links='/a /b'\nglobal.index-url='https://mirror/simple'\ninstall.cert='/c.pem'\n:env:.x='1'\n"
    monkeypatch.setattr(builder.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, said, ""))
    assert builder.pip_settings("python3") == {
        "UV_FIND_LINKS": "/a /b", "UV_DEFAULT_INDEX": "https://mirror/simple", "SSL_CERT_FILE": "/c.pem",
    }  # fmt: skip
    monkeypatch.setenv("PIP_INDEX_URL", "https://other/simple")
    assert builder.pip_settings("python3")["UV_DEFAULT_INDEX"] == "https://other/simple"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own/simple")
    assert "UV_DEFAULT_INDEX" not in builder.pip_settings("python3")


def test_a_python_without_pip_has_no_settings(builder, monkeypatch):
    monkeypatch.setattr(builder.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "no pip"))
    assert builder.pip_settings("python3") == {}


def build(lock, out):
    return subprocess.run([sys.executable, SCRIPT, "--lock", lock, "--out", out], capture_output=True, text=True)


def test_the_environment_that_runs_is_not_rebuilt():
    done = build(ROOT / "envs/workflow.lock", Path(sys.prefix) / "ready.txt")
    assert done.returncode == 1 and "this is the environment it belongs to; run `make environment`" in done.stderr


def test_an_environment_is_not_built_by_what_lies_in_it(builder, tmp_path, monkeypatch):
    """After a change of the workflow's lock its own uv built it: it cleared the folder, and then was not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builder.importlib.util, "find_spec", lambda name: None)
    uv = Path(".envs/workflow/bin/uv")
    uv.parent.mkdir(parents=True)
    uv.write_text("#!/bin/sh\n")
    uv.chmod(0o755)
    for path in ("/nowhere", str(uv.parent.absolute())):
        monkeypatch.setenv("PATH", path)
        assert builder.find_uv(Path(".envs/workflow")) is None
        assert Path(*builder.find_uv(Path(".envs/model-cpu"))).samefile(uv)


def test_a_missing_lock_is_named(tmp_path):
    done = build(tmp_path / "no.lock", tmp_path / "e" / "ready.txt")
    assert done.returncode == 1 and "no such lock file" in done.stderr


def test_a_lock_that_cannot_be_installed_leaves_no_ready_file(tmp_path):
    lock = tmp_path / "bad.lock"
    lock.write_text("no-such-package-of-breakeven==1.0 --hash=sha256:" + "0" * 64 + "\n")
    done = build(lock, tmp_path / "e" / "ready.txt")
    assert done.returncode == 1 and "failed; the lines above say why" in done.stderr
    assert not (tmp_path / "e" / "ready.txt").exists()


@pytest.mark.parametrize("lock", sorted((ROOT / "envs").glob("*.lock")), ids=lambda p: p.name)
def test_locks_are_hashed_and_name_no_host(lock):
    text = lock.read_text()
    pinned = [line for line in text.splitlines() if "==" in line and not line.lstrip().startswith("#")]
    assert pinned and all(line.rstrip().endswith("\\") for line in pinned), "a requirement without a hash"
    assert "://" not in text and (lock.with_suffix(".yaml")).is_file()
