"""Resuming inside a shard, seeds, reasoning text."""

import json
import random

import pytest

from breakeven import responses
from breakeven.cli import UserError


def test_a_killed_job_keeps_what_was_finished(tmp_path):
    path = tmp_path / "shard.partial"
    first = responses.Partial(path, "key")
    responses.collect(iter([(0, [5, 6], "stop"), (2, [7], "length")]), [0, 1, 2], first, 10)
    first.file.write("[1, [8, 9")  # the process dies in the middle of a line
    first.file.close()
    second = responses.Partial(path, "key")
    assert second.done == {0: ([5, 6], "stop"), 2: ([7], "length")}
    responses.collect(iter([(0, [8, 9], "stop")]), [1], second, 10)
    third = responses.Partial(path, "key")
    assert third.done[1] == ([8, 9], "stop") and len(third.done) == 3
    third.remove()
    assert not path.exists()


def test_a_partial_of_other_settings_is_not_taken(tmp_path):
    path = tmp_path / "shard.partial"
    responses.Partial(path, "key").add(0, [1], "stop")
    assert responses.Partial(path, "another").done == {}


@pytest.mark.parametrize("content", [b"", b'"ke', b"\xff\x00 no text", b'"key"\n[1, [2'])
def test_a_partial_that_is_broken_from_the_start_is_made_anew(tmp_path, content):
    path = tmp_path / "shard.partial"
    path.write_bytes(content)
    assert responses.Partial(path, "key").done == {}


def test_a_resume_that_is_stopped_while_it_writes_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "shard.partial"
    first = responses.Partial(path, "key")
    responses.collect(iter([(0, [5], "stop"), (1, [6], "stop")]), [0, 1], first, 10)

    def full(content, dumps=json.dumps):
        if content == [1, [6], "stop"]:
            raise OSError("no space left")
        return dumps(content)

    monkeypatch.setattr(json, "dumps", full)
    with pytest.raises(OSError):
        responses.Partial(path, "key")
    monkeypatch.undo()
    assert len(responses.Partial(path, "key").done) == 2


def test_engine_answers_are_checked(tmp_path):
    partial = responses.Partial(tmp_path / "p", "key")
    with pytest.raises(UserError, match="empty response for request 4"):
        responses.collect(iter([(0, [], "stop")]), [4], partial, 10)
    with pytest.raises(UserError, match="11 tokens where at most 10"):
        responses.collect(iter([(0, list(range(11)), "length")]), [4], partial, 10)


def test_seeds_differ_by_prompt_and_sample_and_stay_the_same():
    seeds = {responses.seed_of(0, f"{p:012x}-00", s) for p in range(50) for s in range(4)}
    assert len(seeds) == 200 and all(0 <= seed < 2**31 for seed in seeds)
    assert responses.seed_of(0, "a-00", 1) == responses.seed_of(0, "a-00", 1) != responses.seed_of(1, "a-00", 1)


class Tokenizer:
    unk_token_id = 0

    def __init__(self, **tokens):
        self.tokens = tokens

    def convert_tokens_to_ids(self, text):
        return self.tokens.get(text, 0)


def test_reasoning_is_counted_up_to_its_end_marker():
    thinking = Tokenizer(**{"</think>": 9})
    assert responses.reasoning_length(thinking, [1, 2, 9, 3, 4]) == 3
    assert responses.reasoning_length(thinking, [1, 2, 3]) == 0
    assert responses.reasoning_length(Tokenizer(), [0, 1, 9]) == 0


def test_partials_are_plain_lines(tmp_path):
    partial = responses.Partial(tmp_path / "p", "key")
    draw = random.Random(0)
    for i in range(20):
        partial.add(i, [draw.randrange(50_000) for _ in range(30)], "stop")
    partial.flush()
    lines = (tmp_path / "p").read_text().splitlines()
    assert json.loads(lines[0]) == "key" and [json.loads(line)[0] for line in lines[1:]] == list(range(20))


def test_finished_responses_reach_the_disk_while_others_run(tmp_path, monkeypatch):
    """Written in batches, but not held back until the end: what a kill may lose is bounded in time."""
    monkeypatch.setattr(responses, "FLUSH_S", 0)
    partial = responses.Partial(tmp_path / "p", "key")

    def finished():
        yield 0, [5], "stop"
        assert len((tmp_path / "p").read_text().splitlines()) == 2
        yield 1, [6], "stop"

    responses.collect(finished(), [0, 1], partial, 10)
    assert len((tmp_path / "p").read_text().splitlines()) == 3


def test_only_the_first_sample_is_greedy():
    asked = {"temperature": 0.7, "max_tokens": 8, "top_p": 1}
    drawn = [responses.sampling_of(asked, sample, True) for sample in range(3)]
    assert [one["temperature"] for one in drawn] == [0, 0.7, 0.7] and asked["temperature"] == 0.7
    assert all(one | {"temperature": 0.7} == asked for one in drawn)
    assert responses.sampling_of(asked, 0, False) == asked
