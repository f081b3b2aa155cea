"""Offline acceptance of a drafter: a simulated speculative walk over held-out responses, for K = 1 ... --max-k.

    evaluate_drafter.py --target results/target --checkpoint results/drafters/own/checkpoint \\
        --hidden-states results/hidden_states/shard-*.safetensors --out results/drafters/own/offline.parquet

With --responses in place of --hidden-states, the target gives the hidden states of the drafter's layers.
"""

from pathlib import Path

import torch

from breakeven import artefacts, checkpoint, cli, hidden_states, places, tables, walk


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--checkpoint", required=True, type=Path, help="the drafter's folder")
    hidden_states.add_options(parser)
    parser.add_argument("--max-k", type=int, default=8, help="longest draft")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--by-sequence", type=Path, help="Parquet file for the counts of each sequence")
    parser.add_argument("--out", required=True, type=Path, help="Parquet file to write")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    drafter, ids = checkpoint.load(args.checkpoint, args.target, args.device)
    sequences = hidden_states.open_sequences(args, drafter.config.layers, args.device)
    if drafter.config.layers != sequences.layers:
        raise cli.UserError(
            f"{args.checkpoint}: trained on layers {drafter.config.layers}, the hidden states hold {sequences.layers};"
            " set hidden_states.layers to the drafter's"
        )
    chosen = sequences.judged()
    if not chosen:
        raise cli.UserError("no held-out sequence: raise prompts.size or prompts.held_out_fraction")
    with cli.Progress(sum(sequences.length(i) for i in chosen), "tok", "walk") as progress:
        found = walk.evaluate(drafter, ids, sequences, chosen, args.max_k, args.device, progress)
    ks = list(range(1, args.max_k + 1))
    rows = walk.table(found, ks, "held-out")
    artefacts.write_table(args.out, rows, tables.OFFLINE)
    if args.by_sequence:
        about = [(i, sequences.conversation[i]) for i in chosen]
        artefacts.write_table(args.by_sequence, walk.by_sequence(found, about, ks), tables.OFFLINE_BY_SEQUENCE)
    trained = places.longest_trained(args.checkpoint)
    greedy = all(sequences.temperature[i] == 0 for i in chosen)
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "offline",
        parameters={"max_k": args.max_k, "sequences": "greedy held-out" if greedy else "all held-out"},
        inputs=hidden_states.input_manifests(args) | {"drafter": args.checkpoint / "config.json"},
        counts={"sequences": len(chosen), "rows": sum(len(m.matched) for m in found)},
        by_output_position=[row for k in ks for row in places.table((walk.walk(m, k) for m in found), k, trained)],
        files=artefacts.hashes(args.out, *([args.by_sequence] if args.by_sequence else [])),
    )
    for k in ks:
        cli.logger.info("K=%d: %s", k, walk.said([row for row in rows if row["k"] == k]))


if __name__ == "__main__":
    cli.run(main)
