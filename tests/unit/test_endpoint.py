"""What a running server may answer: token ids, none, other tokens, busy, refused. A real one: tests/engines/test_extraction.py."""

import http.server
import json
import threading

import pytest

from breakeven.cli import UserError
from breakeven.engines import NEUTRAL_SAMPLING, endpoint

ASKED = {"max_tokens": 4, "temperature": 0, "top_p": 0.9}
PAGE = b"<html>no /v1</html>"


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

    def answer_page(self, length=0):
        """A web page; with a length, one that is cut off."""
        self.send_response(200)
        self.send_header("Content-Length", str(length or len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def do_GET(self):
        if self.behaviour.get("page") == "GET":
            return self.answer_page()
        self.answer(200, {"data": [{"id": name} for name in self.behaviour.get("models", ["m"])]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((self.headers.get("Authorization"), body))
        if self.behaviour.get("busy"):
            self.behaviour["busy"] -= 1
            return self.answer(503, {"error": "loading"})
        if self.behaviour.get("cut"):
            self.behaviour["cut"] -= 1
            return self.answer_page(len(PAGE) + 1)
        if self.behaviour.get("page"):
            return self.answer_page()
        if "status" in self.behaviour:
            return self.answer(self.behaviour["status"], {"error": "no"})
        choice = {"text": "x", "token_ids": [t + 1 for t in body["prompt"]], "finish_reason": "stop"}
        choice["prompt_token_ids"] = body["prompt"]
        if self.behaviour.get("aborted"):
            self.behaviour["aborted"] -= 1
            choice |= {"token_ids": [1], "finish_reason": "abort"}
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
        body == NEUTRAL_SAMPLING | ASKED | {"model": "m", "prompt": body["prompt"], "return_token_ids": True}
        for _, body in Handler.seen
    )


def test_what_a_request_leaves_out_is_not_the_models_generation_config(server):
    generate(server)
    body = Handler.seen[0][1]
    assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.9, -1, 1)


def test_the_key_comes_from_the_environment(server, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password else")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("OF_THIS_TEST", "secret")
    generate(server, key_variable="OF_THIS_TEST")
    assert Handler.seen[0][0] == "Bearer secret"
    monkeypatch.delenv("OF_THIS_TEST")
    with pytest.raises(UserError, match="the environment variable OF_THIS_TEST is not set"):
        generate(server, key_variable="OF_THIS_TEST")


@pytest.mark.parametrize("problem", ["busy", "aborted", "cut"])
def test_a_server_that_was_busy_or_did_not_finish_is_asked_again(server, problem):
    Handler.behaviour = {problem: 2}
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
        ({"aborted": 99}, "broke off a response .finish_reason abort"),
        ({"cut": 99}, "does not answer .ChunkedEncodingError"),
        ({"page": "GET"}, "/v1/models answers without 'data'.*no /v1.*base_url"),
        ({"page": "POST"}, "/v1/completions answers without 'choices'"),
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
