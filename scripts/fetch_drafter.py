"""Fetch a published drafter at a pinned revision: its config.json and its weights as safetensors, with their sha256.

    fetch_drafter.py --source '{"repo": "org/name", "revision": "0123abc"}' \\
        --out results/published/name/checkpoint --manifest results/published/name/manifest.json

`repo` may be a local folder in the hub's layout. A checkpoint of pickled tensors only (*.bin) is written as safetensors.
"""

import json
from pathlib import Path

from breakeven import cli, fetching


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--source", required=True, type=json.loads, help="repo and revision, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="checkpoint folder to write")
    parser.add_argument("--manifest", required=True, type=Path, help="manifest to write; beside the folder, not in it")
    args = parser.parse_args()
    manifest = fetching.fetch_drafter(args.source["repo"], args.source["revision"], args.out, args.manifest)
    cli.logger.info("drafter: %d files, %.0f MB", manifest["counts"]["files"], manifest["counts"]["bytes"] / 1e6)


if __name__ == "__main__":
    cli.run(main)
