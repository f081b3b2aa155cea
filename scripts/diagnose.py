"""Diagnose finished runs: break-even, what is plausible, what to check first. Needs nothing but their numbers.

    diagnose.py --baseline 61 --speculative 59 --accept-length 2.5
    diagnose.py --baseline 82.5 --speculative 54.6 --engine vllm --accept-rate 15% --draft-tokens 3 --samples 10000
    diagnose.py --baseline 90 --speculative 56.7 --engine sglang --accept-length 2.0-2.5 --draft-tokens 16
    diagnose.py --baseline 30 --speculative 42 --metrics before.txt after.txt --log server.log
    diagnose.py --case resources/reference-case.json

Engines mean different things by "acceptance rate", and SGLang changed it more than once: with --engine and
--engine-version it is read right. --checkpoint with --target adds the checks of check_drafter.py.
"""

import argparse
import shutil
import textwrap
from pathlib import Path

from breakeven import artefacts, cli, comparison, diagnose, preflight


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--case", type=Path, help="several runs, a file like resources/reference-case.json")
    parser.add_argument("--baseline", type=float, help="tokens per second without speculation")
    parser.add_argument("--speculative", type=float, help="tokens per second with speculation")
    parser.add_argument("--accept-length", type=_lengths, help="tokens per step, bonus counted: 2.3, or 2.0-2.5")
    parser.add_argument("--accept-rate", type=_rate, help="the rate that the engine showed: 0.15 or 15%%")
    parser.add_argument("--rate-source", choices=("log", "request"), default="log", help="SGLang: where it was shown")
    parser.add_argument("--engine", choices=tuple(diagnose.ENGINES), help="the engine that served")
    parser.add_argument("--engine-version", help="its version, e.g. 0.5.9")
    parser.add_argument(
        "--draft-tokens", type=int, help="vLLM: num_speculative_tokens; SGLang: speculative_num_draft_tokens"
    )
    parser.add_argument("--num-steps", type=int, help="SGLang: speculative_num_steps")
    parser.add_argument("--metrics", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="texts of /metrics")
    parser.add_argument("--log", type=Path, help="the speculating server's log")
    parser.add_argument("--samples", type=int, help="samples that the drafter was trained on")
    parser.add_argument("--target-name", help="e.g. Kimi-K2.5, to compare with published drafters")
    parser.add_argument("--expected-speedup", type=float, help="a published speed-up, to split the gap to it")
    parser.add_argument("--expected-accept-length", type=float, help="the acceptance length published with it")
    parser.add_argument("--checkpoint", type=Path, help="the drafter's folder, to check it")
    parser.add_argument("--target", type=Path, help="the target's folder; its config.json is enough")
    args = parser.parse_args()
    data = artefacts.read_json(comparison.EXPECTATIONS)
    if args.case:
        if args.baseline or args.speculative:
            raise cli.UserError("--case holds the speeds of its runs; leave --baseline and --speculative out")
        runs, case = diagnose.read_case(args.case)
        for run in runs:
            show(f"{diagnose.ENGINES.get(run.engine, run.engine)}, {run.name}")
            for section in diagnose.diagnose(run, data, case.get("target")):
                show_section(section)
        show_section(diagnose.Section("All runs together", diagnose.together(runs, case, data)))
        return
    if args.baseline is None or args.speculative is None:
        raise cli.UserError("give --baseline and --speculative in tokens per second, or --case")
    run = read_run(args)
    for section in diagnose.diagnose(run, data, args.target_name):
        show_section(section)
    if args.expected_speedup or args.expected_accept_length:
        if not (args.expected_speedup and args.expected_accept_length):
            raise cli.UserError("give --expected-speedup and --expected-accept-length together")
        show_section(diagnose.Section("Gap", diagnose.gap(run, args.expected_speedup, args.expected_accept_length)))
    if args.checkpoint or args.target:
        show_section(diagnose.Section("Checkpoint", check(args, run)))


def read_run(args: argparse.Namespace) -> diagnose.Run:
    """The run from options, metrics and log; an option overrides what a file says."""
    facts = {"engine": None, "version": None, "draft_tokens": None, "num_steps": None, "lengths": None}
    if args.log:
        settings = diagnose.read_log(args.log)
        facts |= {
            "settings": settings,
            "engine": settings.engine,
            "version": settings.version,
            "draft_tokens": settings.draft_tokens,
            "num_steps": settings.num_steps,
            "counts": settings.counts,
        }
        if settings.length is not None:
            facts["lengths"] = (settings.length, settings.length)
    if args.metrics:
        found = diagnose.read_metrics(*args.metrics)
        if facts["engine"] not in (None, found["engine"]):
            raise cli.UserError(
                f"{args.log} is a log of {facts['engine']}, but {args.metrics[1]} is of {found['engine']}"
            )
        facts |= found
    options = {
        "engine": args.engine,
        "version": args.engine_version,
        "draft_tokens": args.draft_tokens,
        "num_steps": args.num_steps,
        "lengths": args.accept_length,
        "rate": args.accept_rate,
    }
    facts |= {key: value for key, value in options.items() if value is not None}
    return diagnose.Run(args.baseline, args.speculative, samples=args.samples, rate_source=args.rate_source, **facts)


def check(args: argparse.Namespace, run: diagnose.Run) -> list[str]:
    """The findings of check_drafter.py, one line each."""
    if not (args.checkpoint and args.target):
        raise cli.UserError("give --checkpoint and --target together")
    if not (run.engine and run.version):
        raise cli.UserError("to check the drafter, give --engine and --engine-version (or a --log that says them)")
    settings = run.settings
    flags = {}
    if run.engine == "sglang":
        flags = {
            "speculative_num_steps": run.num_steps,
            "speculative_eagle_topk": settings.topk if settings else None,
            "speculative_num_draft_tokens": run.draft_tokens,
        }
        if None in flags.values():
            flags = {}  # what was not told here may have been set there
    case = preflight.Case(
        checkpoint=args.checkpoint, target=args.target, engine=run.engine, version=run.version, k=run.depth,
        algorithm=settings.algorithm if settings else None,
        flags=flags,
    )  # fmt: skip
    found = preflight.examine(case)
    return [f"{f.level} {f.id}: {f.message}; {f.effect}; mend: {f.mend}" for f in found] or ["no finding"]


def show(title: str) -> None:
    print(f"\n== {title}")


def show_section(section: diagnose.Section) -> None:
    """Print a section as lines that fit the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    print(f"{section.title}:")
    for line in section.lines:
        print(textwrap.fill(line, width, initial_indent="  - ", subsequent_indent="    ", break_long_words=False))


def _lengths(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    return float(low), float(high or low)


def _rate(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


if __name__ == "__main__":
    cli.run(main)
