"""Compare benchmarked arms with their baselines: paired speed-ups with intervals, acceptance, verdicts, refusals.

    compare.py --benchmarks results/benchmarks --arms vllm-none vllm-own-k3 \\
        --offline vllm-own-k3=results/benchmarks/vllm-own-k3/offline.parquet \\
        --out results/comparison/summary.parquet --acceptance results/comparison/acceptance.parquet \\
        --requests results/comparison/requests.parquet \\
        --what-if vllm-own-k3=results/benchmarks/vllm-own-k3/what-if.parquet \\
        --stepcost vllm=results/stepcost/vllm.parquet --drafter own=results/drafters/own/checkpoint/manifest.json

The last three are optional: they let the verdict name a fault, predict the speed-up, and tell what the drafter's number
of training samples lets expect.
"""

from pathlib import Path

from breakeven import cli, comparison
from breakeven.options import pairs


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--benchmarks", type=Path, required=True, help="folder with one folder of passes per arm")
    parser.add_argument("--arms", nargs="+", required=True, metavar="ARM", help="arms to compare, baselines among them")
    parser.add_argument(
        "--offline", nargs="*", default=[], metavar="NAME=FILE", help="offline acceptance of an arm or a drafter"
    )
    parser.add_argument(
        "--what-if", nargs="*", default=[], metavar="NAME=FILE", help="walks of an arm under each fault hypothesis"
    )
    parser.add_argument(
        "--stepcost", nargs="*", default=[], metavar="ENGINE=FILE", help="step cost of an engine, measured apart"
    )
    parser.add_argument(
        "--drafter",
        nargs="*",
        default=[],
        metavar="NAME=FILE",
        help="manifest.json of a drafter that this project trained",
    )
    parser.add_argument(
        "--expectations", type=Path, default=comparison.EXPECTATIONS, help="what comparable drafters reached"
    )
    parser.add_argument("--out", type=Path, required=True, help="summary.parquet: one row per arm")
    parser.add_argument(
        "--acceptance", type=Path, required=True, help="acceptance.parquet: one row per arm and position"
    )
    parser.add_argument("--requests", type=Path, required=True, help="requests.parquet: one row per request")
    parser.add_argument(
        "--passes", nargs="*", default=[], metavar="ARM=N", help="passes of an arm to read, 1 to N; else all there are"
    )
    args = parser.parse_args()
    try:
        passes = {name: int(number) for name, number in (item.split("=") for item in args.passes)}
    except ValueError:
        raise cli.UserError(f"--passes {' '.join(args.passes)}: write ARM=N for each") from None
    result = comparison.run(
        args.benchmarks, args.arms, pairs("--offline", args.offline), args.out, args.acceptance, args.requests, passes,
        pairs("--what-if", args.what_if), pairs("--stepcost", args.stepcost), pairs("--drafter", args.drafter),
        args.expectations,
    )  # fmt: skip
    for row in result.summary:
        measured = f"{row['tokens_per_second']:.1f} tok/s" if row["tokens_per_second"] else "no decode rate"
        interval = f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" if row["speedup_low"] else ""
        speedup = f", {row['speedup']:.2f}x{interval}" if row["speedup"] and row["verdict"] != "baseline" else ""
        cli.logger.info("%s: %s, %s%s%s", row["arm"], row["verdict"], measured, speedup,
                        f" ({row['reason']})" if row["reason"] else "")  # fmt: skip
        if row["cause"]:
            cli.logger.info("%s: cause: %s%s", row["arm"], row["cause"], f" ({row['fault']})" if row["fault"] else "")
        for sentence in result.details[row["arm"]].get("evidence", []):
            cli.logger.info("%s: %s", row["arm"], sentence)
        for warning in result.details[row["arm"]]["warnings"]:
            cli.logger.warning("%s: warning: %s", row["arm"], warning)


if __name__ == "__main__":
    cli.run(main)
