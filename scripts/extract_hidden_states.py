"""Run the target over prompts and responses of one shard and keep the hidden states a drafter is trained on.

    extract_hidden_states.py --target results/target --responses results/responses/shard-000000.parquet \\
        --layers default --out results/hidden_states/shard-000000.safetensors

`--layers` are physical: k is the input of decoder layer k. The format is described in breakeven/hidden_states.py.
With an engine (docs/engines.md) it runs in that engine's environment.
"""

import json
from pathlib import Path

import torch

from breakeven import artefacts, cli, engines, hidden_states, selection, shard_file, tables, target
from breakeven.conventions import layers_option


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--responses", required=True, type=Path, help="one shard of responses")
    parser.add_argument(
        "--layers", default="default", help="'default' (inputs of layers 2, N//2, N-3) or ids like 2,15,27"
    )
    parser.add_argument(
        "--codec",
        choices=hidden_states.CODECS,
        default="bfloat16",
        help="how they are stored; int8 takes half the space",
    )
    parser.add_argument(
        "--engine", choices=["transformers", "vllm"], default="transformers", help="what runs the target"
    )
    parser.add_argument("--settings", default={}, type=json.loads, help="the engine's arguments as JSON")
    parser.add_argument("--environment", default={}, type=json.loads, help="its environment variables as JSON")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in one forward pass, padding included")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument(
        "--canary", type=float, default=0.95, help="least share of greedy response tokens to be found again"
    )
    parser.add_argument("--out", required=True, type=Path, help="safetensors file to write")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)

    config = target.text_config(args.target)
    layers = layers_option(args.layers, config["num_hidden_layers"])
    responses = artefacts.read_table(args.responses, tables.RESPONSES)
    prompt_ids = responses["prompt_token_ids"].to_pylist()
    response_ids = responses["response_token_ids"].to_pylist()
    hidden_states.refuse_one_sided(prompt_ids, response_ids)
    total = sum(map(len, prompt_ids)) + sum(map(len, response_ids))
    needed = total * selection.bytes_per_token(config["hidden_size"], len(layers), args.codec)
    selection.check_space(args.out.parent, needed, f"the hidden states of {total} tokens")
    about = hidden_states.about_sequences(responses)

    versions = {"torch": torch.__version__}
    with artefacts.atomic(args.out) as temporary:
        if args.engine == "transformers":
            capture = hidden_states.Capture(target.load_model(args.target, args.device), layers)
            tensors = shard_file.extract_here(
                capture, prompt_ids, response_ids, temporary, args.codec, args.batch_tokens, args.device
            )
        else:
            artefacts.verify_folder(args.target)
            engine = engines.engine(args.engine)
            engines.prepare(engine, args.device, args.environment)
            versions = engines.versions(args.engine)
            settings = args.settings | {"max_num_batched_tokens": args.batch_tokens}
            tensors = shard_file.extract(
                engine, args.target, layers, prompt_ids, response_ids, temporary, args.codec, settings
            )
            norm, head = target.load_norm_and_head(args.target)
            shard_file.fill_argmax(tensors, norm, head, config["rms_norm_eps"], args.device)
        for name, values in about.items():
            tensors[name].copy_(values)
        rows = tensors["temperature"] == 0
        greedy = bool(rows.any())
        share = hidden_states.canary(tensors, rows if greedy else None)
        kind = "greedy response tokens" if greedy else "response tokens"
        cli.logger.info("canary: %.1f %% of the %s are the target's greedy choice", 100 * share, kind)
        if greedy and share < args.canary:
            raise cli.UserError(
                f"{args.responses}: only {share:.1%} of the greedy response tokens are this target's greedy choice"
                f" ({args.canary:.0%} are needed); the responses come from another target, template or precision"
            )
        moved = hidden_states.rounding(tensors)
        if moved is not None:
            said = ", ".join(f"{100 * share:.1f}" for share in moved)
            cli.logger.info("int8 moves the hidden states by %s %% of their norm, outliers apart", said)
            if max(moved) > hidden_states.ROUNDING_KNOWN:
                cli.logger.warning(
                    "int8 moves them by more than the %.0f %% that are known to cost no acceptance, since a few channels of this"
                    " target stand out far; set hidden_states.codec: bfloat16, or compare drafters of both",
                    100 * hidden_states.ROUNDING_KNOWN,
                )
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "hidden_states",
        parameters={
            "layers": layers,
            "meaning": "hidden[:, i] is the input of decoder layer layers[i]; last is before the final norm",
            "codec": args.codec,
            "hidden_size": config["hidden_size"],
            "engine": args.engine,
        },
        inputs={"responses": args.responses, "target": args.target / "manifest.json"},
        counts={
            "sequences": len(prompt_ids),
            "greedy_sequences": int(rows.sum()),
            "tokens": total,
            "response_tokens": int(tensors["loss_mask"].sum()),
            "bytes": needed,
        },
        canary={"greedy_share": round(share, 4), "required": args.canary if greedy else None}
        | ({"int8_moves": [round(share, 4) for share in moved]} if moved else {}),
        versions=versions,
        files=artefacts.hashes(args.out),
    )


if __name__ == "__main__":
    cli.run(main)
