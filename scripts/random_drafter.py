"""Write a random drafter of the right shape, made from the target's config alone: it accepts nothing and costs the same.

    random_drafter.py --target results/target --vocabulary-size 8192 --out results/stepcost/drafter

step_cost.py serves it to learn what a step with speculation costs, before a single sample exists.
"""

from pathlib import Path

import numpy as np
import torch

from breakeven import artefacts, checkpoint, cli, target, vocabulary
from breakeven.conventions import default_layers
from breakeven.drafter import Drafter, DrafterConfig


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--vocabulary-size", type=int, help="tokens that the drafter can propose; all if not given")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write")
    args = parser.parse_args()

    config = target.text_config(args.target)
    size = config["vocab_size"]
    draft_size = size if args.vocabulary_size is None else args.vocabulary_size
    if not 0 < draft_size <= size:
        raise cli.UserError(f"--vocabulary-size: {draft_size} is not between 1 and the target's vocabulary of {size}")
    torch.manual_seed(args.seed)
    shape = DrafterConfig.from_target(config, draft_size, default_layers(config["num_hidden_layers"]))
    # The engines share the target's embeddings, so none are needed here.
    drafter = Drafter(shape, torch.empty(size, shape.hidden_size, device="meta"))
    ids = np.arange(draft_size, dtype=np.int64) * size // draft_size
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint.save(args.out, drafter, *vocabulary.maps(ids, size), config)
    artefacts.write_manifest(
        args.out / "manifest.json",
        "drafter",
        parameters=shape.to_dict() | {"initialise_from": "random", "seed": args.seed},
        inputs={"target": args.target / "manifest.json"},
        versions={"torch": torch.__version__},
        files={name: artefacts.sha256(args.out / name) for name in ("config.json", "model.safetensors")},
    )


if __name__ == "__main__":
    cli.run(main)
