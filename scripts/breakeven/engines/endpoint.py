"""A server that runs already and speaks OpenAI's completions interface, with token ids in and out: for generation alone.

It is no engine of arms: what it runs on, and beside what, is not known, so nothing is measured with it. Nor does it
extract: no server hands out the hidden states that a drafter needs (docs/engines.md). Token ids come back from vLLM 0.20.2
and 0.32.0 and from SGLang 0.5.23.
"""

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

import requests

from breakeven.cli import UserError, logger
from breakeven.engines import NEUTRAL_SAMPLING

NAME = "endpoint"
DISTRIBUTIONS = ()
TIMEOUT_S = 3600.0  # of one response: a busy server queues requests
PAUSES_S = (1, 5, 20, 60)  # before a request that failed is sent again
AGAIN = (429, 500, 502, 503, 504)
COMPLETE = ("stop", "length")  # finish reasons; any other, as abort by a server that shuts down, is of a part


def environment(hardware: str) -> dict[str, str]:
    """No variables of its own."""
    return {}


def generate(
    model: str, prompts: list[list[int]], sampling: list[dict[str, Any]], settings: dict[str, Any]
) -> Iterator[tuple[int, list[int], str]]:
    """Generate through a server; yields (index, response token ids, finish reason) in the order of completion.

    sampling[i]: temperature, max_tokens, top_p, seed. settings: base_url (up to /v1), model (its name there; None: the
    only one), concurrency, and key_variable, the environment variable that holds the key (None: no key). A server that
    gives no token ids, or other ones for the prompt, is a UserError. `model`, a folder elsewhere, is not used.
    """
    server = Server(settings)
    waiting = enumerate(zip(prompts, sampling, strict=True))
    with ThreadPoolExecutor(settings.get("concurrency") or 1) as pool:
        # Few ahead: on an error those that have not started are not sent at all.
        running = {pool.submit(server.complete, *ask) for ask in itertools.islice(waiting, pool._max_workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
            running |= {pool.submit(server.complete, *ask) for ask in itertools.islice(waiting, len(done))}


class Server:
    """The server at settings["base_url"]; asks it at once which models it serves, so that a wrong address is found early."""

    def __init__(self, settings: dict[str, Any]):
        self.url = settings["base_url"].rstrip("/")
        self.key = None
        if variable := settings.get("key_variable"):
            if not os.environ.get(variable):
                raise UserError(f"responses.endpoint.key_variable: the environment variable {variable} is not set")
            self.key = os.environ[variable]
        served = [str(entry.get("id")) for entry in self.ask("GET", "/models", "data")]
        self.model = settings.get("model") or (served[0] if len(served) == 1 else None)
        if self.model not in served:
            raise UserError(
                f"{self.url} serves {', '.join(served)}; name one of them as responses.endpoint.model"
                + (f" in place of {self.model}" if self.model else "")
            )

    def authorise(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Put in the key. As `auth` of a request, since requests replaces a mere header by what ~/.netrc has."""
        request.headers["Authorization"] = f"Bearer {self.key}"
        return request

    def ask(self, method: str, path: str, key: str, body: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """The objects under `key` of the answer to one request, which is sent again where the server was busy or away or
        did not finish; UserError with its answer otherwise."""
        auth = self.authorise if self.key else None
        for pause in (*PAUSES_S, None):
            try:
                answer = requests.request(method, self.url + path, json=body, auth=auth, timeout=TIMEOUT_S)
            except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
                problem = f"does not answer ({type(error).__name__}); check responses.endpoint.base_url"
            except requests.Timeout:
                raise UserError(f"{self.url} gave no response within {TIMEOUT_S:.0f} s") from None
            else:
                if answer.ok:
                    found = self.objects(answer, path, key)
                    if key == "data" or all(choice.get("finish_reason") in COMPLETE for choice in found):
                        return found
                    problem = f"broke off a response (finish_reason {found[0].get('finish_reason')})"
                else:
                    problem = f"answers {answer.status_code}: {answer.text[:300]}"
                    if answer.status_code in (401, 403):
                        problem += (
                            "; set responses.endpoint.key_variable to the environment variable that holds its key"
                        )
                    if answer.status_code not in AGAIN:
                        break
            if pause is not None:
                logger.info("%s %s; again in %d s", self.url, problem, pause)
                time.sleep(pause)
        raise UserError(f"{self.url} {problem}")

    def objects(self, answer: requests.Response, path: str, key: str) -> list[dict[str, Any]]:
        """The objects under `key` of an answer; one without any, as a web page, is a UserError."""
        try:
            found = answer.json()[key]
        except (ValueError, KeyError, TypeError):
            found = None
        if not (isinstance(found, list) and found and all(isinstance(entry, dict) for entry in found)):
            raise UserError(
                f"{self.url}{path} answers without {key!r}, which OpenAI's interface has ({answer.text[:100]!r}); check"
                " responses.endpoint.base_url, which mostly ends in /v1"
            )
        return found

    def complete(self, index: int, request: tuple[list[int], dict[str, Any]]) -> tuple[int, list[int], str]:
        """(index, response token ids, finish reason) of one prompt."""
        prompt, sampling = request
        body = {"model": self.model, "prompt": prompt, "return_token_ids": True, **NEUTRAL_SAMPLING, **sampling}
        choice = self.ask("POST", "/completions", "choices", body)[0]
        tokens = choice.get("token_ids")
        if not tokens:
            raise UserError(
                f"{self.url} gives no token ids back (return_token_ids): text alone would have to be tokenized again, and"
                " training on other tokens than the target made is what this avoids; use a newer vLLM or SGLang, or responses.engine vllm"
            )
        if choice.get("prompt_token_ids") not in (None, prompt):
            raise UserError(f"{self.url} read request {index} as other tokens than it was sent; it must take token ids")
        return index, tokens, choice["finish_reason"]
