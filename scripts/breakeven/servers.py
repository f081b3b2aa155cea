"""Starting an engine's server, waiting until it really serves, and leaving no process behind."""

import contextlib
import ctypes
import functools
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import requests

from breakeven import artefacts, engines
from breakeven.cli import UserError, logger
from breakeven.engines import Speculation

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 20.0
KILL_S = 10.0
LOWEST_PORT = 10_000
_libc = ctypes.CDLL(None, use_errno=True)


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on at this moment.

    Below those that the kernel hands out, where it leaves any: SGLang binds its port only when the target is loaded, and
    until then any other process may get one of the kernel's.
    """
    ports = range(LOWEST_PORT, first_ephemeral_port())
    for port in [secrets.choice(ports) for _ in range(100 if ports else 0)]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def first_ephemeral_port() -> int:
    """The lowest port that the kernel gives to a socket which asks for none."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def log_tail(path: Path, lines: int = 25, key: str | None = None, known: dict[str, str] | None = None) -> str:
    """The last lines of a log file, for error messages; without `key`, and with what is `known` of any line in it."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return "(no log)"
    last = (text.replace(key, "***") if key else text).splitlines()[-lines:]
    return "\n".join(last + [advice for words, advice in (known or {}).items() if words in text])


def session(key: str | None) -> requests.Session:
    """Requests to a server on this machine: with its key, and past any proxy or netrc of the user's environment."""
    made = requests.Session()
    made.trust_env = False
    if key:
        made.headers["Authorization"] = f"Bearer {key}"
    return made


@dataclass
class Running:
    """A server that answers: where, under which name, to which key, how it was started, and the seconds that took.

    command and environment are what may be recorded: the key is in neither.
    """

    url: str
    name: str
    key: str
    command: list[str]
    environment: dict[str, str]
    startup_s: float


@contextlib.contextmanager
def speculating(
    engine: ModuleType,
    python: str,
    target: Path | str,
    speculation: Speculation,
    settings: dict[str, Any],
    supported: set[str],
    hardware: str,
    log: Path,
) -> Iterator[Running]:
    """Serve a target with one way of speculating for the length of a `with` block.

    settings: flags, environment, startup_timeout, as in the config's `engines.NAME`; supported: see the engine's
    `optional_flags`. Target and drafter are compared with their manifests first, since the engine will not. The server
    listens on the loopback interface and asks for a key that is drawn anew at each start.
    """
    artefacts.verify_folder(target)
    if speculation.drafter:
        artefacts.verify_folder(speculation.drafter)
    port = free_port()
    name, url = f"breakeven-{port}", f"http://127.0.0.1:{port}"
    environment = engine.environment(hardware) | settings.get("environment", {})
    command = engine.command(python, str(target), name, port, speculation, settings.get("flags", {}), supported)
    key = draw_key()
    with tempfile.TemporaryDirectory() as private:
        words = engines.require_key(key, Path(private))
        timeout_s = settings.get("startup_timeout", 900)
        with serve(
            command + words, environment, log, url, name, timeout_s, key=key, known=engine.KNOWN_FAILURES
        ) as seconds:
            yield Running(url, name, key, command, environment, seconds)


def draw_key() -> str:
    """A random key of letters and digits alone: SGLang's command line takes one with a leading "-" for an option."""
    return secrets.token_hex(24)


@contextlib.contextmanager
def serve(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    url: str,
    model: str,
    timeout_s: float,
    poll_s: float = 0.2,
    key: str | None = None,
    known: dict[str, str] | None = None,
) -> Iterator[float]:
    """Run a server for the length of a `with` block; yields the seconds it took to become ready.

    Ready means: the process lives, /health answers 200, and /v1/models names `model`, so that no other server on the
    same port is mistaken for this one. A server that dies or is not ready within `timeout_s` is a UserError with the
    tail of its log and what `known` says of words in it. On the way out, whatever happens, the server gets SIGTERM, a grace
    period, and then every process that descends from it is killed; children that outlive their parents are inherited by
    this process and found too. A second signal ends the grace period. `key`, which the server asks for, is taken out of
    its log, which only this user can read until then.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if log.is_file():
        log.unlink()  # with the rights that it had, others could read along
    process = None
    ending = functools.partial(log_tail, log, key=key, known=known)
    try:
        with open(log, "w", opener=lambda path, flags: os.open(path, flags, 0o600 if key else 0o666)) as output:
            process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        _wait(process, ending, url, model, timeout_s, poll_s, key)
        seconds = time.monotonic() - started
        logger.info("server ready after %.1f s", seconds)
        yield seconds
        if process.poll() is not None:
            raise UserError(
                f"the server exited with {process.returncode} while it was in use; its log ends:\n{ending()}"
            )
    except (
        requests.ConnectionError,
        requests.Timeout,
        requests.exceptions.ChunkedEncodingError,  # inside a stream
    ) as error:
        _settle(process)
        raise UserError(
            f"the server stopped answering ({type(error).__name__}, exit code {process.poll()}); its log ends:\n{ending()}"
        ) from None
    finally:
        try:
            _end(process)
        finally:
            with _signals_later():
                try:
                    _kill(lambda: set(psutil.Process().children(recursive=True)) - before)
                    if process is not None:
                        process.poll()
                finally:
                    if key:
                        _take_out(log, key)


def _take_out(log: Path, key: str) -> None:
    """Replace the key in the log, and give the log the rights of any new file."""
    with contextlib.suppress(OSError):
        content = log.read_bytes()
        if key.encode() in content:
            log.write_bytes(content.replace(key.encode(), b"***"))
        artefacts.as_any_new_file(log)


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Put off what stops a script until the end of a `with` block; only the main thread can, and only it is stopped."""
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main else ()
    # One that is ignored, as SIGHUP under nohup, stops nothing; None: a handler that is not of Python.
    numbers = [number for number in numbers if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the benchmark is killed without a chance to clean up."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(
    process: subprocess.Popen,
    ending: Callable[[], str],
    url: str,
    model: str,
    timeout_s: float,
    poll_s: float,
    key: str | None,
) -> None:
    deadline = time.monotonic() + timeout_s
    client = session(key)
    while True:
        if process.poll() is not None:
            raise UserError(
                f"the server exited with {process.returncode} before it was ready; its log ends:\n{ending()}"
            )
        with contextlib.suppress(requests.RequestException):
            if client.get(f"{url}/health", timeout=5).status_code == 200:
                break
        if time.monotonic() > deadline:
            raise UserError(
                f"the server was not ready within {timeout_s:.0f} s; raise startup_timeout of the engine if it needs longer;"
                f" its log ends:\n{ending()}"
            )
        time.sleep(poll_s)
    response = client.get(f"{url}/v1/models", timeout=30)
    try:
        models = [entry["id"] for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):  # no JSON, or not what an engine says
        models = [f"HTTP {response.status_code}"]
    if model not in models:
        raise UserError(f"another server answers at {url}: it serves {models}, not {model}; stop it and run again")


def _settle(process: subprocess.Popen) -> None:
    """Give a dying server a moment, so that its exit code and last log lines are there."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)


def _end(process: subprocess.Popen | None) -> None:
    """Ask the server to end, and give it the grace period."""
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _kill(descendants: Callable[[], set[psutil.Process]]) -> None:
    """Kill all descendants, also those that appear meanwhile, and wait until they are gone."""
    deadline = time.monotonic() + KILL_S
    while (alive := descendants()) and time.monotonic() < deadline:
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(alive, timeout=1)
    if alive:
        logger.warning("processes that could not be killed: %s", [child.pid for child in alive])
