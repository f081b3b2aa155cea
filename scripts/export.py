"""Write a finished run's results in the forms that others read.

export.py --format vllm-bench --results results --out exported      one JSON per pass, as `vllm bench serve` writes it
export.py --format aiperf --results results --out exported          one JSON per pass, as AIPerf writes it
export.py --format markdown --results results > summary.md          the verdict, to paste into an issue
"""

from pathlib import Path

from breakeven import artefacts, cli, export

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--format", choices=[*export.FORMATS, "markdown"], required=True, help="what to write")
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder of a finished run")
    parser.add_argument("--out", type=Path, help="folder for the JSON files; Markdown: the file, else standard output")
    parser.add_argument(
        "--reference", type=Path, default=ROOT / "resources/reference-case.json", help="the reference case's numbers"
    )
    args = parser.parse_args()
    if args.format == "markdown":
        text = export.markdown(args.results, args.reference)
        if args.out is None:
            print(text, end="")
            return
        with artefacts.atomic(args.out) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return
    if args.out is None:
        raise cli.UserError(f"--format {args.format} writes one file per pass; name their folder with --out")
    for name, (rows, manifest) in export.passes(args.results).items():
        path = args.out / f"{name}.{args.format}.json"
        artefacts.write_json(path, export.FORMATS[args.format](rows, manifest))
        cli.logger.info("%s", path)


if __name__ == "__main__":
    cli.run(main)
