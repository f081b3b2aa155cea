"""The columns of every Parquet table that one stage writes and another reads (docs/design.md, section 3)."""

import pyarrow as pa

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])

# results/prompts/pool.parquet: every admissible prompt, best rank first.
PROMPTS = pa.schema(
    [
        ("prompt_id", pa.string()),  # "{conversation hash}-{turn}": prefixes of one conversation share the first part
        ("messages", pa.list_(MESSAGE)),  # ends with a user turn
        ("source", pa.string()),
        ("language", pa.string()),  # ISO 639-1
        ("n_tokens", pa.int32()),  # of the rendered prompt, generation prompt included
        ("held_out", pa.bool_()),  # by conversation; held-out prompts never train a drafter
        ("rank", pa.int64()),  # 0, 1, 2, ...: the N-prompt set is rank < N
    ]
)

# results/prompts/rejected.parquet: one row per prompt or record that was dropped.
REJECTED = pa.schema(
    [
        ("source", pa.string()),
        ("record", pa.string()),  # line, row or conversation id within the source
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)

# results/responses/shard-*.parquet: token ids are the truth, nothing is tokenized again.
RESPONSES = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("sample", pa.int32()),
        ("held_out", pa.bool_()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("response_token_ids", pa.list_(pa.int32())),  # with the end token where it was generated
        ("finish_reason", pa.string()),  # stop | length
        ("n_reasoning", pa.int32()),  # leading response tokens that are reasoning text
        ("engine", pa.string()),
        ("sampling", pa.string()),  # JSON: temperature, top_p, seed, max_tokens
    ]
)

# results/drafters/*/checkpoint/training.parquet: one row per optimizer step and one per validation.
TRAINING = pa.schema(
    [
        ("step", pa.int32()),
        ("epoch", pa.int32()),
        ("split", pa.string()),  # train | held_out
        ("loss", pa.float32()),
        ("accuracy", pa.list_(pa.float32())),  # per training-time-test step, unconditional
        ("learning_rate", pa.float32()),
        ("gradient_norm", pa.float32()),
        ("tokens", pa.int64()),  # tokens seen so far, prompts included
    ]
)

# results/drafters/*/offline.parquet: the simulated walk, one row per prompt set, K and position.
OFFLINE = pa.schema(
    [
        ("prompts", pa.string()),  # held-out | protocol name
        ("k", pa.int32()),
        ("position", pa.int32()),  # 1 ... K
        ("steps", pa.int64()),  # verification steps
        ("accepted", pa.int64()),  # steps whose draft was accepted up to and including this position
        ("marginal", pa.float64()),  # accepted / steps
        ("conditional", pa.float64()),  # marginal at this position / marginal at the one before; null if that is 0
        ("acceptance_length", pa.float64()),  # of the whole walk at this K, bonus included
    ]
)

# results/drafters/*/offline_by_sequence.parquet: the same walk, one row per held-out sequence and K.
OFFLINE_BY_SEQUENCE = pa.schema(
    [
        ("sequence", pa.int64()),  # over all shards, in their order
        ("conversation", pa.int64()),  # sequences of one conversation depend on each other
        ("k", pa.int32()),
        ("steps", pa.int64()),  # 0 where the response is too short to judge a step
        ("accepted_per_position", pa.list_(pa.int64())),  # position 1 ... K
    ]
)

# results/data_curve/curve.parquet: acceptance length against training samples, one row per number of samples and K.
DATA_CURVE = pa.schema(
    [
        ("drafter", pa.string()),  # null where nothing was trained: the forecast
        ("samples", pa.int64()),
        ("k", pa.int32()),
        ("kind", pa.string()),  # measured | forecast
        ("acceptance_length", pa.float64()),  # of the held-out walk; of the fitted law in a forecast
        ("low", pa.float64()),  # 95 % bootstrap interval over held-out conversations
        ("high", pa.float64()),
        ("fitted", pa.float64()),  # the law a - b * samples ** -c
        ("served_acceptance_length", pa.float64()),  # of an arm with this drafter and K; null if there is none
        ("conversations", pa.int64()),  # held out, that the walk judged
        ("steps", pa.int64()),  # verification steps of the walk; null in a forecast
        ("a", pa.float64()),
        ("b", pa.float64()),
        ("c", pa.float64()),
    ]
)

# results/benchmarks/{arm}/what_if.parquet: the walk on an arm's served outputs under each fault hypothesis.
WHAT_IF = pa.schema(
    [
        ("hypothesis", pa.string()),  # as-built | layers-minus-1 | ...: whatif.py, verdict.FAULTS
        ("k", pa.int32()),
        ("position", pa.int32()),  # 1 ... K
        ("steps", pa.int64()),
        ("accepted", pa.int64()),  # steps whose draft was accepted up to and including this position
        ("marginal", pa.float64()),
        ("acceptance_length", pa.float64()),  # of the whole walk, bonus included
    ]
)

# results/stepcost/{engine}.parquet: time of a step with and without speculation, one row per K, concurrency and repeat.
STEP_COST = pa.schema(
    [
        ("engine", pa.string()),
        ("k", pa.int32()),  # drafted tokens per step, 1 or more
        ("concurrency", pa.int32()),
        ("repeat", pa.int32()),
        ("step_s", pa.float64()),  # a step with speculation: geometric mean over rounds (steptimes.py)
        ("step_low", pa.float64()),  # its 95 % interval
        ("step_high", pa.float64()),
        ("plain_step_s", pa.float64()),  # a step without
        ("rho", pa.float64()),  # step_s / plain_step_s
        ("rho_low", pa.float64()),  # 95 % over rounds, and over the plain servers before and after
        ("rho_high", pa.float64()),
        ("acceptance_length", pa.float64()),  # of the random drafter, as measured
        ("steps", pa.int64()),
        ("requests", pa.int64()),
    ]
)

# results/benchmarks/{arm}/pass-*.parquet: one row per measured request; under load a prompt may have several.
BENCHMARK = pa.schema(
    [
        ("arm", pa.string()),
        ("pass_number", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("output_token_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("sent_at", pa.float64()),  # seconds since the epoch
        ("ttft_s", pa.float64()),  # request sent to first token received
        ("e2e_s", pa.float64()),  # request sent to last token received
        # null without speculation, and under load where the engine reports nothing per request
        ("steps", pa.int64()),  # verification steps
        ("drafted", pa.int64()),
        ("accepted", pa.int64()),  # draft tokens accepted, bonus tokens not counted
        ("accepted_per_position", pa.list_(pa.int64())),  # position 1 ... K
    ]
)

# results/comparison/summary.parquet: one row per arm and protocol; baselines have speed-up 1.
SUMMARY = pa.schema(
    [
        ("arm", pa.string()),
        ("engine", pa.string()),
        ("drafter", pa.string()),  # null for a baseline
        ("k", pa.int32()),  # 0 for a baseline
        ("protocol", pa.string()),
        ("concurrency", pa.int32()),  # requests in flight at once
        ("baseline", pa.string()),  # the arm this one is paired with
        ("prompts", pa.int32()),
        ("passes", pa.int32()),
        ("tokens_per_second", pa.float64()),  # decode only: (n - 1) / (e2e - ttft), mean over prompts
        ("tokens_per_second_e2e", pa.float64()),
        ("server_tokens_per_second", pa.float64()),  # output tokens of all requests / seconds with one in flight
        ("ttft_s", pa.float64()),
        ("speedup", pa.float64()),  # geometric mean of paired per-prompt ratios of decode tokens per second
        ("speedup_low", pa.float64()),  # 95 % bootstrap interval over prompts
        ("speedup_high", pa.float64()),
        ("acceptance_length", pa.float64()),  # tokens per verification step, bonus included
        ("offline_acceptance_length", pa.float64()),
        ("rho", pa.float64()),  # acceptance_length / speedup = break-even acceptance length
        ("identical_outputs", pa.float64()),  # share of prompts with the same token ids as the baseline
        ("predicted_speedup", pa.float64()),  # offline AL / rho, rho measured apart from this arm; null without
        ("verdict", pa.string()),  # baseline | faster | slower | undecided | refused
        ("cause", pa.string()),  # integration | integration or distribution | training | cost | mixed; null: nothing
        ("fault", pa.string()),  # what exactly: hypotheses that explain the counts, or distribution; else null
        ("reason", pa.string()),  # why it was refused, else null
    ]
)

# results/comparison/requests.parquet: every measured request beside its baseline.
REQUESTS = pa.schema(
    [
        ("arm", pa.string()),
        ("protocol", pa.string()),
        ("baseline", pa.string()),  # null for a baseline and where there is none
        ("pass_number", pa.int32()),
        ("prompt_id", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("cached_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("ttft_s", pa.float64()),
        ("e2e_s", pa.float64()),
        ("tokens_per_second", pa.float64()),  # decode only: (n - 1) / (e2e - ttft); null for fewer than two tokens
        ("speedup", pa.float64()),  # of this prompt, passes averaged (in logs) in both arms; null if refused
        ("acceptance_length", pa.float64()),  # of this request; null without speculation
        ("first_difference", pa.int32()),  # first output token unlike the baseline's same pass; null if identical
        ("degenerate", pa.string()),  # why the output is no text, else null
        ("finish_reason", pa.string()),
        ("text", pa.string()),
    ]
)

# results/comparison/acceptance.parquet: one row per speculating arm and drafted position, all passes pooled.
ACCEPTANCE = pa.schema(
    [
        ("arm", pa.string()),
        ("k", pa.int32()),
        ("position", pa.int32()),  # 1 ... K
        ("steps", pa.int64()),
        ("accepted", pa.int64()),
        ("marginal", pa.float64()),
        ("conditional", pa.float64()),  # null where the position was never reached
        ("low", pa.float64()),  # Wilson 95 % interval of the marginal, over these steps
        ("high", pa.float64()),
        ("offline_prompts", pa.string()),  # the prompt set of the offline walk; null if there was none at this K
        ("offline_steps", pa.int64()),
        ("offline_marginal", pa.float64()),
        ("offline_low", pa.float64()),
        ("offline_high", pa.float64()),
    ]
)
