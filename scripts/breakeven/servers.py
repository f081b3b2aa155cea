"""Starting an engine's server, waiting until it really serves, and leaving no process behind."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import requests

from breakeven.cli import UserError, logger
from breakeven.engines import Speculation

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def free_port() -> int:
    """A TCP port on the loopback interface that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def log_tail(path: Path, lines: int = 25) -> str:
    """The last lines of a log file, for error messages."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return "(no log)"


@dataclass
class Running:
    """A server that answers: where, under which name, how it was started, and the seconds that took."""

    url: str
    name: str
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
    `optional_flags`.
    """
    port = free_port()
    name, url = f"breakeven-{port}", f"http://127.0.0.1:{port}"
    environment = engine.environment(hardware) | settings.get("environment", {})
    command = engine.command(python, str(target), name, port, speculation, settings.get("flags", {}), supported)
    with serve(command, environment, log, url, name, settings.get("startup_timeout", 900)) as seconds:
        yield Running(url, name, command, environment, seconds)


@contextlib.contextmanager
def serve(
    command: list[str],
    environment: dict[str, str],
    log: Path,
    url: str,
    model: str,
    timeout_s: float,
    poll_s: float = 0.2,
) -> Iterator[float]:
    """Run a server for the length of a `with` block; yields the seconds it took to become ready.

    Ready means: the process lives, /health answers 200, and /v1/models names `model`, so that no other server on the
    same port is mistaken for this one. A server that dies or is not ready within `timeout_s` is a UserError with the
    tail of its log. On the way out, whatever happens, the server gets SIGTERM, a grace period, and then every process
    that descends from it is killed; children that outlive their parents are inherited by this process and found too.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    before = set(psutil.Process().children(recursive=True))
    log.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with open(log, "w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    try:
        _wait(process, log, url, model, timeout_s, poll_s)
        seconds = time.monotonic() - started
        logger.info("server ready after %.1f s", seconds)
        yield seconds
        if process.poll() is not None:
            raise UserError(
                f"the server exited with {process.returncode} while it was in use; its log ends:\n{log_tail(log)}"
            )
    except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:  # the latter inside a stream
        _settle(process)
        raise UserError(
            f"the server stopped answering ({type(error).__name__}, exit code {process.poll()}); its log ends:\n{log_tail(log)}"
        ) from None
    finally:
        _stop(process, lambda: set(psutil.Process().children(recursive=True)) - before)


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the benchmark is killed without a chance to clean up."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait(process: subprocess.Popen, log: Path, url: str, model: str, timeout_s: float, poll_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        if process.poll() is not None:
            raise UserError(
                f"the server exited with {process.returncode} before it was ready; its log ends:\n{log_tail(log)}"
            )
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).status_code == 200:
                break
        if time.monotonic() > deadline:
            raise UserError(
                f"the server was not ready within {timeout_s:.0f} s; raise startup_timeout of the engine if it needs longer;"
                f" its log ends:\n{log_tail(log)}"
            )
        time.sleep(poll_s)
    models = [entry["id"] for entry in requests.get(f"{url}/v1/models", timeout=30).json()["data"]]
    if model not in models:
        raise UserError(f"another server answers at {url}: it serves {models}, not {model}; stop it and run again")


def _settle(process: subprocess.Popen) -> None:
    """Give a dying server a moment, so that its exit code and last log lines are there."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(3)


def _stop(process: subprocess.Popen, descendants: Callable[[], set[psutil.Process]]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    for child in descendants():
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    gone, alive = psutil.wait_procs(descendants(), timeout=10)
    if alive:
        logger.warning("processes that could not be killed: %s", [child.pid for child in alive])
