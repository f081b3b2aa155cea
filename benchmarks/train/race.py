"""The trainer against two others, speculators 0.9.0 and SpecForge 0.2.0: speed, memory, and what the drafters accept.

    race.py --target results/target --vocabulary results/drafters/own/vocabulary.safetensors \\
        --hidden-states results/hidden_states/shard-*.safetensors --device cuda --out race.json
    race.py --random llama-8b --device cuda --out race.json
    race.py ... --racers ours speculators:optimizer=adamw specforge:attention_backend=sdpa

Every racer starts from the same drafter and sees the same sequences in the same order; one runs after the other, each in
a process of its own. With hidden states: first --tokens tokens (equal tokens), then as many as it does in --seconds
seconds at the rate just measured (equal time), both with a whole learning-rate schedule; each checkpoint is scored by
walk.py on held-out sequences. With --random (shapes of throughput.py): speed alone. benchmarks/README.md says more.
"""

import argparse
import copy
import functools
import gc
import importlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import jobs
import layouts
import torch
from safetensors.numpy import load_file
from throughput import SHAPES, RandomSequences

from breakeven import artefacts, checkpoint, cli, hidden_states, speed, target, training, walk
from breakeven.drafter import Drafter, DrafterConfig, initialise_from_target, target_tensor_names
from breakeven.vocabulary import target_ids

KS = (1, 3, 5)


def train_ours(job: jobs.Job) -> None:
    """This project's trainer."""

    class Planned(training.Run):
        """The batches of the plan as one epoch, without validation."""

        def batches(self, epoch: int) -> list[list[int]]:
            return job.plan

    with torch.device(job.device):
        drafter = Drafter(job.config, job.embeddings.to(job.device))
    drafter.load_state_dict(job.start)
    rows = job.head[job.t2d].to(job.device)
    head = training.TargetHead(job.norm.to(job.device), rows, job.t2d.to(job.device), job.config.rms_norm_eps)
    run = Planned(drafter, head, job.open_sequences(), job.settings, job.device)
    run.held_out = []
    batches = iter(job.plan)
    with job.watch:
        for row in run.steps():
            if row["split"] == "train":
                job.watch.step(next(batches))
    if job.export:
        job.exported = job.folder / "ours"
        job.exported.mkdir()
        checkpoint.save(
            job.exported, drafter, job.d2t.numpy(), job.t2d.numpy(), artefacts.read_json(job.target / "config.json")
        )


def parse(racer: str) -> tuple[str, dict[str, Any]]:
    """ "specforge:attention_backend=sdpa" -> ("specforge", {"attention_backend": "sdpa"})."""
    name, *options = racer.split(":")
    if name not in ("ours", "speculators", "specforge"):
        raise cli.UserError(f"--racers {racer}: the racers are ours, speculators and specforge")
    if any("=" not in option for option in options):
        raise cli.UserError(f"--racers {racer}: options are written NAME:KEY=VALUE")
    found = dict(option.split("=", 1) for option in options)
    return name, {
        key: json.loads(value) if value[:1].isdigit() or value in ("true", "false") else value
        for key, value in found.items()
    }


def trainer(name: str):
    if name == "ours":
        return train_ours
    try:
        return importlib.import_module(f"race_{name}").train
    except ImportError as error:
        raise cli.UserError(
            f"{name} cannot be imported ({error}); install benchmarks/train/peers.lock, see benchmarks/README.md"
        ) from error


def real_track(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of jobs.Job for the target and its hidden states, and `chosen`, the training sequences."""
    open_sequences = functools.partial(hidden_states.Sequences, args.hidden_states)
    sequences = open_sequences()
    maps = {name: torch.from_numpy(x) for name, x in load_file(args.vocabulary).items()}
    ids = torch.from_numpy(target_ids(maps["d2t"].numpy()))
    config = target.text_config(args.target)
    names = target_tensor_names(config)
    loaded = target.load_tensors(args.target, list(names.values()))
    tensors = {short: loaded[name] for short, name in names.items()}
    shape = DrafterConfig.from_target(config, len(ids), sequences.layers)
    if shape.rope_scaling or shape.mla:
        raise cli.UserError(f"{args.target}: the race takes targets with Llama's attention and no RoPE scaling")
    drafter = Drafter(shape, tensors["embed_tokens.weight"])
    initialise_from_target(drafter, tensors, ids)
    return {
        "config": shape,
        "start": drafter.state_dict(),
        "embeddings": tensors["embed_tokens.weight"],
        "head": tensors["lm_head.weight"],
        "norm": tensors["norm.weight"],
        "d2t": maps["d2t"],
        "t2d": maps["t2d"],
        "open_sequences": open_sequences,
        "target": args.target,
        "chosen": sequences.training(),
    }


def random_track(args: argparse.Namespace) -> dict[str, Any]:
    """The same for random weights, sequences and hidden states of a shape of throughput.py."""
    config = SHAPES[args.random]
    tokens = args.random_steps * args.batch_tokens
    with torch.device(args.device):  # faster there; kept on the CPU
        embeddings = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        head = 0.02 * torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        start = {name: x.cpu() for name, x in Drafter(config, embeddings).state_dict().items()}
    embeddings, head = embeddings.cpu(), head.cpu()
    t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
    head[~t2d] *= 0.01  # the most likely token lies in the draft vocabulary: nobody leaves positions out
    open_sequences = functools.partial(RandomSequences, config, tokens, "bfloat16", 1 << 12)
    return {
        "config": config,
        "start": start,
        "embeddings": embeddings,
        "head": head,
        "norm": torch.ones(config.hidden_size),
        "d2t": torch.zeros(config.draft_vocab_size, dtype=torch.int64),
        "t2d": t2d,
        "open_sequences": open_sequences,
        "target": None,
        "chosen": list(range(len(open_sequences()))),
    }


def acceptance(job: jobs.Job, judged: int) -> dict[str, float]:
    """Walk AL of an exported checkpoint on the first `judged` held-out sequences, by K."""
    drafter = Drafter(job.config, job.embeddings)
    drafter.load_state_dict(layouts.read_export(job.exported, job.d2t))
    sequences = job.open_sequences()
    chosen = sequences.judged()[:judged]
    if not chosen:
        raise cli.UserError("no held-out sequence: raise prompts.size or prompts.held_out_fraction")
    ids = torch.from_numpy(target_ids(job.d2t.numpy())).to(job.device)
    drafter = drafter.to(job.device).eval().requires_grad_(False)
    found = walk.evaluate(drafter, ids, sequences, chosen, max(KS), job.device)
    rows = walk.table(found, list(KS), "held-out")
    return {f"k{row['k']}": row["acceptance_length"] for row in rows if row["position"] == 1}


def run(args: argparse.Namespace, racer: str, track: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Train once on `tokens` tokens and report speed, memory and, on real data, acceptance."""
    name, options = parse(racer)
    settings = training.Settings(
        ttt_steps=args.ttt_steps, epochs=1, batch_tokens=args.batch_tokens, learning_rate=args.learning_rate
    )
    sequences, fields = track["open_sequences"](), {k: v for k, v in track.items() if k != "chosen"}
    batches = jobs.plan(sequences, track["chosen"], tokens, args.batch_tokens, settings.seed)
    lengths = {i: sequences.length(i) for batch in batches for i in batch}

    @functools.cache
    def work(i: int) -> float:
        return jobs.useful_flops(track["config"], args.ttt_steps, lengths[i], sequences.response_length(i))

    for i in lengths:
        work(i)  # not inside the time
    if args.device.startswith("cuda"):
        gc.collect()
        torch.cuda.empty_cache()
    watch = jobs.Watch(
        args.device,
        lambda batch: (sum(lengths[i] for i in batch), sum(map(work, batch))),
        max(1, min(args.skip, len(batches) // 2)),
        args.limit,
    )
    with tempfile.TemporaryDirectory() as folder:
        job = jobs.Job(
            **copy.copy(fields),
            plan=batches,
            settings=settings,
            device=args.device,
            watch=watch,
            folder=Path(folder),
            export=track["target"] is not None,
            options=options,
        )
        torch.manual_seed(settings.seed)
        trainer(name)(job)
        report = watch.report(args.peak_flops or speed.peak_flops(args.device))
        if job.export:
            report["acceptance_length"] = acceptance(job, args.judged)
    cli.logger.info("%s: %s", racer, json.dumps(report))
    return report


def race(args: argparse.Namespace, racer: str, about: dict[str, Any]) -> None:
    """All runs of one racer, written to --out after each; a run that fails is reported as its error."""
    found: dict[str, Any] = {}

    def attempt(track_name: str, run_name: str, track: dict[str, Any], tokens: int) -> dict[str, Any]:
        try:
            report = run(args, racer, track, tokens)
        except cli.UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            report = {"error": f"{type(error).__name__}: {error}"[:500]}
        found.setdefault(track_name, {})[run_name] = report
        artefacts.write_json(args.out, about | {"racers": {racer: found}})
        return report

    if args.random:
        torch.manual_seed(0)
        attempt(args.random, "speed", random_track(args), args.random_steps * args.batch_tokens)
        torch._dynamo.reset()  # what is compiled for two shapes is slower than for one
    if args.hidden_states:
        torch.manual_seed(0)
        track = real_track(args)
        rate = attempt("real", "equal_tokens", track, args.tokens).get("tokens_per_second")
        if args.seconds and rate:
            attempt("real", "equal_time", track, max(args.batch_tokens, int(rate * args.seconds)))


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "triton", "speculators", "specforge"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"python": platform.python_version()}


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--racers", nargs="+", default=["ours", "speculators", "specforge"], help="NAME[:KEY=VALUE ...]"
    )
    parser.add_argument("--target", type=Path, help="the target's folder")
    parser.add_argument("--vocabulary", type=Path, help="d2t and t2d, as build_vocabulary.py writes them")
    parser.add_argument("--hidden-states", nargs="+", type=Path, default=[], help="hidden-state shards")
    parser.add_argument("--random", choices=SHAPES, help="a shape to race on random features, for speed alone")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of the first run, prompts included")
    parser.add_argument("--seconds", type=float, default=15, help="length of the second run; 0: none")
    parser.add_argument("--random-steps", type=int, default=60, help="optimizer steps on random features")
    parser.add_argument("--skip", type=int, default=30, help="first steps not timed; at most half of them")
    parser.add_argument("--limit", type=float, default=90, help="seconds, compilation included, that end any run")
    parser.add_argument("--total", type=float, help="seconds for everything, shared by the racers; none if not given")
    parser.add_argument("--judged", type=int, default=200, help="held-out sequences to score on")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in a batch")
    parser.add_argument("--ttt-steps", type=int, default=5, help="training-time-test steps")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate of every racer")
    parser.add_argument("--peak-flops", type=float, help="FLOP/s of the device where breakeven/speed.py has none")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    args = parser.parse_args()
    if bool(args.hidden_states) != bool(args.target) or bool(args.hidden_states) != bool(args.vocabulary):
        raise cli.UserError("--target, --vocabulary and --hidden-states belong together")
    if not args.hidden_states and not args.random:
        raise cli.UserError("nothing to race on: give --hidden-states, --random or both")
    for racer in args.racers:
        parse(racer)
    if args.threads:
        torch.set_num_threads(args.threads)
    about = {
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
        "versions": versions(),
        "settings": {k: v for k, v in vars(args).items() if isinstance(v, int | float)},
    }
    if len(args.racers) == 1:
        race(args, args.racers[0], about)
        return
    racers, deadline = {}, time.monotonic() + args.total if args.total else None
    for n, racer in enumerate(args.racers):
        # Time that one racer does not use is the others'.
        limit = (deadline - time.monotonic()) / (len(args.racers) - n) if deadline else None
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.json"
            last = ["--racers", racer, "--out", str(part)]  # the last of each option counts
            try:
                done = subprocess.run([sys.executable, __file__, *sys.argv[1:], *last], timeout=limit)
                ended = f"exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {limit:.0f} s"
            racers[racer] = artefacts.read_json(part)["racers"][racer] if part.is_file() else {}
            racers[racer]["ended"] = ended
        artefacts.write_json(args.out, about | {"racers": racers})


if __name__ == "__main__":
    cli.run(main)
