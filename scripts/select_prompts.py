"""Check, before any long job, that the pool holds the prompts asked for, that they suffice to train and to judge the drafters,
that these can be written for both engines, and that the hidden states fit on the disk.

    select_prompts.py --pool results/prompts/pool.parquet --target results/target --size 320 --max-tokens 160 \\
        --hidden-states results/hidden_states --out results/prompts/selection.json

The selection is rank < N of the pool; this writes no prompts, only the counts.
"""

from pathlib import Path

from breakeven import artefacts, cli, selection, tables, target
from breakeven.conventions import export_ids, family, layers_option


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--pool", type=Path, required=True, help="pool.parquet, its manifest beside it")
    add("--target", type=Path, required=True, help="the target's folder; its width decides the size of hidden states")
    add("--size", type=int, required=True, help="number of prompts, the first ranks of the pool")
    add("--samples-per-prompt", type=int, default=1, help="responses to each prompt")
    add("--samples", type=int, default=0, help="the most responses that a drafter is to be trained on")
    add("--max-tokens", type=int, required=True, help="longest response")
    add(
        "--layers",
        default="default",
        help="layers whose hidden states are kept, as extract_hidden_states.py takes them",
    )
    add(
        "--codec",
        choices=("bfloat16", "int8", "none"),
        default="bfloat16",
        help="how they are stored; none: not at all",
    )
    add("--hidden-states", type=Path, required=True, help="folder that the hidden states will go to")
    add("--out", type=Path, required=True, help="the selection, JSON in the form of a manifest")
    args = parser.parse_args()

    manifest = artefacts.manifest_path(args.pool)
    artefacts.read_manifest(manifest, "prompts")
    pool = artefacts.read_table(args.pool, tables.PROMPTS)
    selection.check_size(pool.num_rows, args.size, args.samples_per_prompt)
    chosen = pool.slice(0, args.size)
    held_out, prompt_tokens = sum(chosen["held_out"].to_pylist()), sum(chosen["n_tokens"].to_pylist())

    selection.check_split(args.size - held_out, held_out, args.samples_per_prompt, args.samples)

    config = target.text_config(args.target)
    layers = layers_option(args.layers, config["num_hidden_layers"])
    export_ids(layers, family(config), config["num_hidden_layers"])  # else a trained drafter could not be saved
    n_layers = len(layers)
    per_token = selection.bytes_per_token(config["hidden_size"], n_layers, args.codec)
    responses = args.size * args.samples_per_prompt
    most = selection.most_hidden_state_bytes(
        prompt_tokens, responses, args.max_tokens, args.samples_per_prompt, per_token
    )
    there = sum(p.stat().st_size for p in args.hidden_states.glob("*.safetensors"))
    selection.check_space(args.hidden_states, most - there, f"the hidden states of {responses} responses")
    cli.logger.info(
        "%d prompts; hidden states take at most %.2f GB, %d bytes a token", args.size, most / 1e9, per_token
    )
    artefacts.write_manifest(
        args.out,
        "selection",
        parameters={"size": args.size, "samples_per_prompt": args.samples_per_prompt, "max_tokens": args.max_tokens},
        inputs={"pool": manifest},
        counts={
            "size": args.size,
            "held_out": held_out,
            "training": args.size - held_out,
            "pool": pool.num_rows,
            "hidden_state_bytes_at_most": most,
            "hidden_state_bytes_per_token": per_token,
        },
    )


if __name__ == "__main__":
    cli.run(main)
