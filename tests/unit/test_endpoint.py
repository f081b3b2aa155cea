"""What a running server may answer: token ids, none, other tokens, busy, refused. A real one: tests/engines/test_extraction.py."""

import http.server
import json
import threading

import pytest

from breakeven.cli import UserError
from breakeven.engines import endpoint

ASKED = {"max_tokens": 4, "temperature": 0}


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves the model "m": the answer's tokens are the prompt's plus one. `behaviour` is set by the test."""

    behaviour: dict = {}
    seen: list = []

    def log_message(self, *_):
        pass

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"data": [{"id": name} for name in self.behaviour.get("models", ["m"])]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.headers.get("Authorization"), body))
        if self.behaviour.get("busy"):
            self.behaviour["busy"] -= 1
            return self.answer(503, {"error": "loading"})
        if "status" in self.behaviour:
            return self.answer(self.behaviour["status"], {"error": "no"})
        choice = {"text": "x", "token_ids": [t + 1 for t in body["prompt"]], "finish_reason": "stop"}
        choice["prompt_token_ids"] = body["prompt"]
        self.answer(200, {"choices": [choice | self.behaviour.get("choice", {})]})


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSES_S", (0.01, 0.01))
    Handler.behaviour, Handler.seen = {}, []
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}/v1"
    made.shutdown()
    made.server_close()


def generate(url, prompts=([5, 6],), **settings):
    settings = {"base_url": url, "concurrency": 2} | settings
    return sorted(endpoint.generate("elsewhere", list(prompts), [ASKED] * len(prompts), settings))


def test_token_ids_in_and_out(server):
    prompts = [[i, i + 10] for i in range(7)]
    assert generate(server, prompts) == [(i, [i + 1, i + 11], "stop") for i in range(7)]
    assert all(
        body == ASKED | {"model": "m", "prompt": body["prompt"], "return_token_ids": True} for _, body in Handler.seen
    )


def test_the_key_comes_from_the_environment(server, monkeypatch):
    monkeypatch.setenv("OF_THIS_TEST", "secret")
    generate(server, key_variable="OF_THIS_TEST")
    assert Handler.seen[0][0] == "Bearer secret"
    monkeypatch.delenv("OF_THIS_TEST")
    with pytest.raises(UserError, match="the environment variable OF_THIS_TEST is not set"):
        generate(server, key_variable="OF_THIS_TEST")


def test_a_busy_server_is_asked_again(server):
    Handler.behaviour = {"busy": 2}
    assert generate(server) == [(0, [6, 7], "stop")] and len(Handler.seen) == 3


@pytest.mark.parametrize(
    "behaviour, said",
    [
        ({"choice": {"token_ids": None}}, "gives no token ids back"),
        ({"choice": {"prompt_token_ids": [1, 5, 6]}}, "read request 0 as other tokens"),
        ({"status": 401}, "answers 401.*key_variable"),
        ({"status": 400}, 'answers 400: {"error": "no"}'),
        ({"models": ["a", "b"]}, "serves a, b; name one of them"),
        ({"busy": 99}, "answers 503"),
    ],
)
def test_what_cannot_be_used_is_refused(server, behaviour, said):
    Handler.behaviour = dict(behaviour)
    with pytest.raises(UserError, match=said):
        generate(server)


def test_another_model_than_the_named_one_and_no_server(server):
    with pytest.raises(UserError, match="serves m; name one of them as responses.endpoint.model in place of n"):
        generate(server, model="n")
    with pytest.raises(UserError, match="does not answer"):
        generate("http://127.0.0.1:9/v1")


def test_an_error_stops_the_rest(server):
    Handler.behaviour = {"status": 400}
    with pytest.raises(UserError):
        generate(server, [[1]] * 50)
    assert len(Handler.seen) <= 4
