"""Where the engine tests find environments and a drafter that generalises; each can be set from outside."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = os.environ.get("BREAKEVEN_ENGINE_PYTHON", str(ROOT / ".envs/vllm-cpu/bin/python"))
SGLANG_PYTHON = os.environ.get("BREAKEVEN_SGLANG_PYTHON", str(ROOT / ".envs/sglang-cpu/bin/python"))
MODEL_PYTHON = os.environ.get("BREAKEVEN_MODEL_PYTHON", str(ROOT / ".envs/model-cpu/bin/python"))
# The one that the repository ships: a drafter of a small test run has memorised its texts and is blind to layer faults.
DRAFTER = Path(os.environ.get("BREAKEVEN_TEST_DRAFTER", ROOT / "drafters" / "smollm2-135m"))


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("GPU ")


# For the tests that run on either; the others start engines on the CPU.
GPUS = _gpus()
HARDWARE = "cuda" if GPUS else "cpu"
