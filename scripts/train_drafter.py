"""Train an EAGLE-3 drafter on hidden states of the target.

    train_drafter.py --target results/target --vocabulary results/drafters/own/vocabulary.safetensors \\
        --hidden-states results/hidden_states/shard-*.safetensors --settings '{"epochs": 3}' \\
        --initialise-from target --out results/drafters/own/checkpoint

Writes config.json, model.safetensors, training.parquet and manifest.json. An interrupted run continues from OUT.partial
and ends with the same weights as an uninterrupted one.
"""

import json
import shutil
import time
from pathlib import Path

import torch
from safetensors.numpy import load_file

from breakeven import artefacts, checkpoint, cli, tables, target, training
from breakeven.drafter import Drafter, DrafterConfig, initialise_from_target, target_tensor_names
from breakeven.hidden_states import Sequences
from breakeven.provenance import check_chain
from breakeven.vocabulary import target_ids


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument(
        "--vocabulary", required=True, type=Path, help="d2t and t2d, as build_vocabulary.py writes them"
    )
    parser.add_argument("--hidden-states", required=True, nargs="+", type=Path, help="hidden-state shards")
    parser.add_argument(
        "--settings", default={}, type=json.loads, help="training settings as JSON, see training.Settings"
    )
    parser.add_argument(
        "--initialise-from", default="target", help="target, scratch, or the folder of a drafter checkpoint"
    )
    parser.add_argument("--samples", type=int, help="train on the first N training samples; all if not given")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--save-every", type=float, default=60, help="seconds between states to resume from")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    check_chain(args.target, args.hidden_states)

    settings = training.Settings(**args.settings)
    torch.manual_seed(settings.seed)
    sequences = Sequences(args.hidden_states)
    config = target.text_config(args.target)
    maps = load_file(args.vocabulary)
    ids = torch.from_numpy(target_ids(maps["d2t"]))
    names = target_tensor_names(config)
    loaded = target.load_tensors(args.target, list(names.values()))
    tensors = {short: loaded[name] for short, name in names.items()}
    if len(tensors["lm_head.weight"]) != config["vocab_size"]:
        raise cli.UserError(
            f"{args.target}: the head has {len(tensors['lm_head.weight'])} rows, vocab_size is {config['vocab_size']}"
        )
    drafter = Drafter(DrafterConfig.from_target(config, len(ids), sequences.layers), tensors["embed_tokens.weight"])
    if args.initialise_from == "target":
        initialise_from_target(drafter, tensors, ids)
    elif args.initialise_from != "scratch":
        start, _ = checkpoint.load(Path(args.initialise_from), args.target, "cpu")
        if start.config != drafter.config:
            raise cli.UserError(f"{args.initialise_from}: this checkpoint has another shape than the drafter to train")
        drafter.load_state_dict(start.state_dict())
    head = training.TargetHead(
        tensors["norm.weight"].to(args.device),
        tensors["lm_head.weight"][ids].to(args.device),
        torch.from_numpy(maps["t2d"]).to(args.device),
        config["rms_norm_eps"],
    )

    inputs = {p.name: artefacts.manifest_path(p) for p in [args.vocabulary, *args.hidden_states]}
    run = training.Run(drafter.to(args.device), head, sequences, settings, args.device, args.samples)
    hashes = {name: artefacts.sha256(p) for name, p in inputs.items()} | {"samples": args.samples}
    key = training.fingerprint(settings, drafter, hashes)
    partial = args.out.with_name(args.out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    run.resume(partial / "state.pt", key)
    saved = time.monotonic()
    for _ in run.steps():
        if time.monotonic() - saved > args.save_every:
            run.save(partial / "state.pt", key)
            saved = time.monotonic()

    folder = partial / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    checkpoint.save(folder, drafter, maps["d2t"], maps["t2d"], config)
    rows = [dict.fromkeys(tables.TRAINING.names) | row for row in run.rows]
    artefacts.write_table(folder / "training.parquet", rows, tables.TRAINING)
    held_out = [row for row in run.rows if row["split"] == "held_out"][-1]
    artefacts.write_manifest(
        folder / "manifest.json",
        "drafter",
        parameters=drafter.config.to_dict()
        | {"initialise_from": args.initialise_from, "norm_before_residual": False, "norm_before_fc": False}
        | {"settings": vars(settings), "samples": args.samples},
        inputs=inputs,
        counts={
            "training_sequences": len(run.training),
            "training_response_tokens": len(sequences.tokens(run.training)),
            "optimizer_steps": run.step,
        },
        held_out={"loss": held_out["loss"], "accuracy": held_out["accuracy"]},
        versions={"torch": torch.__version__},
        files={p.name: artefacts.sha256(p) for p in sorted(folder.iterdir()) if p.name != "training.parquet"},
    )
    shutil.rmtree(args.out, ignore_errors=True)
    folder.rename(args.out)
    shutil.rmtree(partial)


if __name__ == "__main__":
    cli.run(main)
