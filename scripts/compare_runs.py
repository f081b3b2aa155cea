"""Two or more finished experiments on one page, each arm beside its own baseline; nothing is compared between runs.

    compare_runs.py first/results second/results --out results/report/runs.html

A run is a results folder (or the project folder that holds it). Its arms are named after the folder, or as NAME=FOLDER.
"""

from pathlib import Path

from breakeven import cli, reportpage

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="results folder of a finished run, or NAME=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("results/report/runs.html"), help="the page")
    parser.add_argument(
        "--template", type=Path, default=ROOT / "report/comparison.html.j2", help="template of the page"
    )
    parser.add_argument("--style", type=Path, default=ROOT / "report/style.mplstyle", help="style of the figures")
    parser.add_argument(
        "--reference", type=Path, default=ROOT / "resources/reference-case.json", help="the reference case's numbers"
    )
    args = parser.parse_args()
    runs = reportpage.named_runs(args.runs)
    page = reportpage.joined({name: reportpage.load_run(folder, args.reference) for name, folder in runs.items()})
    reportpage.write(page, args.out, args.out.with_suffix(""), args.template, args.style)
    cli.logger.info("%s: %s", args.out, reportpage.headline(page.rows)[0])


if __name__ == "__main__":
    cli.run(main)
