"""Offline acceptance on the very outputs that an arm served: does the engine accept what the drafter predicts?

    replay_served.py --target results/target --checkpoint results/drafters/own/checkpoint \\
        --served results/benchmarks/vllm-own-k3/pass-1.parquet --k 3 --out results/benchmarks/vllm-own-k3/offline.parquet \\
        --what-if results/benchmarks/vllm-own-k3/what_if.parquet

The target is run over prompt and output, and the drafter walks over them. Served acceptance far below the walk's means
that the integration is at fault; both low, that the drafter is. With --what-if the walk is repeated under every fault
hypothesis of breakeven/whatif.py; the one that fits the served acceptance names the fault.
"""

from pathlib import Path

import pyarrow as pa
import torch

from breakeven import artefacts, checkpoint, cli, hidden_states, places, tables, target, walk, whatif


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--checkpoint", required=True, type=Path, help="the drafter's folder")
    parser.add_argument("--served", required=True, type=Path, help="one pass of a benchmarked arm")
    parser.add_argument("--k", required=True, type=int, help="drafted tokens per step, as served")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="padded tokens in one forward pass")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    parser.add_argument("--what-if", type=Path, help="Parquet file for the walks under each fault hypothesis")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    served = first_of_each_prompt(artefacts.read_table(args.served, tables.BENCHMARK))
    if not served.num_rows:
        unserved(args)
        return
    drafter, ids = checkpoint.load(args.checkpoint, args.target, args.device)
    layers = drafter.config.layers
    if args.what_if:
        layers = whatif.neighbours(layers, target.text_config(args.target)["num_hidden_layers"])
    capture = hidden_states.Capture(target.load_model(args.target, args.device), layers)
    sequences = hidden_states.InMemory(
        hidden_states.extract(
            capture,
            served["prompt_token_ids"].to_pylist(),
            served["output_token_ids"].to_pylist(),
            args.batch_tokens,
            args.device,
        )
    )
    chosen = list(range(len(sequences)))
    if args.what_if:
        walks = whatif.evaluate(drafter, ids, capture, sequences, chosen, args.k, args.device)
        found = walks[whatif.AS_BUILT]
    else:
        found = walk.evaluate(drafter, ids, sequences, chosen, args.k, args.device)
    provenance = {
        "parameters": {"k": args.k},
        "inputs": {"served": args.served, "drafter": args.checkpoint / "config.json"},
        "counts": {"sequences": len(sequences), "rows": sum(len(m.matched) for m in found)},
    }
    rows = walk.table(found, [args.k], "served")
    artefacts.write_table(args.out, rows, tables.OFFLINE)
    by_output_position = places.table(
        (walk.walk(m, args.k) for m in found), args.k, places.longest_trained(args.checkpoint)
    )
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "offline",
        **provenance,
        by_output_position=by_output_position,
        files=artefacts.hashes(args.out),
    )
    cli.logger.info("offline on served outputs: %s", walk.said(rows))
    if not args.what_if:
        return
    rows = whatif.table(walks, args.k)
    artefacts.write_table(args.what_if, rows, tables.WHAT_IF)
    prompt_ids = served["prompt_id"].to_pylist()
    by_output = {
        name: dict(zip(prompt_ids, counts, strict=True)) for name, counts in whatif.by_output(walks, args.k).items()
    }
    artefacts.write_manifest(
        artefacts.manifest_path(args.what_if),
        "what_if",
        **provenance,
        by_output=by_output,
        files=artefacts.hashes(args.what_if),
    )
    for i in range(0, len(rows), args.k):
        cli.logger.info("what if %s: %s", rows[i]["hypothesis"], walk.said(rows[i : i + args.k]))


def first_of_each_prompt(served):
    """A pass without repeats: under load a prompt may be asked several times."""
    first: dict[str, int] = {}
    for i, prompt in enumerate(served["prompt_id"].to_pylist()):
        first.setdefault(prompt, i)
    return served.take(pa.array(list(first.values()), pa.int64()))  # of an arm that was not served, none


def unserved(args) -> None:
    """Tables without a row, for an arm that was not served."""
    for path, schema, artefact in ((args.out, tables.OFFLINE, "offline"), (args.what_if, tables.WHAT_IF, "what_if")):
        if path:
            artefacts.write_table(path, [], schema)
            artefacts.write_manifest(
                artefacts.manifest_path(path), artefact, parameters={"k": args.k}, inputs={"served": args.served},
                files=artefacts.hashes(path),
            )  # fmt: skip
    cli.logger.info("%s holds no request: there is nothing to replay", args.served)


if __name__ == "__main__":
    cli.run(main)
