"""Print what the last run found: the verdict of each arm, what to try next, and where the page is.

summary.py --results results
"""

import sys
from pathlib import Path

from rich.console import Console

from breakeven import cli, summary


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--results", type=Path, default=Path("results"), help="results folder of a finished run")
    args = parser.parse_args()
    # A log has no width of its own.
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)
    summary.show(args.results / "comparison", args.results / "report" / "index.html", console)


if __name__ == "__main__":
    cli.run(main)
