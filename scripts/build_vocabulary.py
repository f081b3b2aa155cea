"""Choose the draft vocabulary from the training responses and write the maps d2t and t2d.

    build_vocabulary.py --target results/target --hidden-states results/hidden_states/shard-*.safetensors \\
        --size 8192 --out results/drafters/own/vocabulary.safetensors
"""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from breakeven import artefacts, cli, hidden_states, target, vocabulary
from breakeven.provenance import check_chain


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    hidden_states.add_options(parser)
    parser.add_argument("--size", required=True, type=int, help="tokens in the draft vocabulary")
    parser.add_argument("--samples", type=int, help="count the first N training samples; all if not given")
    parser.add_argument("--out", required=True, type=Path, help="safetensors file to write")
    args = parser.parse_args()
    check_chain(args.target, args.hidden_states or args.responses)

    size = target.text_config(args.target)["vocab_size"]
    sequences = hidden_states.open_sequences(args)
    chosen = sequences.training(args.samples)
    training = np.bincount(sequences.tokens(chosen).numpy(), minlength=size)
    judged = [i for i, flag in enumerate(sequences.held_out) if flag]
    held_out = np.bincount(sequences.tokens(judged).numpy(), minlength=size)
    always = target.special_token_ids(args.target)
    ids = vocabulary.choose(training, args.size, always)
    d2t, t2d = vocabulary.maps(ids, size)
    with artefacts.atomic(args.out) as temporary:
        save_file({"d2t": d2t, "t2d": t2d}, temporary)
    shares = {"training": vocabulary.coverage(training, ids), "held_out": vocabulary.coverage(held_out, ids)}
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "vocabulary",
        parameters={"size": args.size, "samples": args.samples, "always": always},
        inputs=hidden_states.input_manifests(args),
        counts={
            "training_sequences": len(chosen),
            "training_tokens": int(training.sum()),
            "distinct_training_tokens": int((training > 0).sum()),
        },
        coverage=shares,
        files=artefacts.hashes(args.out),
    )
    cli.logger.info("draft vocabulary: %d of %d ids, coverage %s", args.size, size, shares)


if __name__ == "__main__":
    cli.run(main)
