"""Real servers answer on this machine alone, to a key that no other user can read and nothing records."""

import psutil
import pytest
import requests
import yaml

from breakeven import benchmark, engines, servers
from breakeven.engines import Speculation
from places import ENGINE_PYTHON, ROOT, SGLANG_PYTHON

pytestmark = pytest.mark.engines
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())["engines"]
PYTHON = {"vllm": ENGINE_PYTHON, "sglang": SGLANG_PYTHON}


def listening(process: psutil.Process) -> dict[int, set[str]]:
    """By port, the addresses that a process and its children listen on."""
    found: dict[int, set[str]] = {}
    for member in (process, *process.children(recursive=True)):
        for connection in member.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.setdefault(connection.laddr.port, set()).add(connection.laddr.ip)
    return found


@pytest.mark.parametrize("name", engines.ENGINES)
def test_a_server_asks_for_a_key_that_nobody_else_knows(name, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the CPU operators of SGLang are named from
    engine, log = engines.engine(name), tmp_path / "server.log"
    settings = {part: CONFIG[name][part]["cpu"] for part in ("flags", "environment")}
    with servers.speculating(
        engine, PYTHON[name], finished / "results/target", Speculation(), settings, set(), "cpu", log
    ) as server:
        for key, status in ((None, 401), ("another", 401), (server.key, 200)):
            assert servers.session(key).get(f"{server.url}/v1/models").status_code == status
        path, body = engine.request(server.name, [1, 2, 3], {"max_tokens": 4, "temperature": 0})
        assert requests.post(server.url + path, json=body).status_code == 401
        reply, _, _ = benchmark.Client(engine, server.url, server.name, server.key).stream(
            [1, 2, 3], {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
        )
        assert len(reply.token_ids) == 4
        words = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True)]
        assert words and not any(server.key in text for text in words)
        assert server.key not in f"{server.command} {server.environment}"
        (process,) = [p for p in psutil.Process().children() if "--port" in p.cmdline()]
        found = listening(process)
        assert found.pop(int(server.url.rpartition(":")[2])) == {"127.0.0.1"}
        if name == "vllm":  # SGLang 0.5.23 opens torch.distributed's store on all addresses (docs/faults.md)
            assert set().union(*found.values()) <= {"127.0.0.1", "::1"}
    assert server.key not in log.read_text(errors="replace")
