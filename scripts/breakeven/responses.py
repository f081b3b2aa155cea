"""Responses of the target to the prompts of a shard: rows, resuming inside a shard, reasoning text."""

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from breakeven import artefacts, selection
from breakeven.cli import Progress, UserError, logger

FLUSH_S = 1.0  # what a killed job may lose of finished responses
END_OF_REASONING = ("</think>", "[/THINK]", "<|end_think|>", "◁/think▷")


def shard_of(pool, start: int, size: int, samples_per_prompt: int) -> list[dict[str, Any]]:
    """Prompts of ranks start ... start + size - 1, as dicts; a pool that is too small is a UserError."""
    selection.check_size(pool.num_rows, start + size, samples_per_prompt)
    return pool.slice(start, size).to_pylist()


def sampling_of(sampling: dict[str, Any], sample: int, greedy_first: bool) -> dict[str, Any]:
    """How one sample of a prompt is drawn: as asked for, but sample 0 at temperature 0 with `greedy_first`."""
    return sampling | ({"temperature": 0} if greedy_first and sample == 0 else {})


def seed_of(seed: int, prompt_id: str, sample: int) -> int:
    """A request's sampling seed: by prompt and sample, so that it does not depend on shards or batches."""
    digest = hashlib.sha256(f"{seed}:{prompt_id}:{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def reasoning_length(tokenizer, response: list[int]) -> int:
    """Leading response tokens that are reasoning text, its end marker included; 0 without such a marker."""
    for marker in END_OF_REASONING:
        token = tokenizer.convert_tokens_to_ids(marker)
        if token is not None and token != tokenizer.unk_token_id and token in response:
            return response.index(token) + 1
    return 0


class Partial:
    """Finished responses of an unfinished shard, one JSON line each, so that a killed job loses only what ran."""

    def __init__(self, path: Path, fingerprint: str):
        self.path, self.done = path, {}
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        if lines and lines[0] == json.dumps(fingerprint):
            for line in lines[1:]:
                try:
                    index, tokens, reason = json.loads(line)
                except ValueError:
                    break  # the last line of a killed job
                self.done[index] = (tokens, reason)
            logger.info("resuming: %d responses are there", len(self.done))
        # Written afresh, so that a half-written last line does not stay in the middle.
        with artefacts.atomic(path) as temporary, open(temporary, "w") as file:
            file.write(json.dumps(fingerprint) + "\n")
            file.writelines(self._line(index, *response) for index, response in self.done.items())
        self.file = open(path, "a", buffering=1 << 20)  # noqa: SIM115
        self.flush()

    @staticmethod
    def _line(index: int, tokens: list[int], reason: str) -> str:
        return json.dumps([index, tokens, reason]) + "\n"

    def add(self, index: int, tokens: list[int], reason: str) -> None:
        self.done[index] = (tokens, reason)
        self.file.write(self._line(index, tokens, reason))
        if time.monotonic() - self.flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        self.file.flush()
        self.flushed = time.monotonic()

    def remove(self) -> None:
        self.file.close()
        self.path.unlink()


def collect(finished: Iterable[tuple[int, list[int], str]], missing: list[int], partial: Partial, most: int) -> None:
    """Add responses to `partial` as an engine finishes them. finished: (index into `missing`, tokens, reason)."""
    with Progress(len(missing), "responses", "responses") as progress:
        tokens_done = 0
        for index, tokens, reason in finished:
            if not tokens:
                raise UserError(f"the engine gave an empty response for request {missing[index]}; see the log")
            if len(tokens) > most:
                raise UserError(f"the engine gave {len(tokens)} tokens where at most {most} were asked for")
            partial.add(missing[index], tokens, reason)
            tokens_done += len(tokens)
            progress.add(1, f"{tokens_done} tokens")
        partial.flush()
        seconds = progress.elapsed()
    logger.info("%d response tokens in %.1f s: %.0f tok/s", tokens_done, seconds, tokens_done / seconds)
