"""The benchmark's client against a server that misbehaves as real ones cannot be made to: a stub speaks vLLM's protocol."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from breakeven import benchmark, engines
from breakeven.cli import UserError
from breakeven.engines import Speculation

TOKENS = list(range(100, 164))
PROMPTS = [{"prompt_id": "p", "token_ids": [1, 2, 3]}]
PROTOCOL = benchmark.Protocol("quick", max_tokens=len(TOKENS), temperature=0)


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does, but for what `server.fault` says."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as real servers do; small events would wait for each other

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        if self.server.fault == "no metrics":
            return self.answer(500, b"metrics are broken")
        text = f'vllm:generation_tokens_total{{model_name="m"}} {self.server.generated}\n'
        if self.server.fault == "metrics without a number":
            text = 'vllm:generation_tokens_total{model_name="m"} NaN\n'
        if self.server.fault == "half of the metrics":
            text = text[:25]
        self.answer(200, text.encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.fault
        if self.path == "/v1/completions" and fault == "500":
            return self.answer(500, b"internal error: out of memory")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.stream(fault)
        self.chunk(b"")

    def stream(self, fault: str) -> None:
        tokens = [7] * len(TOKENS) if fault == "looping text" else TOKENS
        for i, token in enumerate(tokens):
            last = i == len(tokens) - 1
            choice = {"text": "x", "token_ids": [token], "finish_reason": "length" if last else None}
            self.event(json.dumps({"choices": [choice]}))
            self.server.generated += 1
            if i == 4 and fault == "half a stream":
                return
            if i == 4 and fault == "silence":
                time.sleep(3)
            if i == 4 and fault == "an error in the stream":
                self.event(json.dumps({"error": {"message": "the engine died"}}))
                return
            if i == 4 and fault == "half an event":
                return self.chunk(b'data: {"choices": [{"te')
            if i == 4 and fault == "another shape":
                self.event(json.dumps({"choices": [None]}))
            if fault == "slow":
                time.sleep(0.02)
        self.event(json.dumps({"choices": [], "usage": {"completion_tokens": len(tokens)}}))
        self.event("[DONE]")

    def event(self, content: str) -> None:
        self.chunk(f"data: {content}\n\n".encode())

    def chunk(self, content: bytes) -> None:
        with contextlib.suppress(OSError):
            self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
            self.wfile.flush()

    def log_message(self, *_):
        pass


@pytest.fixture
def measure(monkeypatch):
    """measure(fault) -> rows of one pass over one prompt."""
    monkeypatch.setattr(benchmark, "SETTLE_S", 0.3)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.generated, server.daemon_threads = 0, True
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(fault: str):
        server.fault = fault
        client = benchmark.Client(engines.engine("vllm"), f"http://127.0.0.1:{server.server_port}", "m", timeout_s=1)
        return benchmark.measure(client, PROTOCOL, PROMPTS, Speculation())[0]

    yield run
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "fault, said",
    [
        ("500", "refused a request with 500: internal error: out of memory"),
        ("no metrics", "answered /metrics with 500: metrics are broken"),
        ("metrics without a number", "generation_tokens_total is 'NaN', which is no number"),
        ("half of the metrics", "prompt p: 64 tokens arrived, usage says 64 and the server counted 0"),
        ("half a stream", "ended a stream after 5 tokens without a finish reason"),
        ("half an event", "sent an event that cannot be read"),
        ("another shape", "sent an event that cannot be read"),
        ("an error in the stream", "answered with an error: .*the engine died"),
        ("silence", "sent nothing for 1 s"),
    ],
)
def test_a_fault_of_the_server_is_an_error(measure, fault, said):
    with pytest.raises(UserError, match=said):
        measure(fault)


def test_a_sound_server_is_measured(measure):
    assert [row["output_token_ids"] for row in measure("")] == [TOKENS]


def test_a_slow_server_is_measured_as_slow(measure):
    (row,) = measure("slow")
    assert row["output_token_ids"] == TOKENS and row["e2e_s"] - row["ttft_s"] >= 0.02 * (len(TOKENS) - 1)


def test_looping_text_is_named(measure):
    (row,) = measure("looping text")
    assert benchmark.degenerate(row["output_token_ids"])
