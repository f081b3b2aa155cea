"""Build a virtual environment from a hashed lock; needs nothing but Python 3.11 itself.

    build_environment.py --lock envs/model-cpu.lock --out .envs/model-cpu/ready.txt

uv is used where it is there (in this interpreter, on the path, or in .envs/workflow), with pip's index settings; else
venv and pip. The ready file holds the lock's sha256 and is written last. This file imports nothing of the library, since
it runs before any environment exists.
"""

import argparse
import atexit
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# Where PyTorch publishes its CPU builds; tried only after the user's own index settings did not have them.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PYTHON_VERSION = (3, 11)
# Bytecode is compiled here, once: a server is three processes that import the engine, and where Python may not write
# bytecode each of them would compile thousands of files again, at every start.
SYNC = ["pip", "sync", "--quiet", "--require-hashes", "--compile-bytecode"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lock", required=True, type=Path, help="requirements with hashes, as uv pip compile writes them"
    )
    parser.add_argument(
        "--out", required=True, type=Path, help="ready file to write; its folder becomes the environment"
    )
    args = parser.parse_args()
    if not args.lock.is_file():
        return fail(f"{args.lock}: no such lock file")
    digest = hashlib.sha256(args.lock.read_bytes()).hexdigest()
    folder = args.out.parent
    if Path(sys.prefix).resolve() == folder.resolve():
        return fail(
            f"{args.lock} has changed and this is the environment it belongs to; run `make environment` outside it"
        )
    args.out.unlink(missing_ok=True)
    python = find_python()
    if python is None:
        return fail("Python 3.11 is needed and neither this interpreter nor python3.11 on the path is one; install it")
    uv = find_uv(folder)
    commands = with_uv(uv, python, folder, args.lock) if uv else with_pip(python, folder, args.lock)
    for command, environment in commands:
        print("+", " ".join(command), flush=True)
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        sys.stdout.write(done.stdout + done.stderr)
        if done.returncode and "ensurepip" in done.stdout + done.stderr:
            return fail("this Python cannot make virtual environments; on Debian: apt-get install python3-venv")
        if done.returncode and "torch" in done.stdout + done.stderr and "+cpu" in args.lock.read_text():
            print(f"trying again with PyTorch's own index of CPU builds, {TORCH_CPU_INDEX}", flush=True)
            extra = {
                "UV_INDEX": TORCH_CPU_INDEX,
                "UV_INDEX_STRATEGY": "unsafe-best-match",
                "PIP_EXTRA_INDEX_URL": TORCH_CPU_INDEX,
            }
            done = subprocess.run(command, env=environment | extra)
        if done.returncode:
            return fail(f"building {folder} from {args.lock} failed; the lines above say why")
    args.out.write_text(f"{digest}  {args.lock}\n")
    return 0


def fail(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 1


def find_python() -> str | None:
    """An interpreter of the version that the locks were made for; outside a virtual environment, the base one."""
    if sys.version_info[:2] == PYTHON_VERSION:
        base = Path(sys.base_prefix) / "bin" / "python3.11"
        return str(base) if base.is_file() else sys.executable
    return shutil.which("python3.11")


def find_uv(folder: Path) -> list[str] | None:
    """A uv to build `folder` with; none that lies in it, since the folder is cleared first."""
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    for found in (shutil.which("uv"), shutil.which("uv", path=".envs/workflow/bin")):
        if found and folder.absolute() not in Path(found).absolute().parents:
            return [found]
    return None


def with_uv(uv: list[str], python: str, folder: Path, lock: Path) -> list[tuple[list[str], dict[str, str]]]:
    environment = os.environ | pip_settings(python)
    # The lock's torch may lie on another index than the rest; hashes decide what is taken, not the index.
    environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    make = [*uv, "venv", "--quiet", "--clear", "--python", python, str(folder)]
    sync = [*uv, *SYNC, "--python", str(folder / "bin" / "python"), str(lock)]
    return [(make, environment), (sync, environment)]


def with_pip(python: str, folder: Path, lock: Path) -> list[tuple[list[str], dict[str, str]]]:
    """venv and pip; where the lock itself has uv, pip installs that alone, and uv, much faster, the rest."""
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--require-hashes"]
    make = [python, "-m", "venv", "--clear", str(folder)]
    own = re.search(r"^uv==.*?(?=^\S|\Z)", lock.read_text(), re.M | re.S)
    if own is None:
        return [(make, dict(os.environ)), ([*pip, "-r", str(lock)], dict(os.environ))]
    sync = [inside, "-m", "uv", *SYNC, "--python", inside, str(lock)]
    environment = {"UV_INDEX_STRATEGY": "unsafe-best-match"} | os.environ | pip_settings(python)
    return [(make, dict(os.environ)), ([*pip, "-r", lock_of_uv(own[0])], dict(os.environ)), (sync, environment)]


def lock_of_uv(entry: str) -> str:
    """A temporary requirements file with uv's own entry of a lock, hashes included."""
    with tempfile.NamedTemporaryFile("w", prefix="uv-", suffix=".lock", delete=False) as file:
        file.write(entry)
    atexit.register(os.unlink, file.name)
    return file.name


def pip_settings(python: str) -> dict[str, str]:
    """pip's own settings in uv's variables, so that a mirror or a local wheel folder set up for pip serves uv too."""
    done = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    # The environment comes last, since it goes before pip's files.
    lines += [f"env.{name[4:]}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    names = {"find-links": "UV_FIND_LINKS", "index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE"}
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        name = names.get(key.rsplit(".", 1)[-1].lower().replace("_", "-"))
        if name:
            found[name] = " ".join(value.strip().strip("'\"").replace("\\n", " ").split())
    return {name: value for name, value in found.items() if name not in os.environ}


if __name__ == "__main__":
    sys.exit(main())
