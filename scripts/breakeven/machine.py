"""What a speed depends on: processor, memory, GPUs, and whether the processor computes in bfloat16."""

import functools
import hashlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

CPUINFO = Path("/proc/cpuinfo")
BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # flags of x86; the last is ARM's


def facts() -> dict[str, Any]:
    """The machine as manifests keep it; its fingerprint keeps numbers of different machines apart."""
    found = {
        "cpu": cpu_name(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "gpu": gpus(),
    }
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]
    # Not in the fingerprint: it follows from the processor.
    return found | {"fingerprint": digest, "cpu_bfloat16": cpu_computes_bfloat16()}


@functools.cache
def cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is no such file."""
    try:
        first = CPUINFO.read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_name() -> str:
    return cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_computes_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere it is emulated, several times slower than float32."""
    return bool(BFLOAT16 & set((cpuinfo().get("flags") or cpuinfo().get("Features") or "").split()))


def gpus() -> list[str]:
    try:
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
