"""Benchmark results in the forms that others read: `vllm bench serve` JSON, AIPerf JSON, and Markdown for an issue.

One file per pass, as one run of those tools is one pass. Its duration is the time in which a request was in flight. Only what was measured is written: no dates, and no gaps between chunks (`itls`), which are no token
latencies under speculation; readers of either format take absent fields as not applicable.

vLLM: field names and formulas of vllm/benchmarks/serve.py (0.32.0). AIPerf: docs/reference/json-export-schema.md there,
schema 1.1.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from breakeven import acceptance, artefacts, load, reportpage, summary, tables
from breakeven.cli import UserError


def passes(results: Path | str) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """(rows of tables.BENCHMARK, manifest) of each measured pass that the comparison read, by "ARM-pass-N"."""
    results, found = Path(results), {}
    compared = artefacts.read_manifest(results / "comparison" / "summary.manifest.json", "comparison")["inputs"]
    for name in compared:
        if not re.fullmatch(r"[^/]+/pass-\d+\.parquet", name):
            continue
        path = results / "benchmarks" / name
        manifest = artefacts.read_manifest(artefacts.manifest_path(path), "benchmark")
        if "unmeasured" not in manifest:
            found[f"{path.parent.name}-{path.stem}"] = (
                artefacts.read_table(path, tables.BENCHMARK).to_pylist(),
                manifest,
            )
    if not found:
        raise UserError(
            f"{results}: no measured pass of a compared arm there; name the results folder of a finished run"
        )
    return found


def speculation(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int, int, list[int]] | None:
    """(steps, drafted, accepted, accepted per position) of a pass; None without speculation."""
    counted = [row for row in rows if row["steps"]]
    if not counted:
        return None
    steps, drafted, accepted = (sum(row[name] or 0 for row in counted) for name in ("steps", "drafted", "accepted"))
    positions = [row["accepted_per_position"] or [] for row in counted]
    width = max(map(len, positions))
    return steps, drafted, accepted, [sum(p[i] for p in positions if i < len(p)) for i in range(width)]


def token_times(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds per output token after the first, of each request with two tokens or more."""
    return [(r["e2e_s"] - r["ttft_s"]) / (r["completion_tokens"] - 1) for r in rows if r["completion_tokens"] > 1]


def duration_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of a pass in which a request was in flight; single stream, the sum of their times."""
    begins = [row["sent_at"] for row in rows]
    return load.in_flight(begins, [row["sent_at"] + row["e2e_s"] for row in rows], 1)[0]


def model(manifest: Mapping[str, Any]) -> str | None:
    """The model as the server was given it, from its command line."""
    command = (manifest.get("server") or {}).get("command") or []
    return next((command[i + 1] for i, word in enumerate(command[:-1]) if word in ("--model", "--model-path")), None)


def vllm_bench(rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A pass as the JSON that `vllm bench serve --save-result --save-detailed` writes."""
    parameters = manifest["parameters"]
    duration = duration_of(rows)
    prompt, output = (sum(row[name] or 0 for row in rows) for name in ("prompt_tokens", "completion_tokens"))
    found = {
        "endpoint_type": parameters["engine"],
        "backend": parameters["engine"],
        "label": parameters["arm"],
        "model_id": model(manifest),
        "tokenizer_id": model(manifest),
        "num_prompts": len(rows),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": load.concurrency(parameters["protocol"]),
        "duration": duration,
        "completed": len(rows),
        "failed": 0,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(rows) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "input_lens": [row["prompt_tokens"] for row in rows],
        "output_lens": [row["completion_tokens"] for row in rows],
        "ttfts": [row["ttft_s"] for row in rows],
        "latencies": [row["e2e_s"] for row in rows],
        "generated_texts": [row["text"] for row in rows],
        "errors": [""] * len(rows),
    }
    counts = speculation(rows)
    if counts:
        steps, drafted, accepted, positions = counts
        found |= {
            "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
            "spec_decode_acceptance_length": acceptance.acceptance_length(steps, accepted),
            "spec_decode_num_drafts": steps,
            "spec_decode_draft_tokens": drafted,
            "spec_decode_accepted_tokens": accepted,
            "spec_decode_per_position_acceptance_rates": [count / steps for count in positions],
        }
    for name, values in (
        ("ttft", [row["ttft_s"] for row in rows]),
        ("tpot", token_times(rows)),
        ("e2el", [row["e2e_s"] for row in rows]),
    ):
        if values:
            milliseconds = 1000 * np.array(values)
            found |= {
                f"mean_{name}_ms": float(np.mean(milliseconds)),
                f"median_{name}_ms": float(np.median(milliseconds)),
                f"std_{name}_ms": float(np.std(milliseconds)),
                f"p99_{name}_ms": float(np.percentile(milliseconds, 99)),
            }
    return found


def aiperf(rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A pass as AIPerf's profile_export_aiperf.json; acceptance has no place there."""

    def single(unit: str, value: float) -> dict[str, Any]:
        return {"unit": unit, "avg": float(value)}

    def spread(unit: str, values: Sequence[float]) -> dict[str, Any]:
        values = np.array(values, dtype=np.float64)
        percentiles = {f"p{p}": float(np.percentile(values, p)) for p in (1, 5, 10, 25, 50, 75, 90, 95, 99)}
        return {
            "unit": unit,
            "avg": float(values.mean()),
            **percentiles,
            "min": float(values.min()),
            "max": float(values.max()),
            "std": float(values.std(ddof=1)) if len(values) > 1 else 0.0,
            "count": len(values),
            "sum": float(values.sum()),
        }

    duration, per_token = duration_of(rows), np.array(token_times(rows))
    found = {
        "schema_version": "1.1",
        "benchmark_id": f"{manifest['parameters']['arm']}-pass-{manifest['parameters'].get('pass')}",
        "request_throughput": single("requests/sec", len(rows) / duration),
        "request_latency": spread("ms", [1000 * row["e2e_s"] for row in rows]),
        "request_count": single("requests", len(rows)),
        "time_to_first_token": spread("ms", [1000 * row["ttft_s"] for row in rows]),
        "output_token_throughput": single("tokens/sec", sum(row["completion_tokens"] for row in rows) / duration),
        "output_sequence_length": spread("tokens", [row["completion_tokens"] for row in rows]),
        "input_sequence_length": spread("tokens", [row["prompt_tokens"] for row in rows]),
        "benchmark_duration": single("sec", duration),
        "was_cancelled": False,
        "error_summary": [],
    }
    if len(per_token):
        found["inter_token_latency"] = spread("ms", 1000 * per_token)
        found["output_token_throughput_per_user"] = spread("tokens/sec/user", 1 / per_token)
    return found


def markdown(results: Path | str, reference: Path | str) -> str:
    """The verdict to paste into an issue: headline, table of arms, causes and next steps, settings."""
    page = reportpage.load_run(results, reference)
    sentence, numbers = reportpage.headline(page.rows)
    lines = [f"**{_plain(sentence)}**", "", _plain(numbers), ""]
    names = ("arm", "protocol", "tok/s", "speed-up", "AL served / offline", "rho", "identical", "verdict", "cause")
    lines += ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in page.rows:
        speedup = "" if row["verdict"] == "baseline" or row["speedup"] is None else reportpage.times(row)
        length = (
            f"{reportpage.number(row['acceptance_length'])} / {reportpage.number(row['offline_acceptance_length'])}"
        )
        cells = [
            row["arm"], row["protocol"], reportpage.number(row["tokens_per_second"], 1), speedup,
            length if row["acceptance_length"] else "", reportpage.number(row["rho"]) if row["rho"] else "",
            reportpage.percent(row["identical_outputs"]), row["verdict"],
            (row["cause"] or "") + (f" ({row['fault']})" if row["fault"] else ""),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(_plain, cells)) + " |")
    lines.append("")
    for series in page.under_load:
        lines += [f"Under load, {_plain(series['label'])}: {_plain(series['crossing'])}.", ""]
    for row in page.rows:
        details = row["details"]
        said = [*details.get("warnings", []), *details.get("evidence", []), *summary.next_steps(row, details)]
        if said:
            lines += [f"`{_plain(row['arm'])}`:", "", *(f"- {_plain(text)}" for text in said), ""]
    lines += [f"- {name}: {_plain(text)}" for name, text in reportpage.settings(page) if name != "Prompts"]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text on one line that Markdown neither takes for a table's bar, nor for HTML, a mention or a reference."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return re.sub(r"(?<!\w)([@#])(?=\w)", "\\1\u200b", text)


FORMATS = {"vllm-bench": vllm_bench, "aiperf": aiperf}
"""Formats of one pass, by name."""
