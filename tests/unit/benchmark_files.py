"""Writes benchmark passes as the benchmark stage does, for the tests of comparison and report."""

import copy
from pathlib import Path

import numpy as np

from breakeven import artefacts, tables

PROMPTS = [f"reference-{i}" for i in range(5)]


def default(arm: str = "vllm-none", k: int = 0, drafter: str | None = None, rate: float = 30.0) -> dict:
    """A pass to be changed by a test and written by `write`: manifest parts and knobs of the rows."""
    return {
        "parameters": {
            "arm": arm,
            "engine": "vllm",
            "drafter": drafter,
            "k": k,
            "method": "eagle3" if drafter else "none",
            "protocol": {"name": "quick", "max_tokens": 128, "temperature": 0, "passes": 3, "seed": 0},
            "flags": {"max-model-len": 2048},
            "environment": {},
        },
        "versions": {"vllm": "0.32.0"},
        "machine": {"cpu": "x86_64", "cores": 2, "memory_gb": 8, "gpu": [], "fingerprint": "c0ffee"},
        "server": {"command": ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "target"]},
        "rate": rate,
        "tokens": 128,
        "cached": 0,
        "conditional": [0.60, 0.66, 0.75, 0.7, 0.7][:k],
        "prompts": PROMPTS,
        "passes": [1, 2, 3],
        "text": "An answer.",
        "sanity": {},  # by prompt, as benchmark.sanity notes it
        "output": None,  # token ids of every output, instead of prose
        "sent_at": 1.8e9,  # of the first pass; passes are ten minutes apart
        "change_rows": lambda rows: rows,
        "findings": [],
        "unmeasured": {},  # by pass number: preflight or decided; such a pass has no rows
    }


def write(benchmarks: Path, spec: dict, seed: int = 0) -> None:
    """Write all passes of an arm under benchmarks/{arm}/."""
    spec = copy.deepcopy(spec)
    arm, k = spec["parameters"]["arm"], spec["parameters"]["k"]
    rng = np.random.default_rng([seed, sum(arm.encode())])
    gains = 1 + 0.05 * rng.standard_normal(len(spec["prompts"])) * (k > 0)
    for number in spec["passes"]:
        rows = []
        for i, prompt in enumerate(spec["prompts"]):
            n = spec["tokens"]
            output = spec["output"] or np.random.default_rng(i).integers(0, 49152, n).tolist()
            steps, counts = _walk(rng, n, spec["conditional"]) if k else (None, None)
            ttft = 0.2 + 0.01 * rng.random()
            rate = spec["rate"] * (1 + 0.1 * i) * gains[i] * (1 + 0.01 * rng.standard_normal())
            rows.append(
                {
                    "arm": arm,
                    "pass_number": number,
                    "prompt_id": prompt,
                    "prompt_tokens": 40 + i,
                    "cached_tokens": spec["cached"],
                    "completion_tokens": n,
                    "prompt_token_ids": list(range(40 + i)),
                    "output_token_ids": output,
                    "text": spec["text"],
                    "finish_reason": "length",
                    "sent_at": spec["sent_at"] + 600 * number + 10 * i,
                    "ttft_s": ttft,
                    "e2e_s": ttft + (n - 1) / rate,
                    "steps": steps,
                    "drafted": None if steps is None else steps * k,
                    "accepted": None if steps is None else sum(counts),
                    "accepted_per_position": counts,
                }
            )
        path = benchmarks / arm / f"pass-{number}.parquet"
        why = spec["unmeasured"].get(number)
        artefacts.write_table(path, [] if why else spec["change_rows"](rows), tables.BENCHMARK)
        artefacts.write_manifest(
            artefacts.manifest_path(path),
            "benchmark",
            parameters=spec["parameters"] | {"pass": number},
            counts={"requests": len(rows)},
            versions=spec["versions"],
            machine=spec["machine"],
            findings=spec["findings"],
            **({"unmeasured": why} if why else {"server": spec["server"], "sanity": spec["sanity"]}),
        )


def _walk(rng, n, conditional):
    """Steps and accepted per position of one output of n tokens."""
    steps, done, counts = 0, 1, [0] * len(conditional)
    while done < n:
        steps, done = steps + 1, done + 1
        for position, c in enumerate(conditional):
            if rng.random() >= c:
                break
            counts[position] += 1
            done += 1
    return steps, counts


def finding(id: str, level: str = "ERROR", allowed: bool = False) -> dict:
    """One entry of a check.json."""
    return {"id": id, "level": level, "allowed": allowed, "message": f"{id} is wrong: 1, not 2", "engine": "vllm",
            "version": "0.32.0", "effect": "served, no word", "mend": f"mend {id}", "fixable": False}  # fmt: skip


def write_offline(path: Path, k: int = 3, conditional=(0.60, 0.66, 0.75), prompts: str = "quick") -> Path:
    """Write an offline walk of 10,000 steps."""
    accepted = [int(10_000 * np.prod(conditional[: i + 1])) for i in range(k)]
    rows = [
        {
            "prompts": prompts,
            "k": k,
            "position": i + 1,
            "steps": 10_000,
            "accepted": accepted[i],
            "marginal": accepted[i] / 10_000,
            "conditional": conditional[i],
            "acceptance_length": 1 + sum(accepted) / 10_000,
        }
        for i in range(k)
    ]
    artefacts.write_table(path, rows, tables.OFFLINE)
    return path


def write_walk(path: Path, counts: dict[str, tuple[int, list[int]]], schema=tables.WHAT_IF) -> Path:
    """Write walks by hypothesis, (steps, accepted per position), as a what-if or (the only one) an offline table."""
    rows = [
        {
            "hypothesis": name,
            "prompts": "served",
            "k": len(accepted),
            "position": i + 1,
            "steps": steps,
            "accepted": n,
            "marginal": n / steps,
            "conditional": n / max(([steps, *accepted])[i], 1),
            "acceptance_length": 1 + sum(accepted) / steps,
        }
        for name, (steps, accepted) in counts.items()
        for i, n in enumerate(accepted)
    ]
    artefacts.write_table(path, [{key: row[key] for key in schema.names} for row in rows], schema)
    return path


def write_step_cost(path: Path, rho: dict[int, float], spec: dict, **changes) -> Path:
    """Write a step-cost table measured on the machine, version and flags of an arm."""
    rows = [
        {
            "engine": spec["parameters"]["engine"],
            "k": k,
            "concurrency": 1,
            "repeat": 1,
            "step_s": 0.03 * value,
            "plain_step_s": 0.03,
            "rho": value,
        }
        for k, value in rho.items()
    ]
    artefacts.write_table(path, rows, tables.STEP_COST)
    artefacts.write_manifest(
        artefacts.manifest_path(path),
        "stepcost",
        **{
            "parameters": {key: spec["parameters"][key] for key in ("engine", "flags", "environment")}
            | {"draft_vocab_size": 8192},
            "versions": spec["versions"],
            "machine": spec["machine"],
        }
        | changes,
    )
    return path
