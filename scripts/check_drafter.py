"""Check a drafter checkpoint before a server spends half an hour loading it: seconds, no GPU, no torch.

    python scripts/check_drafter.py --checkpoint DRAFTER --target TARGET --engine vllm --engine-version 0.32.0 \\
        --speculative-algorithm eagle3 --num-speculative-tokens 3 --json check.json

Prints every finding with what the engine would do and how to mend it. Exit code 0: nothing of level ERROR (or all of it
allowed), 1: at least one ERROR, 2: the arguments cannot be used. docs/checks.md lists all findings.
"""

import argparse
import json
import shutil
import sys
import textwrap
from pathlib import Path

from breakeven import cli, conventions, findings, installed, preflight
from breakeven.artefacts import OWN_SHA256, write_json


class ListChecks(argparse.Action):
    """Print docs/checks.md and exit."""

    def __call__(self, *_):
        print(findings.checks_table(), end="")
        sys.exit(0)


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the drafter's folder")
    parser.add_argument("--target", type=Path, required=True, help="the target's folder; its config.json is enough")
    parser.add_argument("--engine", choices=conventions.ENGINES, required=True, help="the engine that will serve")
    parser.add_argument("--engine-version", help="its version, e.g. 0.32.0; default: the one in --engine-python")
    parser.add_argument("--engine-python", type=Path, help="the engine's python or site-packages; read, never imported")
    parser.add_argument("--speculative-algorithm", help="SGLang's flag or vLLM's method, as it will be given")
    parser.add_argument("--num-speculative-tokens", type=int, help="K, drafted tokens per step")
    parser.add_argument("--max-model-len", type=int, help="served length; default: the target's positions")
    parser.add_argument("--longest-request", type=int, help="prompt and answer of the longest benchmark request")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="tensor parallel size of the server")
    parser.add_argument("--layers", type=_layers, help="layers trained on, e.g. 2,15,27: k is the input of layer k")
    parser.add_argument("--chat-template-kwargs", type=json.loads, help="as served, JSON")
    parser.add_argument("--flag", action="append", default=[], help="NAME or NAME=VALUE of the server's command line")
    parser.add_argument("--allow", action="append", default=[], metavar="ID", help="show this finding, do not count it")
    parser.add_argument("--fix", type=Path, metavar="OUT", help="write a corrected copy into a new folder")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the findings, also when there are errors")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 even if there are errors")
    parser.add_argument("--list", action=ListChecks, nargs=0, help="print the table of all findings and exit")
    args = parser.parse_args()
    try:
        return check(args)
    except cli.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def check(args: argparse.Namespace) -> int:
    """Examine, print, write; the exit code."""
    site = installed.site_packages(args.engine_python) if args.engine_python else None
    version = args.engine_version or (installed.version(site, args.engine) if site else None)
    if version is None:
        raise cli.UserError("give --engine-version, or --engine-python to read it from the installed engine")
    conventions.parse_version(version)
    case = preflight.Case(
        checkpoint=args.checkpoint, target=args.target, engine=args.engine, version=version, site=site,
        algorithm=args.speculative_algorithm, k=args.num_speculative_tokens, max_model_len=args.max_model_len,
        longest_request=args.longest_request, tensor_parallel=args.tensor_parallel_size, layers=args.layers,
        chat_template_kwargs=args.chat_template_kwargs, flags=dict(map(_flag, args.flag)),
    )  # fmt: skip
    found = preflight.examine(case, args.allow)
    errors = [finding for finding in found if finding.level == "ERROR" and not finding.allowed]
    if args.json:
        write_json(
            args.json,
            {
                "engine": args.engine,
                "version": version,
                "ok": not errors,
                "drafter": preflight.summary(case),
                "findings": [finding.as_json() for finding in found],
                OWN_SHA256: "",
            },
        )
    show(found, case)
    if args.fix:
        mended = preflight.fix(case, found, args.fix)
        print(f"\n{args.fix}: {', '.join(mended) or 'nothing'} mended; check it again")
    return 1 if errors and not args.exit_zero else 0


def show(found: list[findings.Finding], case: preflight.Case) -> None:
    """Print what the engine will make of the drafter, then the findings as blocks that fit the terminal."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    drafter = preflight.summary(case)
    if drafter:
        text = (
            "{kind}: inputs of layers {layers} of {target_layers}, {draft_vocab_size} of {vocab_size} tokens,"
            " head: {lm_head}, embeddings: {embeddings}"
        )
        print(textwrap.fill(text.format(**drafter), width))
    for f in found:
        level = f"{f.level}, allowed" if f.allowed else f.level
        print(f"{level}: {f.id}")
        for label, text in (("found", f.message), (f"{f.engine} {f.version}", f.effect), ("mend", f.mend)):
            first = f"  {label}: "
            print(textwrap.fill(text, width, initial_indent=first, subsequent_indent="    ", break_long_words=False))
    counts = [f"{sum(f.level == level and not f.allowed for f in found)} {level.lower()}" for level in findings.LEVELS]
    allowed = sum(f.allowed for f in found)
    print(f"{case.engine} {case.version}: {', '.join(counts)}" + (f", {allowed} allowed" if allowed else ""))


def _layers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _flag(text: str) -> tuple[str, object]:
    """`--speculative-eagle-topk=1` -> ("speculative_eagle_topk", 1); without a value True; JSON values are parsed."""
    name, separator, value = text.lstrip("-").partition("=")
    if not separator:
        return name.replace("-", "_"), True
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


if __name__ == "__main__":
    cli.run(main)
