"""SGLang's command line for a table of arms, and its answers in the shapes of 0.5.9 and 0.5.23."""

import pytest

from breakeven import engines
from breakeven.benchmark import acceptance
from breakeven.cli import UserError
from breakeven.engines import Counters, Reply, Speculation, sglang

PINNED = {"max-running-requests": 4}
METRICS = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="m",tp_rank="0"} 96.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="m",tp_rank="0"} 8.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="other",tp_rank="0"} 7.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="m",tp_rank="0"} 120.0
sglang:spec_verify_calls_total{engine_type="unified",model_name="m",tp_rank="0"} 41.0
sglang:spec_accept_length{engine_type="unified",model_name="m",tp_rank="0"} 9.9
"""


def words(speculation=None, flags=PINNED):
    return sglang.command("py", "target", "name", 8000, speculation or Speculation(), flags, set())


def flags_of(command):
    """Long options with their values, True for a bare switch."""
    found = {}
    for at, word in enumerate(command):
        if word.startswith("--"):
            after = command[at + 1] if at + 1 < len(command) else "--"
            found[word[2:]] = True if after.startswith("--") else after
    return found


def chain(algorithm, path, k):
    return {
        "speculative-algorithm": algorithm,
        "speculative-draft-model-path": path,
        "speculative-num-steps": str(k),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(k + 1),
    }


TREE = {"topk": 4, "draft_tokens": 8}


@pytest.mark.parametrize(
    "speculation, expected",
    [
        (Speculation(), {}),
        (Speculation("eagle3", 1, "d"), chain("EAGLE3", "d", 1)),
        (Speculation("eagle3", 3, "d"), chain("EAGLE3", "d", 3)),
        (Speculation("eagle3", 15, "d"), chain("EAGLE3", "d", 15)),
        (Speculation("eagle3", 3, "d", {"steps": 3, "topk": 1, "draft_tokens": 4}), chain("EAGLE3", "d", 3)),
        (Speculation("eagle3", 3, "d", {"algorithm": "EAGLE"}), chain("EAGLE", "d", 3)),
        (
            Speculation("eagle3", 3, "d", TREE),
            chain("EAGLE3", "d", 3) | {"speculative-eagle-topk": "4", "speculative-num-draft-tokens": "8"},
        ),
        (Speculation("draft_model", 3, "small"), chain("STANDALONE", "small", 3)),
        (Speculation("draft_model", 3), chain("STANDALONE", "target", 3)),
        (
            Speculation("ngram", 3, None, {"speculative-ngram-max-trie-depth": 6}),
            {
                "speculative-algorithm": "NGRAM",
                "speculative-ngram-min-bfs-breadth": "1",
                "speculative-ngram-max-bfs-breadth": "1",
                "speculative-num-steps": "3",
                "speculative-num-draft-tokens": "4",
                "speculative-ngram-max-trie-depth": "6",
            },
        ),
    ],
)
def test_command_line_of_an_arm(speculation, expected):
    assert sglang.refuse(speculation, 0, "cpu") is None
    found = flags_of(words(speculation))
    assert {name: value for name, value in found.items() if "speculative" in name} == expected
    assert found["max-running-requests"] == "4" and found["enable-metrics"] is True
    assert found["model-path"] == "target" and found["served-model-name"] == "name" and found["port"] == "8000"


@pytest.mark.parametrize(
    "speculation, temperature, hardware, said",
    [
        (Speculation("medusa", 3), 0, "cpu", "no speculation method 'medusa'"),
        (
            Speculation("eagle3", 3, "d", {"draft_tokens": 16}),
            0,
            "cuda",
            "topk 1 SGLang sets the draft tokens to steps + 1 = 4",
        ),
        (Speculation("eagle3", 3, "d", {"draft_tokens": 3}), 0, "cuda", "for 2 drafted tokens write k: 2"),
        (Speculation("eagle3", 3, "d", {"steps": 5}), 0, "cuda", "steps must be K"),
        (Speculation("eagle3", 3, "d", {"topk": 4}), 0, "cuda", "needs options.draft_tokens"),
        (Speculation("eagle3", 2, "d", {"topk": 2, "draft_tokens": 8}), 0, "cuda", "at most 7 draft tokens"),
        (Speculation("eagle3", 2, "d", {"topk": 2, "draft_tokens": 7}), 0, "cuda", None),
        (Speculation("eagle3", 3, "d", {"topk": 0}), 0, "cuda", "whole numbers of 1 or more"),
        (Speculation("eagle3", 3, "d", {"top_k": 4}), 0, "cuda", "options.top_k: sglang's options are"),
        (Speculation("eagle3", 3, "d"), 0.6, "cpu", "verifies greedily whatever the temperature"),
        (Speculation("ngram", 3), 0.6, "cpu", "verifies greedily"),
        (Speculation("eagle3", 3, "d"), 0.6, "cuda", None),
        (Speculation(), 0.6, "cpu", None),
    ],
)
def test_refused_combinations(speculation, temperature, hardware, said):
    reason = sglang.refuse(speculation, temperature, hardware)
    assert reason is None if said is None else said in reason


@pytest.mark.parametrize("flags", [{}, {"max-running-requests": False}])
def test_an_unpinned_number_of_requests_is_refused(flags):
    with pytest.raises(
        UserError, match="max-running-requests is missing: SGLang sets it to 48 where an arm speculates"
    ):
        words(flags={"dtype": "bfloat16"} | flags)


def test_speculation_in_the_flags_is_refused():
    with pytest.raises(UserError, match="flag speculative-algorithm: speculation belongs into the arm"):
        words(flags=PINNED | {"speculative-algorithm": "EAGLE"})


def test_what_runs_is_compared_with_what_was_asked():
    running = {"dtype": "bfloat16", "max_running_requests": 4, "speculative_algorithm": "EAGLE3", "device": "cpu"}
    asked = {"dtype": "bfloat16", "max-running-requests": 4, "speculative-algorithm": "eagle3", "an-alias": 1}
    assert sglang.compare_settings(running, asked) == {
        "dtype": "bfloat16",
        "max-running-requests": 4,
        "speculative-algorithm": "EAGLE3",
    }
    with pytest.raises(UserError, match="asked for --speculative-num-draft-tokens 16 and runs 4"):
        sglang.compare_settings({"speculative_num_draft_tokens": 4}, {"speculative-num-draft-tokens": 16})
    with pytest.raises(UserError, match="asked for --attention-backend intel_amx and runs torch_native"):
        sglang.compare_settings({"attention_backend": "torch_native"}, {"attention-backend": "intel_amx"})
    with pytest.raises(UserError, match="asked for --disable-radix-cache False and runs True"):
        sglang.compare_settings({"disable_radix_cache": True}, {"disable-radix-cache": False})
    assert sglang.compare_settings({"context_length": 8192}, {"context-length": False}) == {"context-length": 8192}


@pytest.mark.parametrize("asked", [{"a": 1, "b": [2.0, None]}, '{"b": [2, null], "a": 1}'])
def test_a_setting_of_json_is_compared_by_what_it_says(asked):
    running = {"json_model_override_args": '{"a": 1, "b": [2.0, null]}'}
    sglang.compare_settings(running, {"json-model-override-args": asked})
    with pytest.raises(UserError, match="asked for --json-model-override-args {'a': 2} and runs"):
        sglang.compare_settings(running, {"json-model-override-args": {"a": 2}})


class Session:
    """A server whose /server_info is `running`."""

    def __init__(self, running):
        self.running, self.status_code = running, 200

    def get(self, url, timeout):
        return self

    def raise_for_status(self):
        pass

    def json(self):
        return self.running


@pytest.mark.parametrize("name", ["tp-size", "tensor-parallel-size", "tp"])
def test_the_number_of_gpus_is_read_back_under_each_of_its_names(name, tmp_path):
    def check(asked, running):
        session = Session({"tp_size": running, "max_running_requests": 4})
        flags = {name: asked, "max-running-requests": 4}
        return sglang.check_settings(session, "", "target", Speculation(), flags, tmp_path)

    assert check(2, 2) == {"max-running-requests": 4, "tp-size": 2}
    with pytest.raises(UserError, match="asked for --tp-size 2 and runs 1"):
        check(2, 1)


# Last event of a stream, field names as each version writes them.
META = {
    "0.5.23": {
        "spec_num_correct_drafts": 4, "spec_num_proposed_drafts": 9, "spec_verify_ct": 3, "spec_accept_length": 2.67,
        "spec_correct_drafts_histogram": [1, 1, 0, 1], "spec_accept_rate": 0.44,
    },
    "0.5.9": {
        "spec_accept_token_num": 4, "spec_draft_token_num": 9, "spec_verify_ct": 3, "spec_accept_length": 2.67,
        "spec_accept_histogram": [1, 1, 0, 1], "spec_accept_rate": 0.44,
    },
}  # fmt: skip


def events(version, incremental):
    """Three steps of 2, 4 and 1 tokens after the prefill's, whole so far or new ones only."""
    tokens, text, sent = list(range(100, 108)), "abcdefgh", []
    ends = [1, 3, 7, 8]
    for before, end in zip([0, *ends], ends, strict=False):
        first = before if incremental else 0
        meta = {"id": "x", "finish_reason": None, "prompt_tokens": 5, "completion_tokens": end, "cached_tokens": 2}
        if end == 8:
            meta |= META[version] | {"finish_reason": {"type": "length", "length": 8}}
        sent.append({"text": text[first:end], "output_ids": tokens[first:end], "meta_info": meta})
    return sent


@pytest.mark.parametrize("version", META)
@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_in_both_shapes(version, incremental):
    reply, seen = Reply(), []
    for event in events(version, incremental):
        sglang.read_event(event, reply)
        seen.append(len(reply.token_ids))
    assert seen == [1, 3, 7, 8]
    assert reply.token_ids == list(range(100, 108)) and reply.text == "abcdefgh"
    assert (reply.finish_reason, reply.completion_tokens, reply.cached_tokens) == ("length", 8, 2)
    assert (reply.histogram, reply.drafted) == ([1, 1, 0, 1], 9)
    row = acceptance("p", reply, Counters(3, None, None, None, 8), 3)
    assert row == {"steps": 3, "drafted": 9, "accepted": 4, "accepted_per_position": [2, 1, 1]}


def test_a_histogram_against_the_number_of_steps():
    event = events("0.5.23", False)[-1]
    event["meta_info"]["spec_verify_ct"] = 5
    with pytest.raises(UserError, match="5 verification steps and a histogram of 3"):
        sglang.read_event(event, Reply())


@pytest.mark.parametrize(
    "event, said",
    [
        ({"error": {"message": "input too long"}}, "input too long"),
        (
            {"text": "", "output_ids": [], "meta_info": {
                "completion_tokens": 0, "finish_reason": {"type": "abort", "message": "out of memory"}}},
            "aborted the request: out of memory",
        ),
    ],
)  # fmt: skip
def test_errors_in_a_stream_are_raised(event, said):
    with pytest.raises(UserError, match=said):
        sglang.read_event(event, Reply())


def test_counters_of_this_model_alone():
    assert sglang.read_counters(METRICS, "m") == Counters(41, None, None, None, 104, 120)
    without_steps = "\n".join(line for line in METRICS.splitlines() if "verify" not in line)  # 0.5.9
    assert sglang.read_counters(without_steps, "m").steps is None


def test_retractions_are_counted():
    line = 'sglang:num_retracted_requests_total{model_name="m",tp_rank="0"} 3.0\n'
    assert sglang.read_counters(line, "m").preempted == 3


def test_differences_of_counters():
    start = Counters(0, None, None, None, 8, 0)
    assert sglang.read_counters(METRICS, "m") - start == Counters(41, None, None, None, 96, 120)


def test_acceptance_comes_from_each_request():
    reply = Reply(
        token_ids=list(range(8)), completion_tokens=8, histogram=[3, 4], drafted=7
    )  # nothing at positions 2, 3
    longer = Reply(token_ids=list(range(12)), histogram=[3, 4], drafted=21)
    row = acceptance("p", longer, Counters(7, None, None, None, 12), 3)
    assert row == {"steps": 7, "drafted": 21, "accepted": 4, "accepted_per_position": [4, 0, 0]}
    with pytest.raises(UserError, match="per-request metrics say 7 steps .* server's counters 9"):
        acceptance("p", reply, Counters(9, None, None, None, 8), 3)
    with pytest.raises(UserError, match="reports no acceptance"):
        acceptance("p", Reply(token_ids=[1, 2]), Counters(1, None, None, None, 2), 3)
    one = acceptance("p", Reply(token_ids=[1]), Counters(0, None, None, None, 1), 3)
    assert one == {"steps": 0, "drafted": 0, "accepted": 0, "accepted_per_position": [0, 0, 0]}


def test_steps_without_a_draft_are_counted_where_the_engine_leaves_them_out():
    delta = Counters(10, 30, 12, [6, 4, 2], 40)  # 40 tokens: 1 + 10 + 12, and 17 steps with nothing to draft
    reply = Reply(token_ids=list(range(40)))
    with pytest.raises(UserError, match="overshoot -17"):
        acceptance("p", reply, delta, 3)
    row = acceptance("p", reply, delta, 3, every_step=False)
    assert row == {"steps": 27, "drafted": 30, "accepted": 12, "accepted_per_position": [6, 4, 2]}


def test_both_engines_have_the_same_functions():
    names = (
        "environment", "refuse", "command", "optional_flags", "request", "read_event", "read_counters", "score",
        "template_tokens", "generate", "algorithm", "check_settings", "NAME", "DISTRIBUTIONS", "METHODS",
        "SKIPS_UNDRAFTED", "CACHE_SETTING",
    )  # fmt: skip
    for engine in map(engines.engine, engines.ENGINES):
        assert not [name for name in names if not hasattr(engine, name)]


def test_the_request_carries_token_ids():
    path, body = sglang.request("m", [1, 2, 3], {"max_tokens": 9, "temperature": 0, "seed": 0, "ignore_eos": False})
    assert path == "/generate" and body["input_ids"] == [1, 2, 3] and body["stream"] is True
    assert body["sampling_params"] == {"max_new_tokens": 9, "temperature": 0, "sampling_seed": 0, "ignore_eos": False}
