"""Measuring one arm once: every prompt of a protocol against a running server, one stream or several requests at once."""

import json
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import requests

from breakeven import load
from breakeven.acceptance import from_histogram
from breakeven.cli import Progress, UserError, logger
from breakeven.engines import Counters, Reply, Speculation
from breakeven.sanity import degenerate
from breakeven.servers import session

SETTLE_S = 5.0
LEAST_MEAN_LOG_PROBABILITY = -5.0
# Asked before anything is measured, and part of no prompt set.
WARM_UP = [{"role": "user", "content": "Name the four seasons of the year and say one thing about each."}]


@dataclass
class Protocol:
    """What is asked of the server; two arms compare only under the same protocol."""

    name: str
    max_tokens: int
    temperature: float
    seed: int = 0
    ignore_eos: bool = False
    concurrency: int = 1  # requests in flight
    requests: int | None = None  # of a pass; see load.requests

    def sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }


class Client:
    """Requests to one server, one after another."""

    def __init__(self, engine: ModuleType, url: str, model: str, key: str | None = None, timeout_s: float = 600):
        self.engine, self.url, self.model, self.timeout_s = engine, url, model, timeout_s
        self.session = session(key)

    def counters(self) -> Counters:
        response = self.session.get(f"{self.url}/metrics", timeout=30)
        if response.status_code != 200:
            raise UserError(f"the server answered /metrics with {response.status_code}: {response.text[:500]}")
        return self.engine.read_counters(response.text, self.model)

    def stream(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[Reply, float, float]:
        """One streaming request: (reply, seconds to the first token, seconds to the last token).

        A server that refuses, falls silent, sends what is no event, or ends without a finish reason is a UserError.
        """
        path, body = self.engine.request(self.model, prompt, sampling)
        reply, first, last = Reply(), 0.0, 0.0
        start = time.perf_counter()
        try:
            with self.session.post(self.url + path, json=body, stream=True, timeout=self.timeout_s) as response:
                if response.status_code != 200:
                    raise UserError(f"the server refused a request with {response.status_code}: {response.text[:500]}")
                for line in response.iter_lines():
                    before = len(reply.token_ids)
                    read_line(self.engine, line, reply)
                    if len(reply.token_ids) > before:
                        last = time.perf_counter() - start
                        first = first or last
        except (requests.Timeout, requests.ConnectionError) as error:
            # A read that times out inside a stream comes as a ConnectionError.
            if not isinstance(error, requests.Timeout) and "timed out" not in str(error):
                raise
            raise UserError(f"the server sent nothing for {self.timeout_s:g} s; see the server log") from None
        check_reply(reply)
        return reply, first, last

    def settled_counters(self, completion_tokens: int) -> Counters:
        """Counters once they include all `completion_tokens` since the server's start; engines report them late."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            counters = self.counters()
            if counters.completion_tokens >= completion_tokens or time.monotonic() > deadline:
                return counters
            time.sleep(0.05)

    def mean_log_probability(self, prompt: list[int], output: list[int]) -> float:
        """Mean log-probability (nats per token) that the server's own target gives to an output."""
        return self.engine.score(self.session, self.url, self.model, prompt, output)


def read_line(engine: ModuleType, line: bytes, reply: Reply) -> None:
    """Add one line of a stream of server-sent events to a reply; one that no engine sends is a UserError."""
    if not line.startswith(b"data: ") or line == b"data: [DONE]":
        return
    try:
        engine.read_event(json.loads(line[6:]), reply)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"the server sent an event that cannot be read ({type(error).__name__}: {error}): {line[:200]!r}"
        ) from None


def check_reply(reply: Reply) -> None:
    """A whole answer has tokens and a finish reason, and its numbers are numbers; else a UserError."""
    if not reply.token_ids:
        raise UserError("the server ended a stream without a token; see the server log")
    if reply.finish_reason is None:
        raise UserError(
            f"the server ended a stream after {len(reply.token_ids)} tokens without a finish reason: only a part of the"
            " answer arrived; see the server log"
        )
    counts = [value for value in (reply.completion_tokens, reply.cached_tokens, reply.drafted) if value is not None]
    for value in [*reply.token_ids, *(reply.histogram or []), *counts]:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UserError(f"the server sent {value!r} where a count or a token id was expected; see the server log")


def check_template(client: Client, messages: list[dict[str, str]], ours: list[int], kwargs: dict[str, Any]) -> None:
    """The server's chat template must make the same token ids that data generation and training used."""
    theirs = client.engine.template_tokens(client.session, client.url, client.model, messages, kwargs)
    if theirs != ours:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        raise UserError(
            f"the server renders a conversation to {len(theirs)} tokens, this workflow to {len(ours)}, first difference at"
            f" token {at}; serve with the chat template in the target's folder and the same chat_template_kwargs"
        )


def measure(
    client: Client, protocol: Protocol, prompts: list[dict[str, Any]], speculation: Speculation
) -> tuple[list[dict[str, Any]], dict]:
    """Measure each prompt once, single stream.

    prompts: dicts with prompt_id and token_ids. Returns the rows (tables.BENCHMARK, less arm and pass) and a summary
    of the server's counters over all of them. Raises UserError where the client's numbers contradict the server's.
    """
    sampling = protocol.sampling()
    every_step = speculation.method not in client.engine.SKIPS_UNDRAFTED
    start = before = client.counters()
    rows = []
    with Progress(len(prompts), "prompts", "benchmark", every=0) as progress:
        for prompt in prompts:
            sent = time.time()
            reply, first, last = client.stream(prompt["token_ids"], sampling)
            after = client.settled_counters(before.completion_tokens + len(reply.token_ids))
            delta, before = after - before, after
            check_tokens(prompt["prompt_id"], reply, delta)
            spoken = acceptance(prompt["prompt_id"], reply, delta, speculation.k, every_step)
            rows.append(_row(prompt, sent, reply, first, last) | spoken)
            progress.add(1, _rate(reply, first, last))
    return rows, vars(before - start)


def _row(prompt: dict[str, Any], sent: float, reply: Reply, first: float, last: float) -> dict[str, Any]:
    return {
        "prompt_id": prompt["prompt_id"],
        "prompt_tokens": len(prompt["token_ids"]),
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": len(reply.token_ids),
        "prompt_token_ids": prompt["token_ids"],
        "output_token_ids": reply.token_ids,
        "text": reply.text,
        "finish_reason": reply.finish_reason,
        "sent_at": sent,
        "ttft_s": first,
        "e2e_s": last,
    }


def _rate(reply: Reply, first: float, last: float) -> str:
    rate = (len(reply.token_ids) - 1) / (last - first) if last > first else float("nan")
    return f"{rate:.1f} tok/s"


def closed_loop(
    clients: Sequence[Client], prompts: Sequence[list[int]], sampling: dict[str, Any]
) -> Iterator[tuple[float, Reply, float, float]]:
    """Ask for `prompts` in their order with one request of each client in flight: the next starts when one ends.

    Yields (when it was sent, what `stream` returns) in the order of the prompts. After an error no request is started.
    """
    free: queue.SimpleQueue[Client] = queue.SimpleQueue()
    for client in clients:
        free.put(client)

    def ask(prompt: list[int]) -> tuple[float, Reply, float, float]:
        client = free.get()
        try:
            sent = time.time()
            return sent, *client.stream(prompt, sampling)
        finally:
            free.put(client)

    pool = ThreadPoolExecutor(len(clients))
    try:
        yield from pool.map(ask, prompts)
    finally:
        # What is in flight after an error or a signal is not waited for: the server is stopped, and it ends with that.
        pool.shutdown(wait=False, cancel_futures=True)


def measure_load(
    clients: Sequence[Client], protocol: Protocol, prompts: list[dict[str, Any]], speculation: Speculation
) -> tuple[list[dict[str, Any]], dict]:
    """Measure with a request of each client in flight; prompts are repeated in their order, see `load.requests`.

    As `measure`, with one row per request. Counters mix what runs at once, so a request's acceptance is what the engine
    reports of it, and the counters over the whole pass must agree. An engine whose counters alone know it leaves the
    columns empty: acceptance is then known per pass, from the counters.
    """
    k, every_step = speculation.k, speculation.method not in clients[0].engine.SKIPS_UNDRAFTED
    count = load.requests(len(prompts), vars(protocol))
    asked = [prompts[i % len(prompts)] for i in range(count)]
    before = clients[0].counters()
    answers = []
    with Progress(count, "requests", f"benchmark, {len(clients)} at once", every=0) as progress:
        for sent, *answer in closed_loop(clients, [prompt["token_ids"] for prompt in asked], protocol.sampling()):
            answers.append((sent, *answer))
            progress.add(1, _rate(*answer))
    replies = [reply for _, reply, _, _ in answers]
    received = sum(len(reply.token_ids) for reply in replies)
    total = clients[0].settled_counters(before.completion_tokens + received) - before
    check_preempted(total, len(clients), clients[0].engine)
    check_totals(replies, total, k)
    per_pass = total.accepted is not None and all(reply.histogram is None for reply in replies)
    if k and per_pass:
        total.steps = all_steps(f"{count} requests", count, received, total, k, every_step)
    alone = Counters(steps=None, drafted=None, accepted=None, accepted_per_position=None)
    rows = [
        _row(prompt, *answer) | acceptance(prompt["prompt_id"], reply, alone, 0 if per_pass else k, every_step)
        for prompt, reply, answer in zip(asked, replies, answers, strict=True)
    ]
    return rows, vars(total)


def check_preempted(delta: Counters, places: int, engine: ModuleType) -> None:
    """UserError where requests were put back because the cache was full: that time is not decoding, and such a request
    yields a token without a verification step."""
    if delta.preempted > 0:
        raise UserError(
            f"the server put requests back {delta.preempted} times: its cache holds too few tokens for {places} requests at once;"
            f" raise {engine.CACHE_SETTING}, or lower the concurrency"
        )


def check_totals(replies: Sequence[Reply], total: Counters, k: int) -> None:
    """What all requests of a pass say together and what the server counted must be the same numbers."""
    received = sum(len(reply.token_ids) for reply in replies)
    said = sum(
        len(reply.token_ids) if reply.completion_tokens is None else reply.completion_tokens for reply in replies
    )
    pairs = {"tokens": (received, total.completion_tokens), "tokens in the usage": (said, received)}
    histograms = [reply.histogram for reply in replies if reply.histogram is not None]
    if k and histograms:
        pairs["verification steps"] = sum(map(sum, histograms)), total.steps
        pairs["accepted tokens"] = (
            sum(a * n for histogram in histograms for a, n in enumerate(histogram)),
            total.accepted,
        )
    for name, (ours, theirs) in pairs.items():
        if theirs not in (None, ours):
            raise UserError(
                f"{len(replies)} requests together have {ours} {name}, the server counted {theirs}; is something else"
                " using this server?"
            )


def check_tokens(prompt_id: str, reply: Reply, delta: Counters) -> None:
    """The token ids received, the usage the server states and its counter must be the same number."""
    received = len(reply.token_ids)
    if reply.completion_tokens not in (None, received) or delta.completion_tokens != received:
        raise UserError(
            f"prompt {prompt_id}: {received} tokens arrived, usage says {reply.completion_tokens} and the server counted"
            f" {delta.completion_tokens}; is something else using this server?"
        )


def acceptance(prompt_id: str, reply: Reply, delta: Counters, k: int, every_step: bool = True) -> dict[str, Any]:
    """Speculation columns of one request, per-request metrics against counters.

    every_step: see `all_steps`.
    """
    if k == 0:
        return {"steps": None, "drafted": None, "accepted": None, "accepted_per_position": None}
    steps, drafted, accepted, per_position = delta.steps, delta.drafted, delta.accepted, delta.accepted_per_position
    if accepted is None and reply.histogram is None and len(reply.token_ids) > 1:
        raise UserError(
            f"prompt {prompt_id}: the server reports no acceptance, neither in its counters nor per request"
        )
    if reply.histogram is not None or accepted is None:
        histogram = (reply.histogram or []) + [0] * (k + 1 - len(reply.histogram or []))
        own_steps, own_per_position = from_histogram(histogram)
        own_accepted = int(own_per_position.sum())
        if (own_steps, own_accepted) != (
            own_steps if steps is None else steps,
            own_accepted if accepted is None else accepted,
        ):
            raise UserError(
                f"prompt {prompt_id}: per-request metrics say {own_steps} steps and {own_accepted} accepted tokens, the"
                f" server's counters {steps} and {accepted}; is something else using this server?"
            )
        if accepted is None:
            steps, accepted, per_position = own_steps, own_accepted, own_per_position.tolist()
            drafted = reply.drafted or 0
    counted = Counters(steps=steps, accepted=accepted)
    steps = all_steps(f"prompt {prompt_id}", 1, len(reply.token_ids), counted, k, every_step)
    per_position = per_position + [0] * (k - len(per_position))
    return {"steps": steps, "drafted": drafted, "accepted": accepted, "accepted_per_position": per_position[:k]}


def all_steps(who: str, requests: int, tokens: int, counted: Counters, k: int, every_step: bool) -> int:
    """Verification steps of `requests` requests that together received `tokens`; UserError, which begins with `who`,
    where these do not fit.

    tokens = requests (prefill) + steps + accepted - overshoot: the last step of a request may run past the end of its text
    by up to k tokens. Anything else means that tokens and counters do not belong together. every_step False: the engine
    leaves steps without a draft out of its counts; the tokens that remain are those steps, and are counted here.
    """
    steps, accepted = counted.steps, counted.accepted
    overshoot = requests + steps + accepted - tokens
    if not every_step:
        steps += max(0, -overshoot)
        overshoot = max(0, overshoot)
    if not 0 <= overshoot <= k * requests:
        raise UserError(
            f"{who}: {tokens} tokens do not fit {requests} + {steps} steps + {accepted} accepted (overshoot {overshoot},"
            f" possible are 0 to {k * requests})"
        )
    return steps


def sanity(client: Client, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per prompt: is the output a text at all? Loops, and outputs that the target itself finds absurd, are named.

    An output is improbable when its mean log-probability is below -5 nats a token: sampling at temperature 1 stays above
    -3 on natural text, and tokens drawn from a broken sampler lie near -10.
    """
    found = {}
    for row in rows:
        if row["prompt_id"] in found:  # repeated under load
            continue
        score = client.mean_log_probability(row["prompt_token_ids"], row["output_token_ids"])
        problem = degenerate(row["output_token_ids"])
        if score is not None and score < LEAST_MEAN_LOG_PROBABILITY:
            problem = f"improbable text: mean log-probability {score:.1f}"
        found[row["prompt_id"]] = {
            "mean_log_probability": None if score is None else round(score, 3),
            "problem": problem,
        }
        if problem:
            logger.warning("prompt %s: %s", row["prompt_id"], problem)
    return found
