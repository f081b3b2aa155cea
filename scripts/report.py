"""Write the comparison report: one self-contained page, and beside it its figures (SVG) and tables (CSV).

    report.py --comparison results/comparison --manifests results/target/manifest.json ... \\
        --stepcost results/stepcost/vllm.parquet --training own=results/drafters/own/checkpoint/training.parquet \\
        --out results/report/index.html --figures results/report
"""

from pathlib import Path

from breakeven import cli, reportpage
from breakeven.options import pairs

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--comparison", type=Path, required=True, help="folder that compare.py wrote")
    parser.add_argument("--manifests", type=Path, nargs="*", default=[], help="manifests to show as provenance")
    parser.add_argument(
        "--locks", type=Path, nargs="*", default=[], help="lock files of the environments, to show their hashes"
    )
    parser.add_argument("--stepcost", type=Path, nargs="*", default=[], help="step costs, results/stepcost/*.parquet")
    parser.add_argument("--training", nargs="*", default=[], metavar="NAME=FILE", help="training.parquet of a drafter")
    parser.add_argument("--offline", nargs="*", default=[], metavar="NAME=FILE", help="held-out walk of a drafter")
    parser.add_argument("--data-curve", type=Path, help="curve.parquet; curve.svg beside it is shown as well")
    parser.add_argument("--out", type=Path, required=True, help="the page, index.html")
    parser.add_argument("--figures", type=Path, required=True, help="folder for figures and tables")
    parser.add_argument(
        "--template",
        type=Path,
        default=ROOT / "report/comparison.html.j2",
        help="template of the page; page.css and page.js lie beside it",
    )
    parser.add_argument("--style", type=Path, default=ROOT / "report/style.mplstyle", help="style of the figures")
    parser.add_argument(
        "--reference", type=Path, default=ROOT / "resources/reference-case.json", help="the reference case's numbers"
    )
    args = parser.parse_args()
    page = reportpage.build(
        args.comparison, args.manifests, args.out, args.figures, args.template, args.style, args.reference,
        args.stepcost, pairs("--training", args.training), args.data_curve,
        pairs("--offline", args.offline), args.locks,
    )  # fmt: skip
    cli.logger.info("%s: %s", args.out, reportpage.headline(page.rows)[0])


if __name__ == "__main__":
    cli.run(main)
