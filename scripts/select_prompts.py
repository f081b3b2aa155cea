"""Select prompts: check that the pool holds the N prompts asked for, and say how many of them are held out.

    python scripts/select_prompts.py --pool results/prompts/pool.parquet --size 320 --out results/prompts/selection.json

The selection is rank < N of the pool; this writes no prompts, only what a shard job needs to know about the size.
"""

from pathlib import Path

from breakeven import artefacts, cli, prompts, tables


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--pool", type=Path, required=True, help="pool.parquet, its manifest beside it")
    add("--size", type=int, required=True, help="number of prompts, the first ranks of the pool")
    add("--samples-per-prompt", type=int, default=1, help="responses to each prompt; only for the advice in an error")
    add("--out", type=Path, required=True, help="the selection, JSON in the form of a manifest")
    args = parser.parse_args()

    manifest = artefacts.manifest_path(args.pool)
    artefacts.read_manifest(manifest, "prompts")
    held_out = artefacts.read_table(args.pool, tables.PROMPTS)["held_out"].to_pylist()
    prompts.check_size(len(held_out), args.size, args.samples_per_prompt)
    chosen = held_out[: args.size]
    artefacts.write_manifest(
        args.out,
        "selection",
        parameters={"size": args.size},
        inputs={"pool": manifest},
        counts={"size": args.size, "held_out": sum(chosen), "training": args.size - sum(chosen), "pool": len(held_out)},
    )


if __name__ == "__main__":
    cli.run(main)
