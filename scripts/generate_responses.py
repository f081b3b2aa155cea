"""Let the target answer the prompts of one shard with an engine's offline API or a running server, token ids in and out.

    generate_responses.py --target results/target --pool results/prompts/pool.parquet --start 0 --count 160 \\
        --engine vllm --sampling '{"max_tokens": 160, "temperature": 0}' --out results/responses/shard-000000.parquet

A killed job continues from OUT.partial. Runs in the engine's environment; with --engine endpoint, in any.
"""

import json
from pathlib import Path

from breakeven import artefacts, chat, cli, engines, responses, tables, target


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--pool", required=True, type=Path, help="ranked prompts, as curate_prompts.py writes them")
    parser.add_argument("--start", required=True, type=int, help="first rank of this shard")
    parser.add_argument("--count", required=True, type=int, help="prompts in this shard")
    parser.add_argument("--engine", default="vllm", help="engine to generate with")
    parser.add_argument(
        "--sampling", required=True, type=json.loads, help="max_tokens, temperature, top_p, seed as JSON"
    )
    parser.add_argument("--samples-per-prompt", type=int, default=1, help="responses for each prompt")
    parser.add_argument(
        "--greedy-first", action="store_true", help="the first response to each prompt is greedy, the others sampled"
    )
    parser.add_argument("--settings", default={}, type=json.loads, help="engine arguments as JSON")
    parser.add_argument(
        "--endpoint", default={}, type=json.loads, help="engine endpoint: base_url, key_variable, concurrency as JSON"
    )
    parser.add_argument("--environment", default={}, type=json.loads, help="environment variables as JSON")
    parser.add_argument("--hardware", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    args = parser.parse_args()
    if args.samples_per_prompt > 1 and args.sampling["temperature"] == 0:
        raise cli.UserError(
            "responses.samples_per_prompt: greedy samples are all the same; set responses.temperature > 0"
        )

    engine = engines.engine(args.engine)
    engines.prepare(engine, args.hardware, args.environment)
    artefacts.verify_folder(args.target)
    pool = artefacts.read_table(args.pool, tables.PROMPTS)
    shard = responses.shard_of(pool, args.start, args.count, args.samples_per_prompt)
    tokenizer = chat.load_tokenizer(args.target)
    kwargs = target.read_manifest(args.target)["parameters"]["chat_template_kwargs"]
    prompt_ids = [chat.render(tokenizer, prompt["messages"], kwargs) for prompt in shard]

    sampling = dict(args.sampling)
    seed = sampling.pop("seed", 0)
    requests = [(i, sample) for i in range(len(shard)) for sample in range(args.samples_per_prompt)]
    inputs = {"pool": args.pool, "target": args.target / "manifest.json"}
    key = artefacts.fingerprint(
        [args.start, args.count, args.engine, args.sampling, args.samples_per_prompt, args.settings]
        + [artefacts.sha256(path) for path in inputs.values()]
        + (["greedy first"] if args.greedy_first else [])
    )
    partial = responses.Partial(args.out.with_name(args.out.name + ".partial"), key)
    missing = [n for n in range(len(requests)) if n not in partial.done]
    if missing:
        parameters = []
        for i, sample in (requests[n] for n in missing):
            own = responses.sampling_of(sampling, sample, args.greedy_first)
            if own["temperature"] > 0 and seed is not None:
                own["seed"] = responses.seed_of(seed, shard[i]["prompt_id"], sample)
            parameters.append(own)
        finished = engine.generate(
            str(args.target), [prompt_ids[requests[n][0]] for n in missing], parameters, args.settings | args.endpoint
        )
        responses.collect(finished, missing, partial, sampling["max_tokens"])

    rows = []
    for n, (i, sample) in enumerate(requests):
        tokens, reason = partial.done[n]
        rows.append(
            {
                "prompt_id": shard[i]["prompt_id"],
                "sample": sample,
                "held_out": shard[i]["held_out"],
                "prompt_token_ids": prompt_ids[i],
                "response_token_ids": tokens,
                "finish_reason": reason,
                "n_reasoning": responses.reasoning_length(tokenizer, tokens),
                "engine": args.engine,
                "sampling": json.dumps(responses.sampling_of(args.sampling, sample, args.greedy_first), sort_keys=True),
            }
        )
    artefacts.write_table(args.out, rows, tables.RESPONSES)
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "responses",
        parameters={
            "start": args.start,
            "count": args.count,
            "engine": args.engine,
            "sampling": args.sampling,
            "samples_per_prompt": args.samples_per_prompt,
            "greedy_first": args.greedy_first,
            "settings": args.settings,
            "answers_by": "target",
        },
        inputs=inputs,
        counts={
            "responses": len(rows),
            "prompt_tokens": sum(len(row["prompt_token_ids"]) for row in rows),
            "response_tokens": sum(len(row["response_token_ids"]) for row in rows),
            "stopped": sum(row["finish_reason"] == "stop" for row in rows),
        },
        versions=engines.versions(args.engine),
        files=artefacts.hashes(args.out),
    )
    partial.remove()


if __name__ == "__main__":
    cli.run(main)
