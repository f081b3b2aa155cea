"""A copy of a target or drafter with more attention heads, all of them zero: the same function, and tensor parallelism divides it.

    padded_heads.py results/target padded/target --key-value-heads 4
    padded_heads.py drafters/smollm2-135m padded/drafter --key-value-heads 4

SmolLM2-135M has nine query heads on three key-value heads, which two GPUs cannot share. A query group of zeros per added
key-value head contributes nothing: its columns of the output projection are zero. A target gets a manifest by
`fetch_target.py --source '{"source": "path", "path": "padded/target"}'`.
"""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from breakeven import artefacts, cli


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("source", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--key-value-heads", type=int, required=True, help="how many there are to be")
    args = parser.parse_args()
    config = artefacts.read_json(args.source / "config.json")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if args.key_value_heads < groups:
        raise cli.UserError(f"--key-value-heads {args.key_value_heads}: {args.source} has {groups} already")
    size = config.get("head_dim") or config["hidden_size"] // heads
    queries = args.key_value_heads * (heads // groups)
    # Of each projection of an attention block: which dimension the heads lie in, and how many there will be.
    wanted = {"q_proj": (0, queries), "k_proj": (0, args.key_value_heads), "v_proj": (0, args.key_value_heads)}
    wanted["o_proj"] = (1, queries)
    tensors = {}
    with safe_open(args.source / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - a file, not a dictionary
            tensors[name] = tensor = file.get_tensor(name)
            if (projection := name.split(".")[-2:-1]) and projection[0] in wanted:
                dimension, count = wanted[projection[0]]
                shape = list(tensor.shape)
                shape[dimension] = count * size
                tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
                tensors[name][: tensor.shape[0], : tensor.shape[1]] = tensor
    ignored = shutil.ignore_patterns("manifest.json", "config.json", "*.safetensors")
    shutil.copytree(args.source, args.out, ignore=ignored, dirs_exist_ok=True)
    with artefacts.atomic(args.out / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata)
    config |= {"num_attention_heads": queries, "num_key_value_heads": args.key_value_heads, "head_dim": size}
    artefacts.write_json(args.out / "config.json", config)  # last: without it, nothing takes the folder for a model


if __name__ == "__main__":
    cli.run(main)
