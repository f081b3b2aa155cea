"""What finished runs say: rho, break-even, what is plausible, what to check first. For numbers from anywhere.

Rates. Engines call different quantities "acceptance rate". With S verification steps, A accepted draft tokens (bonus not
counted), K drafted tokens per step and SGLang's D = speculative_num_draft_tokens, which counts the root (D = K + 1 in a
chain), the sources say:

    vLLM (0.20.2, 0.32.0)    A / (S K)            v1/spec_decode/metrics.py, SpecDecodingLogging.log
    SGLang log, <= 0.5.3     no rate, only "accept len" = (A + S) / S         managers/scheduler_metrics_mixin.py
    SGLang log, 0.5.5        (A + S) / (S (steps + 1))                        managers/scheduler_metrics_mixin.py
    SGLang log, 0.5.9-0.5.10 (A + S) / (S D)      managers/, from 0.5.10 observability/scheduler_metrics_mixin.py
    SGLang log, >= 0.5.11    A / (S (D - 1))      observability/scheduler_metrics_mixin.py (0.5.11, 0.5.12),
                                                  managers/scheduler_components/metrics_reporter.py (0.5.23)
    SGLang request, 0.5.5    A / (S steps)        managers/tokenizer_manager.py, meta_info spec_accept_rate
    SGLang request, >= 0.5.9 A / (S (D - 1))      managers/tokenizer_manager.py, _calculate_spec_decoding_metrics

Versions 0.5.6 to 0.5.8 are read as 0.5.5 (in a chain steps + 1 = D, so both agree there); 0.5.4 was not read and gets
every reading. "accept len" includes the bonus in all of these, as vLLM's "Mean acceptance length" does: compare that.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from breakeven import acceptance, artefacts, conventions, engines, stats, stepcost, verdict
from breakeven.cli import UserError

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
TYPICAL_K = 5  # where K is not known: the deepest that comparable runs report


@dataclass
class Run:
    """One finished run beside its baseline. What is not known stays None."""

    baseline: float  # tokens per second without speculation
    speculative: float
    name: str = "run"
    engine: str | None = None
    version: str | None = None
    lengths: tuple[float, float] | None = None  # AL, from .. to
    rate: float | None = None  # "acceptance rate" as the engine showed it
    rate_source: str = "log"  # log | request: SGLang shows two
    draft_tokens: int | None = None  # vLLM: num_speculative_tokens; SGLang: speculative_num_draft_tokens
    num_steps: int | None = None  # SGLang: speculative_num_steps
    per_prompt: Sequence[float] | None = None
    samples: int | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    counts: verdict.Counts | None = None
    settings: "Settings | None" = None

    def __post_init__(self):
        for what, value in (("baseline", self.baseline), ("speculative", self.speculative)):
            if not (value and value > 0 and math.isfinite(value)):
                raise UserError(f"{self.name}: {what} {value} is no speed; give tokens per second, above 0")
        if self.rate is not None and not 0 <= self.rate <= 1:
            raise UserError(
                f"{self.name}: an acceptance rate of {self.rate:g} is impossible; write 0.15 or 15%, and give the"
                " acceptance length where an old SGLang shows rates above 1"
            )
        if self.lengths:
            low, high = self.lengths
            if not 1 <= low <= high:
                raise UserError(
                    f"{self.name}: an acceptance length is at least 1, the bonus token is counted; got {low:g} to {high:g}"
                )
            if self.depth is not None and high > self.depth + 1:
                raise UserError(
                    f"{self.name}: acceptance length {high:g} above K + 1 = {self.depth + 1} is impossible; check"
                    " --draft-tokens, and how the length was computed"
                )

    @property
    def depth(self) -> int | None:
        """Drafted tokens that one step can accept: K; in SGLang at most steps, and D - 1."""
        if self.engine == "sglang":
            if self.num_steps is not None:
                return self.num_steps
            return None if self.draft_tokens is None else self.draft_tokens - 1
        return self.draft_tokens

    @property
    def speedup(self) -> float:
        return self.speculative / self.baseline


# What an engine's rate means


class Reading(NamedTuple):
    """One meaning of an acceptance rate."""

    length: float
    meaning: str


def read_rate(run: Run) -> list[Reading]:
    """AL under every meaning that the rate can have in this engine and version; empty where D or K is missing."""
    rate, d = run.rate, run.draft_tokens
    if rate is None or d is None:
        return []
    if run.engine != "sglang":
        return [Reading(1 + rate * d, f"accepted / drafted, bonus not counted: AL = 1 + {rate:g} x {d}")]
    steps = run.num_steps if run.num_steps is not None else d - 1
    strict = Reading(1 + rate * (d - 1), f"accepted / (D - 1), bonus not counted: AL = 1 + {rate:g} x {d - 1}")
    by_steps = Reading(1 + rate * steps, f"accepted / steps, bonus not counted: AL = 1 + {rate:g} x {steps}")
    whole = Reading(rate * d, f"(accepted + bonus) / D: AL = {rate:g} x {d}")
    whole_steps = Reading(
        rate * (steps + 1), f"(accepted + bonus) / (steps + 1), bonus counted: AL = {rate:g} x {steps + 1}"
    )
    version = conventions.parse_version(run.version) if run.version else None
    if run.rate_source == "request":
        found = [by_steps, strict] if version is None else [by_steps if version < (0, 5, 9) else strict]
    elif version is None or version < (0, 5, 5):
        found = [whole_steps, whole, strict]
    else:
        found = [whole_steps if version < (0, 5, 9) else whole if version < (0, 5, 11) else strict]
    possible = {round(r.length, 9): r for r in reversed(found) if 1 <= r.length <= steps + 1}
    if not possible:
        raise UserError(
            f"{run.name}: an acceptance rate of {rate:g} with {d} draft tokens gives acceptance length"
            f" {found[0].length:.2f}, which is impossible ({found[0].meaning}); check version, draft tokens and source"
        )
    return list(reversed(possible.values()))


def shown_rates(length: float, draft_tokens: int) -> dict[str, float]:
    """What each engine would show as its rate for a step with D draft tokens (root counted) and this AL."""
    return {
        "SGLang 0.5.9 to 0.5.10 (bonus counted)": length / draft_tokens,
        "SGLang from 0.5.11 on and vLLM (bonus not counted)": (length - 1) / (draft_tokens - 1),
    }


# Metrics and logs

_NUMBER = r"\d{1,15}(?:\.\d+)?"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")


def _samples(path: Path) -> list[tuple[str, dict[str, str], float]]:
    found = []
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    for line in lines:
        match = _SAMPLE.match(line.strip())
        if match and not line.startswith("#"):
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
            try:
                value = engines.sample_value(match[1], match[3])
            except UserError:
                raise UserError(f"{path}: {line.strip()[:80]!r} is no Prometheus sample") from None
            if value is not None:
                found.append((match[1], labels, value))
    if not any(name.startswith(("vllm:", "sglang:")) for name, _, _ in found):
        raise UserError(f"{path}: no vllm: or sglang: metric in it; save the server's /metrics text")
    models = {labels["model_name"] for name, labels, _ in found if "model_name" in labels and name.count(":")}
    if len(models) > 1:
        raise UserError(f"{path}: metrics of {len(models)} models ({', '.join(sorted(models))}); serve one at a time")
    return found


def read_metrics(before: Path, after: Path) -> dict[str, Any]:
    """Differences of the speculation counters between two /metrics texts, summed over engines: fields of Run.

    vLLM counts everything. SGLang (from the version that has spec_verify_calls_total) gives completion tokens and
    verification calls, where each request's first token comes from the prefill; older ones only show the last interval.
    """

    def total(samples, name: str) -> dict[str, float]:
        sums: dict[str, float] = {}
        for found, labels, value in samples:
            if found in (name, f"{name}_total"):
                key = labels.get("position", "")
                sums[key] = sums.get(key, 0) + value
        return sums

    first, last = _samples(before), _samples(after)

    def difference(name: str) -> dict[str, float]:
        old, new = total(first, name), total(last, name)
        for key, value in new.items():
            if value < old.get(key, 0):
                raise UserError(f"{after}: {name} is lower than in {before}; the server was restarted in between")
        return {key: value - old.get(key, 0) for key, value in new.items()}

    if any(name.startswith("vllm:") for name, _, _ in last):
        steps = int(difference("vllm:spec_decode_num_drafts").get("", 0))
        drafted = int(difference("vllm:spec_decode_num_draft_tokens").get("", 0))
        accepted = int(difference("vllm:spec_decode_num_accepted_tokens").get("", 0))
        positions = difference("vllm:spec_decode_num_accepted_tokens_per_pos")
        if not all(re.fullmatch(r"\d{1,4}", key) for key in positions):
            raise UserError(f"{after}: accepted tokens without a position; save the server's whole /metrics text")
        if not steps:
            raise UserError(f"{after}: no verification step since {before}; was this server speculating?")
        curve = [int(positions[key]) for key in sorted(positions, key=int)]
        found = acceptance.impossible(steps, curve, accepted if curve else None, drafted or None)
        if found:
            raise UserError(f"{after}: impossible counts: {found[0]}")
        length = 1 + accepted / steps
        result: dict[str, Any] = {"engine": "vllm", "lengths": (length, length)}
        if curve:
            result |= {"counts": verdict.Counts(steps, tuple(curve)), "draft_tokens": len(curve)}
        return result
    calls = difference("sglang:spec_verify_calls").get("", 0)
    tokens = difference("sglang:generation_tokens").get("", 0)
    requests = difference("sglang:num_requests").get("", 0)
    if calls:
        length = (tokens - requests) / calls
        if length < 1:
            raise UserError(f"{after}: {tokens:g} tokens in {calls:g} verification calls is impossible")
        return {"engine": "sglang", "lengths": (length, length)}
    gauges = [value for name, _, value in last if name == "sglang:spec_accept_length" and value]
    if not gauges:
        raise UserError(
            f"{after}: no verification calls and no sglang:spec_accept_length; was this server speculating?"
        )
    length = float(np.mean(gauges))
    return {"engine": "sglang", "lengths": (length, length)}


@dataclass
class Settings:
    """What a server log says about how it ran."""

    engine: str | None = None
    version: str | None = None
    graphs: bool | None = None  # CUDA graphs in use; None on a CPU
    eager_cpu: bool = False  # vLLM on a CPU, not compiled
    algorithm: str | None = None
    layers: list[int] | None = None
    shares_head: bool | None = None
    shares_embeddings: bool | None = None
    draft_tokens: int | None = None
    num_steps: int | None = None
    topk: int | None = None
    lengths: list[float] = field(default_factory=list)  # every AL line
    counts: verdict.Counts | None = None  # vLLM: summed over its intervals

    @property
    def length(self) -> float | None:
        """AL of the whole log: from counts, else the mean of the lines."""
        if self.counts is not None:
            return self.counts.length
        return float(np.mean(self.lengths)) if self.lengths else None

    def sentences(self) -> list[str]:
        """The settings, one sentence each; only what the log says."""
        found = []
        if self.engine:
            version = f" {self.version}" if self.version else ""
            found.append(
                f"{ENGINES[self.engine]}{version}" + (f", algorithm {self.algorithm}" if self.algorithm else "")
            )
        if self.graphs is not None:
            found.append("CUDA graphs are in use" if self.graphs else "CUDA graphs are off")
        if self.eager_cpu:
            found.append("it runs on a CPU in eager mode")
        if self.layers is not None:
            found.append(f"the target's features are captured at layers {self.layers} (inputs of these layers)")
        if self.shares_head is not None:
            found.append(
                "the drafter uses the target's lm_head" if self.shares_head else "the drafter uses its own lm_head"
            )
        if self.shares_embeddings is not None:
            whose = "the target's" if self.shares_embeddings else "its own"
            found.append(f"the drafter uses {whose} embeddings")
        return found


def read_log(path: Path) -> Settings:
    """Effective settings and acceptance from a vLLM or SGLang server log; a UserError if it is neither."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    if re.search(r"V1 LLM engine|vLLM API server version|SpecDecoding metrics: ", text):
        return _read_vllm_log(text)
    if re.search(r"server_args=|#running-req: ", text):
        return _read_sglang_log(text)
    raise UserError(f"{path}: neither a vLLM nor an SGLang server log; give the whole log from the start on")


def _read_vllm_log(text: str) -> Settings:
    settings = Settings("vllm")
    version = re.search(r"V1 LLM engine \(v([^)]+)\)|vLLM API server version (\S+)", text)
    if version:
        settings.version = version[1] or version[2]
    if re.search(r"enforce_eager=True|Cudagraph is disabled under eager mode|Enforce eager set, disabling", text):
        settings.eager_cpu = "device_config=cpu" in text
        settings.graphs = None if settings.eager_cpu else False
    elif re.search(r"Graph capturing finished|Capturing CUDA graphs", text):
        settings.graphs = True
    config = re.search(r"SpeculativeConfig\(method='([^']*)'.*?num_spec_tokens=(\d{1,4})", text)
    if config:
        settings.algorithm, settings.draft_tokens = config[1], int(config[2])
    layers = re.search(
        r"Using (?:auxiliary layers from speculative config|Eagle3 auxiliary layers from (?:config|model)): "
        r"[(\[]([\d, ]+)[)\]]", text,
    )  # fmt: skip
    if layers:
        settings.layers = [int(number) for number in re.findall(r"\d{1,4}", layers[1])]
    if re.search(r"Sharing target model lm_head weights|Loading EAGLE LM head weights from the target", text):
        settings.shares_head = True
    elif "Keeping separate lm_head weights" in text:
        settings.shares_head = False
    if "Sharing target model embedding weights" in text:
        settings.shares_embeddings = True
    elif "Keeping separate embedding weights" in text:
        settings.shares_embeddings = False
    line = re.compile(
        rf"Mean acceptance length: ({_NUMBER}).*?Drafted: (\d{{1,15}}) tokens, Per-position acceptance rate: "
        rf"({_NUMBER}(?:, {_NUMBER})*), Avg"
    )
    steps, curve = 0.0, np.zeros(0)
    for length, drafted, rates in line.findall(text):
        settings.lengths.append(float(length))
        marginal = np.array([float(part) for part in rates.split(",")])
        if len(curve) not in (0, len(marginal)):
            raise UserError("server log: the number of draft positions changes in it; give the log of one server")
        interval = int(drafted) / len(marginal)
        steps, curve = steps + interval, (curve if len(curve) else np.zeros(len(marginal))) + marginal * interval
    if steps:
        settings.counts = verdict.Counts(round(steps), tuple(int(min(n, steps)) for n in np.round(curve)))
        settings.draft_tokens = settings.draft_tokens or len(curve)
    return settings


def _read_sglang_log(text: str) -> Settings:
    settings = Settings("sglang")

    def argument(name: str) -> str | None:
        found = re.search(rf"['\"]?\b{name}['\"]?\s*[=:]\s*['\"]?([\w.\-]+)", text)
        return None if found is None or found[1] == "None" else found[1]

    settings.algorithm = argument("speculative_algorithm")
    for name, key in (
        ("draft_tokens", "speculative_num_draft_tokens"),
        ("num_steps", "speculative_num_steps"),
        ("topk", "speculative_eagle_topk"),
    ):
        value = argument(key)
        setattr(settings, name, int(value) if value and re.fullmatch(r"\d{1,4}", value) else None)
    version = re.search(
        r"sglang(?:[_ ]version)?['\"]?\s*[=:v ]+\s*['\"]?(\d+\.\d+\.\d+\S*?)['\",\s]", text, re.IGNORECASE
    )
    settings.version = version[1] if version else None
    used = re.findall(r"Decode batch.*?cuda graph: (True|False)", text)
    if used:
        settings.graphs = used.count("True") > len(used) / 2
    elif argument("disable_cuda_graph") == "True":
        settings.graphs = False
    settings.lengths = [float(value) for value in re.findall(rf"accept len: ({_NUMBER})", text)]
    return settings


# The diagnosis


class Section(NamedTuple):
    """A title and its sentences."""

    title: str
    lines: list[str]


def diagnose(run: Run, data: Mapping[str, Any], target: str | None = None) -> list[Section]:
    """What one run says. data: resources/expectations.json; target: its name there, e.g. Kimi-K2.5."""
    speed = [f"{run.speculative:g} against {run.baseline:g} tok/s: {run.speedup:.2f}x"]
    if run.per_prompt and len(run.per_prompt) >= stats.MINIMUM_PROMPTS:
        low, high = stats.bootstrap_interval(np.log(np.array(run.per_prompt) / run.baseline))
        speed[0] += f", 95 % interval over {len(run.per_prompt)} prompts {np.exp(low):.2f} to {np.exp(high):.2f}"
        speed.append("the baseline is one number, so its own noise is not in that interval, and nothing is paired")
    else:
        speed.append("one unpaired number for each arm: a small difference would mean nothing")
    readings = read_rate(run)
    lengths = run.lengths or ((min(r.length for r in readings), max(r.length for r in readings)) if readings else None)
    sections = [Section("Speed", speed), Section("Acceptance", _acceptance_lines(run, readings, lengths))]
    rho = _rho_lines(run, lengths)
    sections.append(Section("Break-even", rho))
    cause = None
    plausible: list[str] = []
    if lengths:
        middle = sum(lengths) / 2
        if run.depth is None:
            plausible.append(f"K is not known and taken as {TYPICAL_K}")
        found = verdict.judge(
            verdict.Facts(
                label="slower" if run.speedup < 1 else "faster", k=run.depth or TYPICAL_K, length=middle, served=run.counts,
                speedup=run.speedup, rho=middle / run.speedup, samples=run.samples,
                graphs_off=bool(run.settings and run.settings.graphs is False),
            ),
            data,
        )  # fmt: skip
        cause = found.cause
        plausible += [line for line in found.evidence if "offline walk" not in line and "engine gave" not in line]
        if cause:
            plausible.append(f"if the speeds hold, the cause is {cause}")
        plausible.append("whether the engine loses acceptance cannot be known from these numbers (no offline walk)")
    plausible += _published(run, lengths, data, target)
    if run.samples:
        near = min(data["public"], key=lambda row: abs(math.log(row["samples"] / run.samples)))
        plausible.append(
            f"public reports near {run.samples:,} samples: AL about {near['acceptance_length']:g} ({near['source']})"
        )
    sections.append(Section("Plausible", plausible or ["nothing more can be said without an acceptance length and K"]))
    if run.settings:
        sections.append(Section("Server log", run.settings.sentences()))
    sections.append(Section("Check first", check_first(run, lengths, cause)))
    return sections


def _acceptance_lines(run: Run, readings: list[Reading], lengths: tuple[float, float] | None) -> list[str]:
    lines = []
    if run.lengths:
        lines.append(f"acceptance length {_range(run.lengths)}, bonus token counted")
    for reading in readings:
        name = ENGINES.get(run.engine, "engine unknown, read as vLLM")
        version = f" {run.version}" if run.version else ""
        lines.append(f"rate {run.rate:.1%} of {name}{version}: {reading.meaning} = {reading.length:.2f}")
    if len(readings) > 1:
        lines.append("SGLang changed what its rate means; give --engine-version to settle which reading holds")
    if run.rate is not None and run.draft_tokens is None:
        if run.engine == "sglang":
            lines.append("the number of draft tokens is needed to read SGLang's rate; give --draft-tokens")
        else:
            values = ", ".join(
                f"{k}: {1 + run.rate * k:.2f} (rho {(1 + run.rate * k) / run.speedup:.2f})" for k in range(1, 6)
            )
            lines.append(f"rate {run.rate:.0%} means AL = 1 + {run.rate:g} K, bonus not counted; by K: {values}")
    if not lines:
        lines.append("not known: take AL from the engine's counters (--metrics) or its log (--log)")
    if lengths and run.engine == "sglang" and run.lengths and run.draft_tokens and run.draft_tokens > 1:
        for name, (low, high) in _as_rates(run).items():
            lines.append(f"shown as a rate this is {low:.1%} to {high:.1%} in {name}")
    return lines


def _as_rates(run: Run) -> dict[str, tuple[float, float]]:
    low, high = (shown_rates(length, run.draft_tokens) for length in run.lengths)
    return {name: (low[name], high[name]) for name in low}


def _rho_lines(run: Run, lengths: tuple[float, float] | None) -> list[str]:
    s = run.speedup
    if lengths:
        low, high = (length / s for length in lengths)
        middle = (low + high) / 2
        line = f"rho = AL / speed-up = {_range((low, high))}"
        if high - low > 0.005:
            line += f" (middle {middle:.2f})"
        lines = [line + ": a step with speculation costs that many plain steps, and AL must exceed it"]
        if run.depth:
            needed = stepcost.needed_conditional(middle, run.depth)
            lines.append(
                f"ceiling at that rho: {stepcost.ceiling(run.depth, middle):.2f}x, with every draft token accepted"
            )
            if run.engine == "sglang" and run.num_steps is None:
                lines[-1] += "; in a tree a step accepts at most speculative_num_steps: give --num-steps"
            lines.append(
                "needed: " + (f"each draft token accepted with {needed:.2f}, given the ones before"
                if needed is not None else "more than K + 1 tokens a step, which cannot be")
            )  # fmt: skip
        return lines
    lines = [f"without AL only bounds: rho is at least {1 / s:.2f} (no draft accepted)"]
    if run.depth:
        lines[0] += f" and at most {(run.depth + 1) / s:.2f} (all {run.depth} accepted)"
    return lines


def _published(run: Run, lengths, data: Mapping[str, Any], target: str | None) -> list[str]:
    if not lengths:
        return []
    rho = sum(lengths) / 2 / run.speedup
    lines = []
    for head in data["published_heads"]:
        if target and head["target"].lower() == target.lower():
            speedup = head["acceptance_length"] / rho
            lines.append(
                f"{head['what']} reaches AL {head['acceptance_length']} at K = {head['k']}: {speedup:.2f}x at rho"
                f" {rho:.2f}"
            )
            if speedup < 1:
                lines.append("more data could not have paid at this rho; the step cost has to fall")
    return lines


def check_first(run: Run, lengths: tuple[float, float] | None, cause: str | None) -> list[str]:
    """What to look at, the most telling first."""
    lines = []
    settings = run.settings
    if settings and settings.graphs is False:
        lines.append("CUDA graphs are off: turn them on in both arms and measure again")
    if settings and settings.eager_cpu:
        lines.append(
            "eager mode: measure both arms compiled as well, a baseline is fair only in its best configuration"
        )
    if lengths and lengths[1] < 1.05:
        lines.append(
            "no draft is accepted: the algorithm flag (EAGLE3, not EAGLE), layer ids, d2t and missing tensors; run"
            " scripts/check_drafter.py"
        )
    if settings and settings.shares_head:
        lines.append("the log says the target's lm_head is shared: wrong if the checkpoint ships its own")
    if lengths is None:
        lines.append("the acceptance length: save /metrics before and after a run, and give both with --metrics")
    if cause == "cost" or (lengths is None and run.speedup < 1):
        if not (settings and (settings.graphs is not None or settings.eager_cpu)):
            lines.append("CUDA graphs, for verification and for the drafter: SGLang prints 'cuda graph: True' per batch, "
                         "vLLM must not run with enforce_eager")  # fmt: skip
        lines.append(
            "the draft's own cost: fewer draft tokens, a smaller draft vocabulary, the draft's attention backend"
        )
        lines.append("rho by itself, with a random drafter of the right shape, before any more data is made")
    if cause == "training":
        lines.append("more training data with responses of the target itself; see the comparable runs above")
    if run.speedup < 1 or cause:
        lines.append("offline acceptance on the served outputs (scripts/replay_served.py): it alone separates training from"
                     " integration")  # fmt: skip
    if run.draft_tokens is None:
        lines.append("K, the number of draft tokens, belongs to the record of a run")
    lines.append("three interleaved passes of both arms on the same prompts and sampling, instead of single numbers")
    return lines


def _range(pair: tuple[float, float]) -> str:
    low, high = pair
    return f"{low:.2f}" if math.isclose(low, high, rel_tol=1e-3) else f"{low:.2f} to {high:.2f}"


def gap(run: Run, expected_speedup: float, expected_length: float) -> list[str]:
    """A published result beside this run: which part of the gap is acceptance, which is step cost."""
    if not run.lengths:
        raise UserError("to split the gap to an expected speed-up, give this run's --accept-length")
    parts = stepcost.split(expected_speedup, expected_length, run.speedup, sum(run.lengths) / 2)
    lines = [
        f"expected {expected_speedup:g}x at AL {expected_length:g} (rho {expected_length / expected_speedup:.2f}), reached"
        f" {run.speedup:.2f}x at AL {_range(run.lengths)} (rho {sum(run.lengths) / 2 / run.speedup:.2f})",
        f"a factor of {parts.total:.2f} is missing: {parts.acceptance:.2f} from acceptance x {parts.cost:.2f} from step cost",
    ]
    if not math.isnan(parts.acceptance_share) and 0 <= parts.acceptance_share <= 1:
        lines.append(f"{parts.acceptance_share:.0%} of the gap (in logs) is acceptance, the rest is step cost")
    return lines


# Several runs


def together(runs: Sequence[Run], case: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    """What several runs say beside each other, and what cannot be compared."""
    return [
        *_not_comparable(runs),
        *_two_rates(runs),
        *_step_time(runs),
        *_ceiling_of_data(runs, case, data),
        *_hidden_states(case.get("hidden_states")),
    ]


def _not_comparable(runs: Sequence[Run]) -> list[str]:
    settings = {(run.engine, run.temperature, run.max_tokens) for run in runs}
    if len(settings) < 2:
        return []
    texts = sorted(f"{ENGINES.get(e, e)} at temperature {t:g}, {m} tokens" for e, t, m in settings if t is not None)
    return [f"not comparable with each other: {'; '.join(texts)}"]


def _two_rates(runs: Sequence[Run]) -> list[str]:
    lines = []
    for one in runs:
        if one.rate is None:
            continue
        for other in runs:
            if other.engine == one.engine or not other.lengths or (other.draft_tokens or 0) < 2:
                continue
            shown = "; ".join(f"{low:.1%} to {high:.1%} in {name}" for name, (low, high) in _as_rates(other).items())
            lines.append(
                f"the two acceptance rates are different quantities: {ENGINES.get(one.engine, one.engine)}'s {one.rate:.0%}"
                f" is accepted / drafted tokens without the bonus, AL = 1 + {one.rate:g} K; {ENGINES.get(other.engine, other.engine)}'s"
                f" AL {_range(other.lengths)} with {other.draft_tokens} draft tokens would be shown as {shown}; compare"
                " acceptance lengths instead"
            )
    return lines


def _step_time(runs: Sequence[Run]) -> list[str]:
    """Two numbers of draft tokens on one engine and baseline: does step time grow with them?"""
    lines = []
    for more in runs:
        for fewer in runs:
            if (
                more.engine != fewer.engine or more.baseline != fewer.baseline or not more.lengths or fewer.lengths
                or not more.draft_tokens or not fewer.draft_tokens or more.draft_tokens <= fewer.draft_tokens
            ):  # fmt: skip
                continue
            proportional = more.draft_tokens / fewer.draft_tokens
            ratio = fewer.speculative / more.speculative  # of step times, more : fewer, at equal AL
            implied = tuple(length * ratio / proportional for length in more.lengths)
            low, high = (length / more.speculative * 1000 for length in more.lengths)
            lines.append(
                f"{fewer.draft_tokens} and {more.draft_tokens} draft tokens ran at {fewer.speculative:g} and"
                f" {more.speculative:g} tok/s: at equal AL the step time is flat ({ratio:.2f}x as long with"
                f" {more.draft_tokens}, {low:.0f} to {high:.0f} ms against {1000 / more.baseline:.0f} ms plain)"
            )
            lines += _at_same_cost(runs, more)
            if implied[1] < 1:
                lines.append(
                    f"if a step's time grew with the draft tokens, AL with {fewer.draft_tokens} would be"
                    f" {_range(implied)}, below 1, which is impossible: the cost is mostly a fixed overhead per step (as"
                    " without CUDA graphs), not verification"
                )
    return lines


def _at_same_cost(runs: Sequence[Run], known: Run) -> list[str]:
    """AL of the runs that recorded none, if their steps took as long as those of `known`."""
    rho = sum(known.lengths) / 2 / known.speedup
    texts = [
        f"{run.name} {rho * run.speedup:.2f}"
        for run in runs
        if run.engine == known.engine and run.baseline == known.baseline and not run.lengths
    ]
    return [f"if all steps there cost rho {rho:.2f}, the acceptance lengths were: {', '.join(texts)}"] if texts else []


def _ceiling_of_data(runs: Sequence[Run], case: Mapping[str, Any], data: Mapping[str, Any]) -> list[str]:
    known = [run for run in runs if run.lengths]
    lines = []
    for run in known:
        lines += [
            f"{ENGINES.get(run.engine, run.engine)}: {line}"
            for line in _published(run, run.lengths, data, case.get("target"))
        ]
    samples = {run.samples for run in runs if run.samples}
    for n in sorted(samples):
        near = min(data["public"], key=lambda row: abs(math.log(row["samples"] / n)))
        rate = next((run.rate for run in runs if run.samples == n and run.rate is not None), None)
        text = f"{n:,} samples give AL about {near['acceptance_length']:g} in public reports"
        lines.append(text + (f": the {rate:.0%} was the expected outcome" if rate is not None else ""))
    return lines


def _hidden_states(stored: Mapping[str, Any] | None) -> list[str]:
    """Size of stored features: bytes per token, tokens, and what a larger set would need."""
    if not stored:
        return []
    per_token = stored["hidden_size"] * (stored["features"] + 1) * stored["bytes_per_value"]
    tokens = stored["gigabytes"] * 1e9 / per_token
    planned = stored["gigabytes"] / stored["samples"] * stored["planned_samples"]
    return [
        f"hidden states: {per_token:,} bytes per token, so {stored['gigabytes']:,} GB hold {tokens / 1e6:.1f}M tokens;"
        f" {stored['planned_samples']:,} samples would need {planned / 1000:.1f} TB"
    ]


def read_case(path: Path | str) -> tuple[list[Run], dict[str, Any]]:
    """Runs from a file like resources/reference-case.json, and its other keys."""
    case = artefacts.read_json(path)
    runs = []
    for i, row in enumerate(case.get("rows") or []):
        for key in ("arm", "baseline_tokens_per_second", "tokens_per_second"):
            if row.get(key) is None:
                raise UserError(f"{path}: rows[{i}] has no {key!r}; write it")
        lengths = row.get("acceptance_length")
        runs.append(
            Run(
                row["baseline_tokens_per_second"], row["tokens_per_second"], name=row["arm"], engine=row.get("engine"),
                version=row.get("engine_version"), lengths=tuple(lengths) if lengths else None,
                rate=row.get("acceptance_rate"), draft_tokens=row.get("draft_tokens"), num_steps=row.get("num_steps"),
                per_prompt=row.get("tokens_per_second_per_prompt"), samples=row.get("samples"),
                temperature=row.get("temperature"), max_tokens=row.get("max_tokens"),
            )
        )  # fmt: skip
    if not runs:
        raise UserError(f"{path}: no rows; write at least one run under 'rows'")
    return runs, case
