"""Step cost from rounds with known times: rho, its interval, the A/A drift, and what is refused."""

import contextlib
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from breakeven import artefacts, engines, servers, stepcost, steptimes, tables
from breakeven.cli import UserError
from breakeven.engines import Counters, Reply, sglang, vllm
from breakeven.steptimes import Round, Settings

PLAIN = [0.030, 0.031, 0.029, 0.030, 0.032]


def rounds(times, factor=1.0, steps=31, accepted=0):
    return [Round(t * factor * steps, steps, accepted, 1) for t in times]


def table(factors, before=1.0, after=1.0, accepted=0):
    plain = [{(1, 1): rounds(PLAIN, before)}, {(1, 1): rounds(PLAIN, after)}]
    by_k = {k: {(1, 1): rounds(PLAIN, factor, accepted=accepted)} for k, factor in factors.items()}
    return steptimes.rows("vllm", by_k, plain), plain


def test_rho_is_the_ratio_of_step_times_round_by_round():
    found, _ = table({3: 1.3, 1: 1.2})
    assert [row["k"] for row in found] == [1, 3]
    for row, rho in zip(found, (1.2, 1.3), strict=True):
        # The same prompts in every arm: what differs between rounds cancels, and the interval closes.
        assert row["rho"] == pytest.approx(rho) and row["rho_low"] == pytest.approx(rho) == row["rho_high"]
        assert row["step_low"] < row["step_s"] < row["step_high"]
        assert row["acceptance_length"] == 1 and row["steps"] == 155 and row["requests"] == 5


def test_a_drifting_machine_widens_the_interval():
    found, plain = table({1: 1.2}, before=1.0, after=1.1)
    assert steptimes.drift(plain) == {"1": 1.1}
    assert found[0]["rho"] == pytest.approx(1.2 / math.sqrt(1.1))
    assert found[0]["rho_low"] == pytest.approx(1.2 / 1.1) and found[0]["rho_high"] == pytest.approx(1.2)


def test_acceptance_is_measured():
    assert table({2: 1.2}, accepted=31)[0][0]["acceptance_length"] == 2


def test_rows_are_what_the_verdict_reads(tmp_path):
    found, _ = table({1: 1.2, 2: 1.25, 3: 1.3})
    artefacts.write_table(tmp_path / "vllm.parquet", found, tables.STEP_COST)
    read = artefacts.read_table(tmp_path / "vllm.parquet", tables.STEP_COST).to_pylist()
    cost = stepcost.StepCost([(row["k"], row["rho"]) for row in read], "step cost")
    assert cost.line.a == pytest.approx(1.15) and cost.line.b == pytest.approx(0.05)


def test_the_summary_says_what_each_k_needs():
    text = steptimes.summary(table({1: 1.2, 3: 4.5})[0], curve=[0.7, 0.5, 0.4])
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()[:1].isdigit() and " ms" not in line}
    assert "1.20 (1.20 to 1.20)" in lines["1"] and "0.20" in lines["1"] and "1.67x" in lines["1"]
    assert "never" in lines["3"] and "0.89x" in lines["3"]  # no drafter makes 4.5 of at most 4 tokens
    given = next(line for line in text.splitlines() if line.startswith("the given curve"))
    assert given.split()[-3:] == ["1", "1.70", "1.42x"]


def test_drafts_deeper_than_any_that_is_looked_at_otherwise():
    text = steptimes.summary(table({20: 3.0})[0], curve=[0.9**i for i in range(1, 21)])
    assert next(line for line in text.splitlines() if line.startswith("the given curve")).split()[3] == "20"


def test_a_curve_that_never_pays_is_named():
    text = steptimes.summary(table({1: 3.0, 2: 3.5})[0])
    assert "0.90 throughout" in text and text.count("none: plain decoding is faster") >= 1


@pytest.mark.parametrize(
    "settings, flags, hardware, message",
    [
        (Settings(concurrency=[1, 8]), {"max-num-seqs": 4}, "cpu", "8 requests at once, but the server's max-num-seqs is 4"),
        (Settings(synthetic_acceptance_length=2.5), {}, "cpu", "vllm can force an acceptance length on cuda only"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_a_server_starts(settings, flags, hardware, message):
    with pytest.raises(UserError, match=message):
        steptimes.check(vllm, settings, flags, hardware)


@pytest.mark.parametrize("shape, size", [({"draft_vocab_size": 500}, 500), ({}, None)])
def test_the_size_of_the_drafters_head_is_kept_where_its_config_states_it(tmp_path, monkeypatch, shape, size):
    config = tmp_path / "drafter" / "config.json"
    artefacts.write_json(tmp_path / "config.json", {"vocab_size": 1000})
    artefacts.write_json(tmp_path / "manifest.json", {})
    started = []

    def speculating(*_):
        started.append(1)
        return contextlib.nullcontext(SimpleNamespace(url="", name="", key=""))

    monkeypatch.setattr(engines, "facts", lambda *_: {"optional_flags": [], "versions": {}})
    monkeypatch.setattr(servers, "speculating", speculating)
    monkeypatch.setattr(steptimes, "measure", lambda *_: {(1, 1): rounds(PLAIN)})
    words = ["--engine", "vllm", "--engine-python", "python", "--out", str(tmp_path / "vllm.parquet")]
    words += ["--target", str(tmp_path), "--checkpoint", str(config.parent)]
    monkeypatch.setattr("sys.argv", ["step_cost.py", *words])
    main = runpy.run_path(str(Path(__file__).parents[2] / "scripts/step_cost.py"))["main"]
    with pytest.raises(UserError, match="config.json"):
        main()
    assert not started
    artefacts.write_json(config, shape)
    main()
    assert artefacts.read_json(tmp_path / "vllm.manifest.json")["parameters"]["draft_vocab_size"] == size


class SGLang:
    """A client of a server that speculates with K = 3; each request: three steps of 2, 4 and 1 tokens after the prefill's."""

    engine = sglang

    def __init__(self, counts_steps, histogram):
        self.counts_steps, self.histogram, self.requests = counts_steps, histogram, 0

    def stream(self, prompt, sampling):
        self.requests += 1
        meta = {"finish_reason": {"type": "length"}, "completion_tokens": 8, "spec_verify_ct": 3} | self.histogram
        reply = Reply()
        sglang.read_event({"text": "", "output_ids": list(range(8)), "meta_info": meta}, reply)
        return reply, 0.1, 0.4

    def counters(self):
        text = f'sglang:generation_tokens_total{{model_name="m"}} {8.0 * self.requests}\n'
        if self.counts_steps:
            text += f'sglang:spec_verify_calls_total{{model_name="m"}} {3.0 * self.requests}\n'
        return sglang.read_counters(text, "m")

    def settled_counters(self, tokens):
        return self.counters()


@pytest.mark.parametrize(
    "counts_steps, name", [(True, "spec_correct_drafts_histogram"), (False, "spec_accept_histogram")]
)
def test_acceptance_that_is_reported_per_request_alone(counts_steps, name):
    """SGLang 0.5.23 counts steps in /metrics, 0.5.9 nothing; accepted tokens stand with each request in both."""
    server = SGLang(counts_steps, {name: [1, 1, 0, 1]})
    rounds = steptimes.measure(lambda: server, 1000, Settings(ks=[3], concurrency=[1]), 3)
    (found,) = steptimes.rows("sglang", {3: rounds}, [rounds])
    assert found["steps"] == 3 * 5 and found["acceptance_length"] == pytest.approx(1 + 4 / 3)
    assert rounds[1, 1][0].seconds == pytest.approx(0.3)


def test_a_server_that_reports_no_acceptance_is_refused():
    with pytest.raises(UserError, match="reports no acceptance"):
        steptimes.measure(lambda: SGLang(True, {}), 1000, Settings(concurrency=[1]), 3)


def test_acceptance_is_forced_where_the_engine_can():
    for engine, hardware in ((vllm, "cuda"), (sglang, "cuda"), (sglang, "cpu")):
        steptimes.check(engine, Settings(synthetic_acceptance_length=2.5), {}, hardware)
    options, environment = sglang.forced_acceptance(2.5)
    assert options == {} and environment["SGLANG_SIMULATE_ACC_LEN"] == "2.5"
    options, environment = vllm.forced_acceptance(2.5)
    assert options["synthetic_acceptance_length"] == 2.5 and environment == {}


def test_forced_acceptance_is_compared_with_the_prediction():
    found, plain = table({3: 1.5})
    forced = {3: {(1, 1): rounds(PLAIN, 1.6, accepted=62)}}
    (check,) = steptimes.cross_check(found, forced, plain, 3.0)
    assert check["acceptance_length"] == 3 and check["predicted_speedup"] == 2
    assert check["measured_speedup"] == pytest.approx(3 / 1.6, abs=1e-4)


def test_prompts_are_fixed_and_lie_in_the_vocabulary():
    asked = steptimes.prompts(1000, 6)
    assert asked == steptimes.prompts(1000, 6) and len({tuple(p) for p in asked}) == 6
    assert all(256 <= token < 1000 for p in asked for token in p)
    assert all(0 <= token < 100 for p in steptimes.prompts(100, 2) for token in p)


def test_decode_seconds_are_the_servers_own():
    text = (
        'vllm:request_decode_time_seconds_sum{engine="0",model_name="m"} 1.5\n'
        'vllm:request_decode_time_seconds_sum{engine="1",model_name="m"} 0.25\n'
        'vllm:request_decode_time_seconds_sum{engine="0",model_name="other"} 9\n'
    )
    counters = vllm.read_counters(text, "m")
    assert counters.decode_s == 1.75 and (counters - vllm.read_counters("", "m")).decode_s == 1.75


def test_a_cache_too_small_for_the_requests_is_an_error():
    class Client:
        engine = vllm

        def counters(self):
            return Counters()

        def settled_counters(self, tokens):
            return Counters(completion_tokens=tokens, preempted=1)

        def stream(self, prompt, sampling):
            return Reply(token_ids=[1, 2]), 0.1, 0.2

    with pytest.raises(UserError, match="holds too few tokens for 2 requests at once"):
        steptimes.measure(Client, 1000, Settings(concurrency=[2]), 0)
