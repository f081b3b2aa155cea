"""Load: the closed loop against a stub that counts what runs at once, acceptance under load, and the crossing point."""

import http.server
import io
import json
import re
import threading
import time

import pytest
from rich.console import Console

import benchmark_files as files
import test_reportpage as pages
from breakeven import benchmark, comparison, configuration, load, summary
from breakeven.arms import read_arm
from breakeven.cli import UserError
from breakeven.engines import Speculation, sglang, vllm

K = 2
HISTOGRAM = [1, 2, 3]  # of 6 steps, 8 accepted
TOKENS = 1 + 6 + 8
PROTOCOL = benchmark.Protocol("load", max_tokens=TOKENS, temperature=0, concurrency=4, requests=12)
EAGLE = Speculation("eagle3", K)
PROMPTS = [{"prompt_id": f"p{i}", "token_ids": [i, 7]} for i in range(5)]


class Server(http.server.ThreadingHTTPServer):
    """Speaks vLLM's protocol; `server.most` is the largest number of requests that it had at once."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.running, self.most = threading.Lock(), 0, 0
        self.prompts, self.requests, self.per_request, self.fails_at, self.extra_steps = [], 0, True, None, 0
        self.preempted = 0
        # The first four wait for each other, and the first of them until four more have come.
        self.first_four, self.eight = threading.Barrier(4, timeout=60), threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        n, steps = self.server.requests, sum(HISTOGRAM)
        counters = {
            "generation_tokens_total": n * TOKENS,
            "spec_decode_num_drafts_total": n * steps + self.server.extra_steps * (n > 0),
            "spec_decode_num_draft_tokens_total": n * steps * K,
            "spec_decode_num_accepted_tokens_total": n * 8,
            "num_preemptions_total": 5 + self.server.preempted * (n > 0),
        }
        lines = [f'vllm:{name}{{model_name="m"}} {value}' for name, value in counters.items()]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{model_name="m",position="{i}"}} {n * accepted}'
            for i, accepted in enumerate((5, 3))
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("\n".join(lines).encode())

    def do_POST(self):
        server = self.server
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        with server.lock:
            server.prompts.append(prompt)
            server.running += 1
            server.most = max(server.most, server.running)
            number = len(server.prompts)
        if number <= 4:
            server.first_four.wait()
        if number == 8:
            server.eight.set()
        if number == 1:
            assert server.eight.wait(60)
        if number == server.fails_at:
            self.send_response(500)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        for i in range(TOKENS):
            time.sleep(0.001 * (1 + prompt[0]))  # prompts differ in how long they take
            end = "length" if i == TOKENS - 1 else None
            self.event({"choices": [{"text": "x", "token_ids": [100 + i], "finish_reason": end}]})
        with server.lock:
            server.running -= 1
            server.requests += 1
        metrics = {"speculative_decoding": {"acceptance_histogram": HISTOGRAM, "num_draft_tokens": 12}}
        last = {"choices": [], "usage": {"completion_tokens": TOKENS}}
        self.event(last | ({"metrics": metrics} if server.per_request else {}))

    def event(self, content):
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())


@pytest.fixture
def server():
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()


def measure(server, speculation=EAGLE, protocol=PROTOCOL):
    clients = [benchmark.Client(vllm, server.url, "m") for _ in range(protocol.concurrency)]
    return benchmark.measure_load(clients, protocol, PROMPTS, speculation)


def test_a_closed_loop_keeps_the_places_filled_and_repeats_prompts_in_order(server):
    rows, counters = measure(server)
    assert server.most == 4
    assert [row["prompt_id"] for row in rows] == [f"p{i % 5}" for i in range(12)]
    assert sorted(server.prompts[:4]) == [[i, 7] for i in range(4)]
    busy, full = load.in_flight([row["sent_at"] for row in rows], [row["sent_at"] + row["e2e_s"] for row in rows], 4)
    assert 0 < full <= busy
    for row in rows:
        assert row["completion_tokens"] == TOKENS and 0 < row["ttft_s"] < row["e2e_s"]
        assert (row["steps"], row["drafted"], row["accepted"], row["accepted_per_position"]) == (6, 12, 8, [5, 3])
    assert (counters["steps"], counters["accepted"], counters["completion_tokens"]) == (72, 96, 12 * TOKENS)


def test_where_nothing_is_reported_per_request_acceptance_is_that_of_the_pass(server):
    server.per_request = False
    rows, counters = measure(server)
    assert all(row[name] is None for row in rows for name in ("steps", "drafted", "accepted", "accepted_per_position"))
    assert (counters["steps"], counters["accepted"], counters["accepted_per_position"]) == (72, 96, [60, 36])


def test_steps_of_a_pass_without_a_draft_are_counted_where_the_engine_leaves_them_out(server):
    server.per_request, server.extra_steps = False, -30
    rows, counters = measure(server, Speculation("ngram", K))
    assert (counters["steps"], counters["accepted"], {row["steps"] for row in rows}) == (72, 96, {None})


@pytest.mark.parametrize("method, extra, overshoot", [("eagle3", -1, -1), ("eagle3", 25, 25), ("ngram", 25, 25)])
def test_tokens_of_a_pass_that_do_not_fit_its_steps_are_refused(server, method, extra, overshoot):
    server.per_request, server.extra_steps = False, extra
    said = rf"12 requests: 180 tokens do not fit 12 \+ {72 + extra} steps \+ 96 accepted \(overshoot {overshoot},"
    with pytest.raises(UserError, match=said + " possible are 0 to 24"):
        measure(server, Speculation(method, K))


@pytest.mark.parametrize("speculation", [EAGLE, Speculation()])
def test_a_cache_too_small_for_the_load_is_an_error_of_every_arm(server, speculation):
    server.preempted = 2
    with pytest.raises(
        UserError, match="put requests back 2 times: .*for 4 requests at once; raise gpu-memory-utilization"
    ):
        measure(server, speculation)


def test_an_arm_without_speculation_has_no_acceptance(server):
    server.per_request = False
    assert {row["steps"] for row in measure(server, Speculation())[0]} == {None}


def test_requests_that_do_not_add_up_to_the_counters_are_refused(server):
    server.extra_steps = 1
    with pytest.raises(UserError, match="72 verification steps, the server counted 73"):
        measure(server)


def test_no_request_is_started_after_one_that_failed(server):
    server.fails_at = 3
    with pytest.raises(UserError, match="refused a request with 500"):
        measure(server, protocol=benchmark.Protocol("load", TOKENS, 0, concurrency=4, requests=200))
    assert len(server.prompts) < 200


@pytest.mark.parametrize(
    "prompts, protocol, expected",
    [(12, {}, 12), (12, {"concurrency": 8}, 36), (12, {"concurrency": 32}, 132), (50, {"concurrency": 8}, 50),
     (12, {"concurrency": 8, "requests": 20}, 20)],
)  # fmt: skip
def test_the_number_of_requests_of_a_pass(prompts, protocol, expected):
    assert load.requests(prompts, protocol) == expected


@pytest.mark.parametrize(
    "protocol, engine, flags, words",
    [
        ({"concurrency": 8}, vllm, {"max-num-seqs": 4}, "8 requests at once, but the server's max-num-seqs is 4"),
        ({"concurrency": 8}, sglang, {"max-running-requests": 4}, "max-running-requests is 4"),
        ({"concurrency": 8, "requests": 7}, vllm, {"max-num-seqs": 8}, "fewer than the concurrency 8"),
        ({"requests": 7}, vllm, {}, "without a concurrency above 1"),
        ({"concurrency": 8}, vllm, {"max-num-seqs": 8}, None),
        ({"concurrency": 8}, vllm, {}, None),
        ({}, vllm, {"max-num-seqs": 1}, None),
    ],
)
def test_what_the_server_cannot_run_at_once_is_refused(protocol, engine, flags, words):
    reason = load.refuse(protocol, engine, flags)
    assert (words in reason) if words else reason is None


def test_the_config_is_refused_before_anything_runs(config, in_the_root):
    schema = pages.ROOT / "schemas/config.schema.yaml"
    config["protocols"]["quick"]["concurrency"] = 8
    with pytest.raises(UserError, match="arms.vllm-own-k3, protocol 'quick': 8 requests at once, .* max-num-seqs is 4"):
        configuration.check(config, schema)
    for arm in config["arms"].values():
        arm["flags"] = {"max-num-seqs": 8}
    configuration.check(config, schema)


def test_seconds_in_flight():
    # One from 0 to 4, one from 1 to 2, nothing until 6, two from 6 to 7.
    assert load.in_flight([0, 1, 6, 6], [4, 2, 7, 7], 2) == (5, 2)
    assert load.in_flight([], [], 1) == (0, 0)


@pytest.mark.parametrize(
    "points, sentence, between, estimate",
    [
        ([(1, "faster", 1.4), (8, "faster", 1.2), (32, "slower", 1 / 1.2)], "stops paying between 8 and 32 requests at once"
         r" \(interpolated: about 16\)", (8, 32), 16),
        ([(32, "slower", 0.5), (1, "faster", 2.0)], "stops paying between 1 and 32", (1, 32), 32**0.5),
        ([(1, "faster", 1.4), (8, "undecided", 1.02), (32, "slower", 0.8)], "between 1 and 32 .*; undecided at 8", (1, 32), 8.9),
        ([(1, "faster", 1.4), (8, "undecided", 0.98)], "pays up to 1, and is undecided at 8", None, None),
        ([(1, "faster", 1.4), (8, "faster", 1.2)], r"pays at all measured concurrencies \(1 and 8\)", None, None),
        ([(1, "slower", 0.9), (8, "slower", 0.8)], "pays at none", None, None),
        ([(1, "slower", 0.9), (8, "faster", 1.2)], "no crossing point: speculation is faster at 8, slower at 1", None, None),
        ([(1, "undecided", 0.9), (8, "undecided", 0.8)], "no crossing point: speculation is undecided at 1 and 8", None, None),
        ([(1, "faster", 1.3), (8, "refused", None), (32, "slower", 0.8)], r"between 1 and 32 .*; not judged at 8 \(refused\)",
         (1, 32), None),
        ([(1, "refused", None), (8, "refused", None)], "no verdict at any", None, None),
    ],
)  # fmt: skip
def test_the_crossing_point(points, sentence, between, estimate):
    found = load.crossing(points)
    assert re.search(sentence, found.sentence), found.sentence
    assert found.between == between
    if estimate:
        assert found.estimate == pytest.approx(estimate, rel=0.02)


# Comparison


def arm(name, concurrency, rate, k=0, repeats=1):
    """An arm under load: every prompt `repeats` times in a pass, the second time at half of the speed."""
    spec = files.default(name, k=k, drafter="own" if k else None, rate=rate)
    more = {"concurrency": concurrency, "requests": 5 * repeats} if concurrency > 1 else {}
    spec["parameters"]["protocol"] |= {"name": f"load-{concurrency}"} | more

    def slower(row):
        decode = row["e2e_s"] - row["ttft_s"]
        return row | {"sent_at": row["sent_at"] + 50, "e2e_s": row["ttft_s"] + 2 * decode}

    spec["change_rows"] = lambda rows: rows + [slower(row) for row in rows] * (repeats - 1)
    return spec


def compare(tmp_path, *specs):
    for spec in specs:
        files.write(tmp_path, spec)
    return comparison.compare([read_arm(tmp_path, spec["parameters"]["arm"]) for spec in specs])


def series(tmp_path):
    return compare(
        tmp_path,
        arm("plain-1", 1, 30), arm("own-1", 1, 45, k=3),
        arm("plain-8", 8, 20, repeats=2), arm("own-8", 8, 22, k=3, repeats=2),
        arm("plain-32", 32, 10, repeats=2), arm("own-32", 32, 7, k=3, repeats=2),
    )  # fmt: skip


def test_arms_that_differ_in_concurrency_alone_give_the_crossing_point(tmp_path):
    result = series(tmp_path)
    by_arm = {row["arm"]: row for row in result.summary}
    assert [by_arm[f"own-{n}"]["baseline"] for n in (1, 8, 32)] == ["plain-1", "plain-8", "plain-32"]
    (found,) = result.under_load
    assert [point["concurrency"] for point in found["points"]] == [1, 8, 32]
    assert [point["verdict"] for point in found["points"]] == ["faster", "faster", "slower"]
    assert found["between"] == (8, 32) and 8 < found["estimate"] < 32
    for point in found["points"]:
        assert point["rho"] == pytest.approx(point["acceptance_length"] / point["speedup"])
        assert point["plain_server_tokens_per_second"] > 0


def test_repeats_of_a_prompt_are_one_unit(tmp_path):
    result = compare(tmp_path, arm("plain-8", 8, 20, repeats=2), arm("own-8", 8, 30, k=3, repeats=2))
    row = result.summary[1]
    assert (row["prompts"], row["passes"], row["concurrency"]) == (5, 3, 8)
    read = read_arm(tmp_path, "plain-8")
    once = read.requests[(read.requests["prompt_id"] == "reference-0") & (read.requests["pass_number"] == 1)]
    # Twice the same tokens, in one and in two units of time: two thirds of the first one's speed.
    assert read.rates(["reference-0"])[0, 0] == pytest.approx(once["rate"].max() * 2 / 3)
    assert len(read.first_pass) == 5 and read.first_pass["rate"].iloc[0] == once["rate"].max()


def test_a_repeated_prompt_without_load_is_refused(tmp_path):
    spec = arm("plain-1", 1, 30)
    spec["change_rows"] = lambda rows: rows * 2
    files.write(tmp_path, spec)
    with pytest.raises(UserError, match="measured twice in one pass"):
        read_arm(tmp_path, "plain-1")


def test_arms_of_other_concurrencies_are_no_baseline(tmp_path):
    plain, own = arm("plain-8", 8, 20), arm("own-32", 32, 30, k=3)
    own["parameters"]["protocol"]["name"] = "load-8"
    row = compare(tmp_path, plain, own).summary[1]
    assert row["verdict"] == "refused" and "other-sampling: concurrency 32 against 8" in row["reason"]


def test_acceptance_per_pass_comes_from_the_counters_and_says_so(tmp_path):
    own = arm("own-8", 8, 30, k=3)
    nothing = dict.fromkeys(("steps", "drafted", "accepted", "accepted_per_position"))
    own["change_rows"] = lambda rows: [row | nothing for row in rows]
    counters = {"steps": 100, "drafted": 300, "accepted": 130, "accepted_per_position": [60, 40, 30]}
    own["server"] = {"counters": counters}
    result = compare(tmp_path, arm("plain-8", 8, 20), own)
    assert result.summary[1]["acceptance_length"] == pytest.approx(2.3)
    assert [row["marginal"] for row in result.acceptance] == pytest.approx([0.6, 0.4, 0.3])
    assert any("known per pass only" in warning.replace("\n", " ") for warning in result.details["own-8"]["warnings"])
    assert {row["acceptance_length"] for row in result.requests} == {None}


@pytest.mark.parametrize("counters", [(100, 300, 500, [250, 150, 100]), (100, 300, 60, [20, 30, 10])])
def test_impossible_counters_of_a_pass_are_refused(tmp_path, counters):
    own = arm("own-8", 8, 30, k=3)
    names = ("steps", "drafted", "accepted", "accepted_per_position")
    own["change_rows"] = lambda rows: [row | dict.fromkeys(names) for row in rows]
    own["server"] = {"counters": dict(zip(names, counters, strict=True))}
    result = compare(tmp_path, arm("plain-8", 8, 20), own)
    assert "impossible-acceptance: counters of pass 1: " in result.summary[1]["reason"]
    assert result.acceptance == []


def test_garbage_is_refused_although_only_first_answers_are_scored(tmp_path):
    own = arm("own-8", 8, 30, k=3, repeats=8)
    own["sanity"] = {f"reference-{i}": {"problem": "improbable text"} for i in range(2)}
    result = compare(tmp_path, arm("plain-8", 8, 20, repeats=8), own)
    assert "degenerate-output: arm own-8: 6 of 15 first answers are improbable" in result.summary[1]["reason"]
    assert sum(bool(row["degenerate"]) for row in result.requests) == 6  # two prompts in three passes


def test_loops_are_counted_in_every_answer(tmp_path):
    """Two of five first answers, and 3 of 40 answers in all: below the fifth that is refused."""
    own = arm("own-8", 8, 30, k=3, repeats=8)
    change_rows = own["change_rows"]

    def loop(rows):
        rows = change_rows(rows)
        return [row | {"output_token_ids": [7] * 128} if i in (0, 1, 9) else row for i, row in enumerate(rows)]

    own["change_rows"] = loop
    result = compare(tmp_path, arm("plain-8", 8, 20, repeats=8), own)
    assert result.summary[1]["reason"] is None
    assert any("9 of 120 outputs repeat themselves" in warning for warning in result.details["own-8"]["warnings"])


def test_a_server_that_was_seldom_full_is_remarked_on(tmp_path):
    result = compare(tmp_path, arm("plain-8", 8, 20), arm("own-8", 8, 30, k=3))
    assert result.details["own-8"]["full_share"] == 0
    assert any("raise `requests`" in warning for warning in result.details["own-8"]["warnings"])


def test_page_and_terminal_name_the_crossing_point(tmp_path):
    specs = [arm("plain-1", 1, 30), arm("own-1", 1, 45, k=3), arm("plain-32", 32, 10), arm("own-32", 32, 7, k=3)]
    pages.compare(tmp_path, specs)
    html = pages.build(tmp_path)
    assert 'id="load"' in html and "stops paying between 1 and 32 requests at once" in html
    assert "Requests at once" in html and "requests at once: 32" in html and "own-32" in html
    out = io.StringIO()
    summary.show(tmp_path / "comparison", tmp_path / "report/index.html", Console(file=out, width=140))
    assert "vllm, own, K = 3: speculation stops paying between 1 and 32" in out.getvalue()
