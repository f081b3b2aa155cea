"""Train an EAGLE-3 drafter on hidden states of the target.

    train_drafter.py --target results/target --vocabulary results/drafters/own/vocabulary.safetensors \\
        --hidden-states results/hidden_states/shard-*.safetensors --settings '{"epochs": 3}' \\
        --initialise-from target --out results/drafters/own/checkpoint

With --responses in place of --hidden-states nothing is stored: the target runs inside the step. --ranks N trains on N
GPUs, which share the batches of each optimizer step (batches_per_step in --settings): the result is that of one GPU,
up to the order of sums; with --sharded each keeps a part of the weights and the optimizer's state. Writes
config.json, model.safetensors, training.parquet, speed.json (tokens per second, MFU, peak memory) and manifest.json.
An interrupted run continues from OUT.partial, with any N, sharded or not, and ends with the same weights as an
uninterrupted one.
"""

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.numpy import load_file

from breakeven import artefacts, checkpoint, cli, hidden_states, ranks, tables, target, training
from breakeven.conventions import export_ids, family, layers_option
from breakeven.drafter import (
    Drafter,
    DrafterConfig,
    initialise_from_drafter,
    initialise_from_target,
    target_tensor_names,
)
from breakeven.provenance import check_chain
from breakeven.vocabulary import target_ids

STARTS = ("target", "scratch")  # besides the folder of a checkpoint
VOLATILE = ("speed.json",)  # what the manifest does not vouch for: speed differs from run to run


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument(
        "--vocabulary", required=True, type=Path, help="d2t and t2d, as build_vocabulary.py writes them"
    )
    hidden_states.add_options(parser)
    parser.add_argument(
        "--layers",
        default="default",
        help="with --responses: the target's layers, as extract_hidden_states.py takes them",
    )
    parser.add_argument(
        "--batch-tokens", default=8192, type=int, help="with --responses: tokens in one forward pass of the target"
    )
    parser.add_argument(
        "--settings", default={}, type=json.loads, help="training settings as JSON, see training.Settings"
    )
    parser.add_argument(
        "--initialise-from", default="target", help="target, scratch, or the folder of a drafter checkpoint"
    )
    parser.add_argument("--samples", type=int, help="train on the first N training samples; all if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together, a GPU each")
    parser.add_argument(
        "--sharded", action="store_true", help="each rank keeps its part only of weights and optimizer state (FSDP2)"
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, shared by ranks; 0 leaves torch's choice")
    parser.add_argument(
        "--peak-flops", type=float, help="bf16 FLOP/s of the device, for MFU where breakeven/speed.py has none"
    )
    parser.add_argument("--save-every", type=float, default=60, help="seconds between states to resume from")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write")
    args = parser.parse_args()
    ranks.launch(args.ranks)
    with ranks.joined(args.device, args.sharded) as (own, args.device):
        train(args, own)


def train(args: argparse.Namespace, own: ranks.Ranks) -> None:
    if args.threads:
        torch.set_num_threads(max(1, args.threads // own.size))
    check_chain(args.target, args.hidden_states or args.responses)

    settings = training.Settings(**args.settings)
    torch.manual_seed(settings.seed)
    config = target.text_config(args.target)
    layers = layers_option(args.layers, config["num_hidden_layers"])
    sequences = hidden_states.open_sequences(args, layers, args.device, args.batch_tokens)
    export_ids(sequences.layers, family(config), config["num_hidden_layers"])  # else it could not be saved
    artefacts.verify(args.vocabulary)
    maps = load_file(args.vocabulary)
    ids = torch.from_numpy(target_ids(maps["d2t"]))
    names = target_tensor_names(config)
    if args.initialise_from != "target":
        names = {short: names[short] for short in ("norm.weight", "lm_head.weight", "embed_tokens.weight")}
    loaded = target.load_tensors(args.target, list(names.values()))
    tensors = {short: loaded[name] for short, name in names.items()}
    if len(tensors["lm_head.weight"]) != config["vocab_size"]:
        raise cli.UserError(
            f"{args.target}: the head has {len(tensors['lm_head.weight'])} rows, vocab_size is {config['vocab_size']}"
        )
    if args.initialise_from in STARTS:
        shape = DrafterConfig.from_target(config, len(ids), sequences.layers)
        drafter = Drafter(shape, tensors["embed_tokens.weight"])
        if args.initialise_from == "target":
            initialise_from_target(drafter, tensors, ids)
    else:
        # The shape is the other drafter's: its attention, RoPE and norm flags are what its weights were trained with.
        start, start_ids = checkpoint.load(Path(args.initialise_from), args.target, "cpu")
        if start.config.layers != sequences.layers:
            raise cli.UserError(
                f"{args.initialise_from}: trained on layers {start.config.layers}, the hidden states hold"
                f" {sequences.layers}; set hidden_states.layers to the drafter's"
            )
        drafter = Drafter(replace(start.config, draft_vocab_size=len(ids)), tensors["embed_tokens.weight"])
        with torch.no_grad():
            drafter.lm_head.weight.copy_(tensors["lm_head.weight"][ids])
        kept = initialise_from_drafter(drafter, ids, start, start_ids)
        cli.logger.info("head: %d of %d rows from %s, the others from the target", kept, len(ids), args.initialise_from)
    head = training.TargetHead(
        tensors["norm.weight"].to(args.device),
        tensors["lm_head.weight"][ids].to(
            args.device,
            None if target.computes_bfloat16(args.device) and settings.head_dtype == "bfloat16" else torch.float32,
        ),
        torch.from_numpy(maps["t2d"]).to(args.device),
        config["rms_norm_eps"],
    )

    inputs = {args.vocabulary.name: artefacts.manifest_path(args.vocabulary)} | hidden_states.input_manifests(args)
    if args.initialise_from not in STARTS:
        folder = Path(args.initialise_from)
        started_from = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
        inputs |= {f"initialise_from/{path.name}": path for path in started_from}
    drafter = drafter.to(args.device)
    run = training.Run(drafter, head, sequences, settings, args.device, args.samples, args.peak_flops, own)
    hashes = {name: artefacts.sha256(p) for name, p in inputs.items()}
    options = {"samples": args.samples, "initialise_from": args.initialise_from}
    key = training.fingerprint(settings, drafter, hashes | options)
    partial = args.out.with_name(args.out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    run.resume(partial / "state.pt", key)
    saved = time.monotonic()
    for _ in run.steps():
        if own.all_write(time.monotonic() - saved > args.save_every):
            run.save(partial / "state.pt", key)
            saved = time.monotonic()
    weights = run.weights()
    if not own.writer:
        return

    folder = partial / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    checkpoint.save(folder, drafter, maps["d2t"], maps["t2d"], config, weights=weights)
    rows = [dict.fromkeys(tables.TRAINING.names) | row for row in run.rows]
    artefacts.write_table(folder / "training.parquet", rows, tables.TRAINING)
    artefacts.write_json(folder / "speed.json", run.meter.report())
    cli.logger.info("speed: %s", run.meter)
    held_out = [row for row in run.rows if row["split"] == "held_out"][-1]
    artefacts.write_manifest(
        folder / "manifest.json",
        "drafter",
        parameters=drafter.config.to_dict()
        | {"initialise_from": args.initialise_from}
        | {"settings": vars(settings), "samples": args.samples},
        inputs=inputs,
        counts={
            "training_sequences": len(run.training),
            "training_response_tokens": len(sequences.tokens(run.training)),
            "longest_response": max(map(sequences.response_length, run.training)),
            "optimizer_steps": run.step,
        },
        held_out={"loss": held_out["loss"], "accuracy": held_out["accuracy"]},
        versions={"torch": torch.__version__},
        files=artefacts.hashes(*(p for p in sorted(folder.iterdir()) if p.name not in VOLATILE)),
    )
    shutil.rmtree(args.out, ignore_errors=True)
    folder.rename(args.out)
    shutil.rmtree(partial)


if __name__ == "__main__":
    cli.run(main)
