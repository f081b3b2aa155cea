"""Cut a drafter's vocabulary down to its most frequent tokens: a cheaper step from the same drafter, without training.

    crop_vocabulary.py --target results/target --checkpoint drafters/published --size 8192 \\
        --responses results/responses/shard-*.parquet --out drafters/published-8192

The head is most of a small drafter's cost. A token that is cut is never drafted again, and where the target wants it the
draft ends; every other draft stays what it was or gets better, since only competitors are missing. The least that is
lost: keep the tokens that the target's own responses use most, which --responses or --hidden-states count.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from breakeven import artefacts, checkpoint, cli, hidden_states, target, vocabulary
from breakeven.drafter import Drafter, initialise_from_drafter


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--checkpoint", required=True, type=Path, help="the drafter's folder")
    hidden_states.add_options(parser)
    parser.add_argument("--size", required=True, type=int, help="tokens to keep")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write")
    args = parser.parse_args()
    if args.out.exists():
        raise cli.UserError(f"--out {args.out}: it exists; name a new folder")

    config = target.text_config(args.target)
    whole, ids = checkpoint.load(args.checkpoint, args.target, "cpu")
    sequences = hidden_states.open_sequences(args)
    counts = np.bincount(sequences.tokens(sequences.training()).numpy(), minlength=config["vocab_size"])
    if not counts.any():
        raise cli.UserError("--hidden-states, --responses: no training response to count tokens in")
    rows = vocabulary.keep(counts, ids.numpy(), args.size, target.special_token_ids(args.target))
    kept = np.sort(ids.numpy()[rows])
    shape = replace(whole.config, draft_vocab_size=args.size)
    cropped = Drafter(shape, whole.embed_tokens)
    taken = initialise_from_drafter(cropped, torch.from_numpy(kept), whole, ids)
    if taken != args.size:
        raise cli.UserError(f"{args.checkpoint}: only {taken} of {args.size} rows of the head were found by its d2t")
    share = vocabulary.coverage(counts, kept)

    inputs = {"drafter": args.checkpoint / "config.json", "target": args.target / "manifest.json"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        checkpoint.save(folder, cropped, *vocabulary.maps(kept, config["vocab_size"]), config)
        artefacts.write_manifest(
            folder / "manifest.json",
            "drafter",
            parameters=shape.to_dict() | {"initialise_from": "a checkpoint", "cropped_from": len(ids)},
            inputs=inputs | hidden_states.input_manifests(args),
            counts={"counted_tokens": int(counts.sum())},
            coverage={"training": share},
            files=artefacts.hashes(*sorted(folder.iterdir())),
        )
        folder.rename(args.out)
    cli.logger.info("%d of %d tokens kept, %.1f %% of the responses' tokens", args.size, len(ids), 100 * share)


if __name__ == "__main__":
    cli.run(main)
