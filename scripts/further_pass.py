"""Which arms need another pass: those whose verdict is open, and the baselines they are compared with.

    further_pass.py --benchmarks results/benchmarks --arms vllm-plain vllm-own-k3 --number 4 \\
        --out results/benchmarks/vllm-quick-pass-4.json

Reads passes 1 ... number - 1 of the arms, which share engine and protocol. An interim look uses a stricter rule than the
final verdict (stats.enough), so stopping at the first decision keeps its error rate.
"""

from pathlib import Path

from breakeven import cli, comparison
from breakeven.arms import read_arm
from breakeven.artefacts import OWN_SHA256, write_json


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--benchmarks", type=Path, required=True, help="folder with one folder of passes per arm")
    parser.add_argument("--arms", nargs="+", required=True, metavar="ARM", help="arms of one engine and protocol")
    parser.add_argument("--number", type=int, required=True, help="the pass in question")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write: the arms")
    args = parser.parse_args()
    arms = [read_arm(args.benchmarks, name, args.number - 1) for name in args.arms]
    needed = comparison.undecided(arms)
    write_json(args.out, {"arms": needed, OWN_SHA256: ""})
    cli.logger.info("pass %d is for: %s", args.number, ", ".join(needed) or "none, all are decided")


if __name__ == "__main__":
    cli.run(main)
