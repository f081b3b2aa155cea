"""Which settings of the training move the acceptance length: drafters that differ in one, walked on the same responses.

    ENGINE_PYTHON=... MODEL_PYTHON=... .envs/workflow/bin/python ablation.py FOLDER --gpus 0 0 0 1 1 1 --out ablation.csv

FOLDER as scripts/gpu_box.sh fills it by `generate` and, with EXTRACT_OPTIONS="--codec bfloat16", `extract`, for the variant codec-int8
also by STORE=hidden_states_int8 gpu_box.sh FOLDER extract; each variant goes through its stages `vocabulary`, `train`
and `evaluate`, on one of --gpus (named n times: n drafters beside each other on it). What is there is not made again: with
--seconds 0 a run that was cut off gets its table. The hidden states of 12,000 responses of SmolLM2-135M take 42 GB of disk,
as int8 half as much more. One row for each variant: held-out AL, and its difference to the first one's with a 95 % interval
over held-out conversations, paired.
"""

import csv
import json
import os
import queue
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import numpy as np

from breakeven import artefacts, cli, scaling, tables

SCRIPTS = Path(cli.__file__).parents[1]
BASE = {"ttt_steps": 5, "epochs": 3, "learning_rate": 0.001, "batch_tokens": 8192, "seed": 0}
# The first is what the others are compared with; the second says how much another seed alone changes. Keys in capitals are
# variables of gpu_box.sh, the others training settings.
VARIANTS = {
    "base": {},
    "seed-1": {"seed": 1},
    "learning-rate-0.0005": {"learning_rate": 0.0005},
    "learning-rate-0.002": {"learning_rate": 0.002},
    "ttt-steps-3": {"ttt_steps": 3},
    "ttt-steps-7": {"ttt_steps": 7},
    "vocabulary-8192": {"VOCABULARY": "8192"},
    "vocabulary-32000": {"VOCABULARY": "32000"},
    "from-scratch": {"INITIALISE_FROM": "scratch"},
    "epochs-1": {"epochs": 1},
    "epochs-6": {"epochs": 6},
    "batch-4096": {"batch_tokens": 4096},
    "batch-16384": {"batch_tokens": 16384},
    "step-decay-1": {"step_decay": 1.0},
    "step-decay-0.6": {"step_decay": 0.6},
    "weight-decay-0.01": {"weight_decay": 0.01},
    "codec-int8": {"STORE": "hidden_states_int8"},
    "learning-rate-0.004": {"learning_rate": 0.004},
    "head-float32": {"head_dtype": "float32"},
    "regenerated-prefixes": {"STORE": "hidden_states_regenerated"},  # by regenerated_prefixes.py
}
KS = (1, 3, 5)


def trained(args, name: str, gpus: queue.Queue) -> bool:
    """Train and walk one variant on a free GPU; false if there was no time left to begin or it failed."""
    if (args.folder / f"drafters/{name}-{args.samples}/offline.manifest.json").is_file():
        return True
    gpu = gpus.get()
    try:
        if time.monotonic() > args.begin_until:
            return False
        variables = {key: value for key, value in VARIANTS[name].items() if key.isupper()}
        settings = BASE | {key: value for key, value in VARIANTS[name].items() if not key.isupper()}
        variables |= {"TRAINING": json.dumps(settings), "NAME": name, "POINTS": str(args.samples), "GPUS": gpu}
        command = [SCRIPTS / "gpu_box.sh", args.folder]
        for stages in (["vocabulary", "train"], ["evaluate"]):
            if subprocess.run([*command, *stages], env=os.environ | variables, stdout=sys.stderr).returncode:
                return False
            variables.pop("STORE", None)  # all walk the same hidden states
        return True
    finally:
        gpus.put(gpu)


def rows(args, names: list[str]) -> list[dict[str, float | str]]:
    folders = {name: args.folder / f"drafters/{name}-{args.samples}" for name in names}
    walks = {
        name: artefacts.read_table(folder / "offline_by_sequence.parquet", tables.OFFLINE_BY_SEQUENCE).to_pandas()
        for name, folder in folders.items()
    }
    found = [{"variant": name} for name in names]
    for k in KS:
        walked = scaling.lengths(walks, k)
        differences = walked.resampled - walked.resampled[:, :1]
        low, high = np.quantile(differences, scaling.QUANTILES, axis=0)
        for i, row in enumerate(found):
            row[f"al_{k}"] = round(walked.lengths[i], 3)
            row[f"difference_{k}"] = round(walked.lengths[i] - walked.lengths[0], 3)
            row[f"low_{k}"], row[f"high_{k}"] = round(low[i], 3), round(high[i], 3)
    for row, folder in zip(found, folders.values(), strict=True):
        speed = artefacts.read_json(folder / "checkpoint/speed.json")
        manifest = artefacts.read_manifest(folder / "checkpoint/manifest.json", "drafter")
        row["optimizer_steps"] = manifest["counts"]["optimizer_steps"]
        row["tokens_per_second"] = round(speed["tokens_per_second"])
        row["held_out_loss"] = round(manifest["held_out"]["loss"], 4)
    return found


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("folder", type=Path, help="a folder of scripts/gpu_box.sh")
    parser.add_argument("--samples", type=int, default=10000, help="training samples of each drafter")
    parser.add_argument("--gpus", nargs="+", default=["0"], help="GPUs to train on, one drafter for each naming")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="those to train")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="none is begun later than this")
    parser.add_argument("--out", type=Path, required=True, help="CSV file to write")
    args = parser.parse_args()
    args.begin_until = time.monotonic() + args.seconds
    gpus: queue.Queue[str] = queue.Queue()
    for gpu in args.gpus:
        gpus.put(gpu)
    with ThreadPoolExecutor(len(args.gpus)) as pool:
        done = list(pool.map(lambda name: trained(args, name, gpus), args.variants))
    finished = [name for name, ok in zip(args.variants, done, strict=True) if ok]
    if finished[:1] != args.variants[:1]:
        raise cli.UserError(
            f"{args.variants[0]}, which the others are compared with, is not there; see {args.folder}/logs"
        )
    made = rows(args, finished)
    with artefacts.atomic(args.out) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(made)
    cli.logger.info("%s: %d of %d variants", args.out, len(finished), len(args.variants))


if __name__ == "__main__":
    cli.run(main)
