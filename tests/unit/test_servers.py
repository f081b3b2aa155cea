"""Starting and stopping servers: real processes that behave well, die, never become ready, or have stubborn children."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import requests

from breakeven import engines, servers
from breakeven.cli import UserError

SERVER = """
    import http.server, json, os, signal, subprocess, sys, time
    port, behaviour, pids = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    child = subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"], start_new_session=True)
    open(pids, "w").write(f"{os.getpid()} {child.pid}")
    if behaviour == "dies":
        print("cannot allocate memory for the cache", flush=True)
        sys.exit(3)
    if behaviour == "tells":
        print("args: Namespace(api_key='a secret')", flush=True)
        sys.exit(3)
    if behaviour == "stubborn":
        print("args: Namespace(api_key='a secret')", flush=True)
        signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))
    if behaviour == "never":
        print("Auto-selected flashinfer allreduce backend: mnnvl", *["working"] * 40, sep="\\n", flush=True)
        time.sleep(600)
    if behaviour == "late":
        time.sleep(1.5)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/die":
                print("assertion failed in the middle of a request", flush=True)
                os._exit(9)
            if behaviour == "asks" and self.path != "/health" and self.headers["Authorization"] != "Bearer a secret":
                self.send_response(401)
                self.end_headers()
                return
            self.send_response(200)
            if self.path == "/stream":
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"5\\r\\nfirst\\r\\n")
                self.wfile.flush()
                print("died while it was sending", flush=True)
                os._exit(9)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "mine"}]}).encode())
        def log_message(self, *args): pass
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie, which only waits for its parent to notice, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(behaviour) -> arguments of servers.serve, and the file with the pids of server and child."""
    monkeypatch.setattr(servers, "GRACE_S", 1.0)
    program = tmp_path / "server.py"
    program.write_text(textwrap.dedent(SERVER))

    def make(behaviour, model="mine", timeout_s=20.0):
        port = servers.free_port()
        command = [sys.executable, str(program), str(port), behaviour, str(tmp_path / "pids")]
        return dict(
            command=command, environment={}, log=tmp_path / "logs" / "server.log", url=f"http://127.0.0.1:{port}",
            model=model, timeout_s=timeout_s,
        )  # fmt: skip

    yield make
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [pid for pid in pids if alive(pid)] == [], "a process was left behind"


def test_a_server_that_comes_late_is_waited_for(start):
    settings = start("late")
    with servers.serve(**settings) as seconds:
        assert seconds > 1
        assert requests.get(settings["url"] + "/health").status_code == 200


def test_a_server_that_dies_is_named_with_its_log(start):
    with pytest.raises(UserError, match=r"(?s)exited with 3 before it was ready.*cannot allocate memory"):
        with servers.serve(**start("dies")):
            pass


def test_a_server_that_never_answers_is_named_and_stopped(start):
    with pytest.raises(UserError, match=r"not ready within 2 s; raise startup_timeout"):
        with servers.serve(**start("never", timeout_s=2)):
            pass


def test_a_failure_that_the_last_lines_do_not_name_is_explained(start):
    with pytest.raises(UserError, match=r"(?s)working\n.*needs NVLink multicast.*fuse_allreduce_rms: false"):
        with servers.serve(**start("never", timeout_s=2), known=engines.engine("vllm").KNOWN_FAILURES):
            pass
    with pytest.raises(UserError, match=r"cannot allocate memory[^\n]*$"):
        with servers.serve(**start("dies"), known=engines.engine("vllm").KNOWN_FAILURES):
            pass


def test_children_that_ignore_everything_are_killed(start):
    with servers.serve(**start("stubborn")):
        pass


def test_a_server_that_dies_in_use_is_named_with_its_log(start):
    settings = start("normal")
    with pytest.raises(UserError, match=r"(?s)stopped answering.*exit code 9.*middle of a request"):
        with servers.serve(**settings):
            requests.get(settings["url"] + "/die")


def test_a_server_that_dies_inside_a_stream(start):
    settings = start("normal")
    with pytest.raises(UserError, match=r"(?s)stopped answering .*died while it was sending"):
        with servers.serve(**settings):
            with requests.get(settings["url"] + "/stream", stream=True) as response:
                assert list(response.iter_content(None))


def test_a_server_that_falls_silent_is_named_with_its_log(start):
    with pytest.raises(UserError, match=r"stopped answering \(ReadTimeout, exit code None\)"):
        with servers.serve(**start("normal")):
            raise requests.ReadTimeout


def test_an_error_of_the_caller_stops_the_server(start):
    with pytest.raises(ZeroDivisionError):
        with servers.serve(**start("normal")):
            raise ZeroDivisionError


def test_a_server_that_asks_for_a_key_gets_it(start):
    settings = start("asks")
    settings["log"].parent.mkdir()
    settings["log"].write_text("of an earlier run, for everyone to read")
    with servers.serve(**settings, key="a secret"):
        assert settings["log"].stat().st_mode & 0o777 == 0o600
        assert requests.get(settings["url"] + "/v1/models").status_code == 401
        assert servers.session("a secret").get(settings["url"] + "/v1/models").status_code == 200
    with pytest.raises(UserError, match="it serves \\['HTTP 401'\\], not mine"):
        with servers.serve(**start("asks"), key="another"):
            pass


def test_a_key_stands_in_no_log_and_no_message(start):
    settings = start("tells")
    with pytest.raises(UserError, match=r"(?s)exited with 3.*api_key='\*\*\*'") as error:
        with servers.serve(**settings, key="a secret"):
            pass
    assert "a secret" not in str(error.value) and settings["log"].read_text() == "args: Namespace(api_key='***')\n"
    os.umask(mask := os.umask(0))
    assert settings["log"].stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_proxy_of_the_environment_is_passed_by(start, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with servers.serve(**start("normal"), key="a secret"):
        pass


def test_another_server_on_the_port_is_not_mistaken(start):
    with pytest.raises(UserError, match=r"serves \['mine'\], not theirs"):
        with servers.serve(**start("normal", model="theirs")):
            pass


def test_ports_are_not_of_those_that_the_kernel_hands_out(monkeypatch):
    monkeypatch.setattr(servers, "first_ephemeral_port", lambda: 32768)
    assert servers.LOWEST_PORT <= servers.free_port() < 32768
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(servers, "LOWEST_PORT", port)
        monkeypatch.setattr(servers, "first_ephemeral_port", lambda: port + 1)
        assert servers.free_port() != port
    monkeypatch.setattr(servers, "first_ephemeral_port", lambda: 1024)
    assert servers.free_port() >= 1024


def test_a_process_that_appears_while_others_are_killed_is_killed_too():
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    found = iter([{psutil.Process(sleepers[0].pid)}, {psutil.Process(sleepers[1].pid)}, set()])
    servers._kill(lambda: next(found))
    assert not any(alive(sleeper.pid) for sleeper in sleepers)


def job_with(settings) -> subprocess.Popen:
    """A job that serves until it is stopped, and says when its server is ready."""
    program = (
        "import sys, json, pathlib, time; from breakeven import cli, servers\n"
        "s = json.loads(sys.argv[1]); s['log'] = pathlib.Path(s['log']); servers.GRACE_S = 600\n"
        "def main():\n"
        "    with servers.serve(**s, key='a secret'):\n        print('ready', flush=True); time.sleep(600)\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where tests run in the background
        "cli.run(main)"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(settings, default=str)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert job.stdout.readline() == "ready\n"
    return job


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_leaves_no_server_and_no_key(start, second):
    settings = start("stubborn")
    job = job_with(settings)
    job.terminate()
    deadline = time.monotonic() + 60
    while "asked to stop" not in settings["log"].read_text():
        assert time.monotonic() < deadline, "the server was not asked to stop"
        time.sleep(0.05)
    job.send_signal(second)
    assert job.wait(60) == {signal.SIGTERM: 143, signal.SIGINT: 130}[second]
    assert settings["log"].read_text() == "args: Namespace(api_key='***')\nasked to stop\n"


@pytest.fixture
def handlers():
    """Signal handlers as they are, put back afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_that_are_put_off_all_come_in_their_order(handlers):
    seen = []
    for number in handlers:
        signal.signal(number, lambda number, _: seen.append(number))
    own = {number: signal.getsignal(number) for number in handlers}
    with servers._signals_later():
        for number in reversed(handlers):
            signal.raise_signal(number)
        assert not seen
    assert seen == list(reversed(handlers))
    assert {number: signal.getsignal(number) for number in handlers} == own


def test_an_ignored_signal_takes_no_other_ones_place(handlers):
    """Under nohup the terminal is closed, then the job is stopped."""

    def stop(*_):
        assert [signal.getsignal(number) for number in handlers] == [signal.default_int_handler, stop, signal.SIG_IGN]
        raise SystemExit(143)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with pytest.raises(SystemExit):
        with servers._signals_later():
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                signal.raise_signal(number)


def test_a_killed_job_takes_its_server_along(start, tmp_path):
    """SIGKILL leaves no chance to clean up: the server gets SIGTERM from the kernel."""
    job = job_with(start("normal"))
    server, child = (int(pid) for pid in (tmp_path / "pids").read_text().split())
    job.kill()
    job.wait()
    deadline = time.monotonic() + 10
    while alive(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(server)
    psutil.Process(child).kill()  # the test server's own stubborn child; engines stop theirs on SIGTERM
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
