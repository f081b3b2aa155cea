"""vLLM's command line for a table of arms, its counters and answers as recorded from 0.32.0 and 0.20.2."""

import json

import numpy as np
import pytest

from breakeven import engines, headers
from breakeven.benchmark import acceptance, check_tokens
from breakeven.cli import UserError
from breakeven.engines import Counters, Reply, Speculation, vllm

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 248.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.795968414959963e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 744.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 278.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 142.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 84.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 52.0
vllm:generation_tokens_total{engine="0",model_name="m"} 528.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 170.0
vllm:generation_tokens_total{engine="0",model_name="another"} 99.0
"""


def words(speculation=None, flags=None, supported=()):
    return vllm.command("py", "target", "name", 8000, speculation or Speculation(), flags or {}, set(supported))


def config_of(command):
    return json.loads(command[command.index("--speculative-config") + 1])


@pytest.mark.parametrize(
    "speculation, expected",
    [
        (Speculation("eagle3", 3, "d"), {"method": "eagle3", "model": "d", "num_speculative_tokens": 3}),
        (Speculation("eagle3", 16, "d"), {"method": "eagle3", "model": "d", "num_speculative_tokens": 16}),
        (
            Speculation("ngram", 5, None, {"prompt_lookup_max": 4}),
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4},
        ),
    ],
)
def test_speculative_config(speculation, expected):
    assert config_of(words(speculation)) == expected


def test_a_drafter_is_spread_over_the_gpus_of_its_target():
    flags = {"tensor-parallel-size": 2}
    assert config_of(words(Speculation("eagle3", 3, "d"), flags))["draft_tensor_parallel_size"] == 2
    chosen = Speculation("eagle3", 3, "d", {"draft_tensor_parallel_size": 1})
    assert config_of(words(chosen, flags))["draft_tensor_parallel_size"] == 1
    assert "draft_tensor_parallel_size" not in config_of(words(Speculation("ngram", 3), flags))


# As 0.32.0 writes it, less what is not read.
STARTED = (
    "(EngineCore pid=7) INFO 11-29 20:59:52 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
    "model='results/target', speculative_config=SpeculativeConfig(method='eagle3', model='d', num_spec_tokens=3), "
    "dtype=torch.bfloat16, max_seq_len=2048, load_format=auto, tensor_parallel_size=2, pipeline_parallel_size=1, "
    "data_parallel_size=1, enforce_eager=True, kv_cache_dtype=auto\n"
)


def test_what_the_engine_printed_is_compared_with_what_was_asked(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("starting\n" + STARTED + "ready\n")

    def check(speculation, **flags):
        named = {name.replace("_", "-"): value for name, value in flags.items()}
        return vllm.check_settings(None, "", "target", speculation, named, log)

    found = check(Speculation("eagle3", 3, "d"), tensor_parallel_size=2, max_model_len=2048, enforce_eager=True)
    asked = {"tensor-parallel-size": 2, "max-model-len": 2048, "enforce-eager": True, "num_speculative_tokens": 3}
    assert found == asked | {"draft_tensor_parallel_size": 2}
    assert check(Speculation(), dtype="bfloat16", max_model_len=-1) == {}
    with pytest.raises(UserError, match="asked for tensor-parallel-size 4 and runs 2"):
        check(Speculation(), tensor_parallel_size=4)
    with pytest.raises(UserError, match="asked for num_speculative_tokens 5 and runs 3"):
        check(Speculation("eagle3", 5, "d"))
    log.write_text("ready\n")
    assert check(Speculation(), tensor_parallel_size=4) == {}


# As 0.32.0 writes them.
SHARES = (
    "Detected EAGLE model without its own {0} in the checkpoint. Sharing target model weights with the draft model.\n"
)
KEEPS = "Detected EAGLE model with distinct {0} weights. Keeping separate {0} weights from the target model.\n"
EQUAL = "Detected EAGLE model with {0} identical to the target model. Sharing target model {0} weights.\n"


def test_b027_a_head_that_the_engine_overwrites_is_an_error(tmp_path):
    log, drafter = tmp_path / "server.log", tmp_path / "drafter"
    drafter.mkdir()
    headers.write(drafter / "model.safetensors", {"lm_head.weight": np.zeros((4, 2), np.int32)})

    def check(text):
        log.write_text(STARTED + text)
        return vllm.check_settings(None, "", "target", Speculation("eagle3", 3, str(drafter)), {}, log)

    found = check(SHARES.format("embed_tokens") + KEEPS.format("lm_head"))
    assert (found["lm_head"], found["embed_tokens"]) == ("the drafter's", "the target's")
    assert check(EQUAL.format("lm_head"))["lm_head"] == "the target's"
    with pytest.raises(UserError, match="found no lm_head in .*drafter and runs with the target's, but the checkpoint"):
        check(SHARES.format("lm_head"))


def test_plain_decoding_has_no_speculation_flags():
    assert not [word for word in words(supported={vllm.PER_REQUEST_METRICS}) if "spec" in word]


def test_flags_in_every_form():
    command = words(flags={"enforce-eager": True, "enable-lora": False, "max-model-len": 2048, "dtype": "bfloat16"})
    assert command[-5:] == ["--enforce-eager", "--max-model-len", "2048", "--dtype", "bfloat16"]


def test_the_server_is_told_to_say_how_many_tokens_were_cached():
    assert "--enable-prompt-tokens-details" in words()
    without = {"choices": [], "usage": {"completion_tokens": 4}}  # 0.20.2, where none were
    assert stream([without]).cached_tokens == 0
    details = {"prompt_tokens_details": {"cached_tokens": 16}}
    assert stream([without | {"usage": without["usage"] | details}]).cached_tokens == 16


def test_per_request_metrics_only_where_the_server_knows_them():
    speculation = Speculation("eagle3", 1, "d")
    assert vllm.PER_REQUEST_METRICS in words(speculation, supported={vllm.PER_REQUEST_METRICS})
    assert vllm.PER_REQUEST_METRICS not in words(speculation)


@pytest.mark.parametrize(
    "speculation, temperature, hardware, said",
    [
        (Speculation("eagle3", 3, "d"), 0.6, "cpu", "temperature 0.6 with speculation on the CPU"),
        (Speculation("ngram", 3), 0.6, "cpu", "temperature 0.6 with speculation on the CPU"),
        (Speculation("draft_model", 3), 0.6, "cpu", "temperature 0.6 with speculation on the CPU"),
        (Speculation("eagle3", 3, "d"), 0, "cpu", None),
        (Speculation("eagle3", 3, "d"), 0.6, "cuda", None),
        (Speculation(), 0.6, "cpu", None),
        (Speculation("medusa", 3), 0, "cpu", "no speculation method 'medusa'"),
    ],
)
def test_refused_combinations(speculation, temperature, hardware, said):
    reason = vllm.refuse(speculation, temperature, hardware)
    assert reason is None if said is None else said in reason


def test_counters_of_this_model_alone():
    assert vllm.read_counters(METRICS, "m") == Counters(248, 744, 278, [142, 84, 52], 528, 170)


def test_preemptions_are_counted():
    line = 'vllm:num_preemptions_total{engine="0",model_name="m"} 3.0\n'
    assert (vllm.read_counters(line, "m") - vllm.read_counters("", "m")).preempted == 3


def test_counters_are_summed_over_replicas():
    both = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    assert vllm.read_counters(both, "m") == Counters(496, 1488, 556, [284, 168, 104], 1056, 340)


def test_differences_of_counters():
    zero = vllm.read_counters("", "m")
    assert zero == Counters() and vllm.read_counters(METRICS, "m") - zero == Counters(
        248, 744, 278, [142, 84, 52], 528, 170
    )


def test_a_request_leaves_no_sampling_to_the_targets_generation_config():
    _, body = vllm.request("m", [1, 2], {"max_tokens": 9, "temperature": 0.6, "top_p": 0.9})
    assert body["top_p"] == 0.9 and body["temperature"] == 0.6
    neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert {name: body[name] for name in neutral} == neutral
    assert vllm.request("m", [1, 2], {})[1]["top_p"] == 1.0


def stream(events):
    reply = Reply()
    for event in events:
        vllm.read_event(event, reply)
    return reply


def test_a_stream_with_several_tokens_in_a_chunk():
    reply = stream(
        [
            {"choices": [{"text": "The", "token_ids": [504], "prompt_token_ids": [1, 2], "finish_reason": None}]},
            {"choices": [{"text": " sun is", "token_ids": [3521, 314], "finish_reason": None}]},
            {"choices": [{"text": "", "token_ids": [2], "finish_reason": "stop"}]},
            {
                "choices": [],
                "usage": {"completion_tokens": 4, "prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}},
                "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 1, 0, 0], "num_draft_tokens": 6}},
            },
        ]
    )
    assert reply.token_ids == [504, 3521, 314, 2] and reply.text == "The sun is" and reply.finish_reason == "stop"
    assert (reply.completion_tokens, reply.cached_tokens, reply.histogram) == (4, 0, [1, 1, 0, 0])


def test_an_error_in_a_stream_is_raised():
    with pytest.raises(UserError, match="out of blocks"):
        stream([{"error": {"message": "out of blocks"}}])


def reply_of(tokens, histogram=None):
    return Reply(token_ids=list(range(tokens)), completion_tokens=tokens, histogram=histogram)


def test_tokens_and_counters_must_belong_together():
    delta = Counters(40, 120, 88, [40, 30, 18], 128)
    assert acceptance("p", reply_of(128), delta, 3)["accepted_per_position"] == [40, 30, 18]
    # 1 + 40 + 88 = 129: the last step ran one token past the end.
    with pytest.raises(UserError, match=r"prompt p: 120 tokens do not fit .*overshoot 9, possible are 0 to 3"):
        acceptance("p", reply_of(120), delta, 3)
    with pytest.raises(UserError, match="overshoot -1"):
        acceptance("p", reply_of(130), delta, 3)
    with pytest.raises(UserError, match="per-request metrics say 41 steps and 87 accepted"):
        acceptance("p", reply_of(128, [1, 1, 31, 8]), delta, 3)
    assert acceptance("p", reply_of(128), delta, 0)["steps"] is None


def test_tokens_received_counted_and_stated_must_agree():
    check_tokens("p", reply_of(5), Counters(completion_tokens=5))
    with pytest.raises(UserError, match="5 tokens arrived, usage says 5 and the server counted 9; is something else"):
        check_tokens("p", reply_of(5), Counters(completion_tokens=9))


def test_what_a_generation_leaves_out(monkeypatch):
    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    alone = vllm.offline_defaults({}, seeded=True)
    assert alone == {"enable_prefix_caching": False, "disable_log_stats": True}
    spread = vllm.offline_defaults({"tensor_parallel_size": 2}, seeded=True)
    assert spread == alone | {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    assert vllm.offline_defaults({}, seeded=True) == alone | {"enable_chunked_prefill": False}
    assert vllm.offline_defaults({}, seeded=False) == alone


def test_unknown_engines_are_named():
    with pytest.raises(UserError, match="engine 'trt' is unknown; use one of vllm"):
        engines.engine("trt")
