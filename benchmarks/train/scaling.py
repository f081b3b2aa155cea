"""Training speed on one rank and on N, on random sequences, in one process tree: tokens per second and their ratio.

    scaling.py --ranks 2 --device cuda
    scaling.py --ranks 2 --device cuda --shape llama-8b --steps 30
    scaling.py --ranks 2 --device cuda --shape llama-8b --steps 30 --sharded

Both train the same batches, `--batches-per-step` (N by default) to an optimizer step; the losses of both are compared too.
N ranks go first, so that all compile at the same time, then rank 0 alone, `--rounds` times in turn. Prints one line of JSON;
what was measured before `--limit` is printed also where the rest was not.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import torch
from throughput import SHAPES, RandomSequences, made

from breakeven import artefacts, cli, ranks, training


def main() -> int:
    parser = cli.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="N, a GPU for each")
    parser.add_argument(
        "--sharded", action="store_true", help="N ranks keep a part each of weights and optimizer state"
    )
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="target that the drafter is made for")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in a batch")
    parser.add_argument("--batches-per-step", type=int, help="batches of one optimizer step; N if not given")
    parser.add_argument("--ttt-steps", type=int, default=5, help="training-time-test steps")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    parser.add_argument("--rounds", type=int, default=2, help="how often both are measured")
    parser.add_argument("--peak-flops", type=float, help="FLOP/s of the device where breakeven/speed.py has none")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which all processes are killed")
    parser.add_argument("--result", type=Path, help="where the ranks write what they measured; for their own use")
    args = parser.parse_args()
    if args.result:
        with ranks.joined(args.device, args.sharded) as (own, args.device):
            measure(args, own)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        args.result = Path(folder) / "measured.json"
        command = [*ranks.torchrun(args.ranks), *sys.argv, "--result", str(args.result)]
        process = subprocess.Popen(command, stdout=sys.stderr)
        try:
            process.wait(args.limit)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks die with it
            process.wait()
        measured = artefacts.read_json(args.result) if args.result.is_file() else []
    print(json.dumps(summary(args, measured) | {"exit_status": process.returncode}))
    return process.returncode


def measure(args: argparse.Namespace, own: ranks.Ranks) -> None:
    """What one rank does: its part of each run, and the runs on one rank if it is the first."""
    started = time.monotonic()
    config, together = SHAPES[args.shape], args.batches_per_step or own.size
    sequences = RandomSequences(config, args.steps * together * args.batch_tokens, "bfloat16")
    settings = training.Settings(
        args.ttt_steps, epochs=1, batch_tokens=args.batch_tokens, batches_per_step=together, learning_rate=1e-4
    )
    measured, compiled = [], None
    for _ in range(args.rounds):
        for place in (own, ranks.ALONE):
            own.wait()
            if place is ranks.ALONE and not own.writer:
                continue
            run = None
            gc.collect()  # the run before, in which modules and their hooks refer to each other
            if args.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
            drafter, head = made(config, args.device)
            run = training.Run(drafter, head, sequences, settings, args.device, peak=args.peak_flops, ranks=place)
            del drafter, head
            run.unroll = compiled = compiled or run.unroll
            losses = [row["loss"] for row in list(run.steps()) if row["split"] == "train"]
            found = {"ranks": place.size, "sharded": place.sharded} | run.meter.report()
            found |= {"peak_memory_bytes_by_rank": by_rank(place, found["peak_memory_bytes"], args.device)}
            measured.append(found | {"batch": run.shape, "losses": losses})
            cli.logger.info("%d ranks: %s, %.0f s since the start", place.size, run.meter, time.monotonic() - started)
            if own.writer:
                artefacts.write_json(args.result, measured)


def by_rank(place: ranks.Ranks, number: int | None, device: str) -> list[int] | None:
    """The number of each rank; None where there is none."""
    if number is None:
        return None
    numbers = torch.zeros(place.size, dtype=torch.int64, device=device)
    numbers[place.rank] = number
    return place.sum(numbers).tolist()


def summary(args: argparse.Namespace, measured: list[dict]) -> dict:
    """The median tokens per second on one and on N ranks, their ratio, how far losses differ, and each measurement."""
    rates, losses = {}, {}
    for count in (1, args.ranks):
        found = [m for m in measured if m["ranks"] == count]
        if found:
            rates[count], losses[count] = statistics.median(m["tokens_per_second"] for m in found), found[0]["losses"]
    both = len(rates) == len({1, args.ranks})
    pairs = zip(losses[1], losses[args.ranks], strict=True) if both else ()
    return {
        "shape": args.shape,
        "sharded": args.sharded,
        "torch": torch.__version__,
        "batch_tokens": args.batch_tokens,
        "batches_per_step": args.batches_per_step or args.ranks,
        "steps": args.steps,
        "tokens_per_second": rates,
        "ratio": rates[args.ranks] / rates[1] if both else None,
        "largest_relative_loss_difference": max((abs(a / b - 1) for a, b in pairs), default=None),
        "measured": [{name: x for name, x in m.items() if name != "losses"} for m in measured],
    }


if __name__ == "__main__":
    cli.run(main)
