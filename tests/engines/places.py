"""Where the engine tests find a finished run and the environments; each can be set from outside."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = Path(os.environ.get("BREAKEVEN_RESULTS", ROOT / "results"))
TARGET = RESULTS / "target"
ENGINE_PYTHON = os.environ.get("BREAKEVEN_ENGINE_PYTHON", str(ROOT / ".envs/vllm-cpu/bin/python"))
MODEL_PYTHON = os.environ.get("BREAKEVEN_MODEL_PYTHON", str(ROOT / ".envs/model-cpu/bin/python"))
