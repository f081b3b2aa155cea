"""Run a script on GPUs that no other job of this machine was given by this program:

    on_gpus.py 2 train_drafter.py --ranks 2 ...

Snakemake counts GPUs but does not say which; Slurm does (CUDA_VISIBLE_DEVICES), and then nothing is left to choose. Where
Snakemake hands out more than there are (several engines on one GPU), jobs are spread evenly. A GPU is a job's as long as any
process of it lives.
"""

import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def visible() -> list[str]:
    """The GPUs to choose from: those of CUDA_VISIBLE_DEVICES, else all of the machine."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return []


def claim(count: int, gpus: list[str], folder: Path) -> list[str]:
    """`count` of the GPUs, those with the fewest claims; the claims are locks that this process and its children hold."""
    folder.mkdir(exist_ok=True)
    # One chooses at a time, so that two jobs never take half of what both need.
    with open(folder / "choosing", "w") as choosing:
        fcntl.flock(choosing, fcntl.LOCK_EX)
        chosen: list[str] = []
        for claims in itertools.count():
            for gpu in gpus:
                if len(chosen) == count:
                    return chosen
                if gpu not in chosen and lock(folder / f"{gpu}-{claims}"):
                    chosen.append(gpu)


def lock(path: Path) -> bool:
    """Take a lock that stays with the process which this one becomes; false if it is taken."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    os.set_inheritable(file, True)
    return True


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    count, command, gpus = int(sys.argv[1]), sys.argv[2:], visible()
    if 0 < count < len(gpus):
        folder = Path(tempfile.gettempdir()) / f"breakeven-gpus-{os.getuid()}"
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # that of nvidia-smi
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(claim(count, gpus, folder))
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
