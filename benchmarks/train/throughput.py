"""Training speed on random sequences: tokens per second, MFU, peak memory. Needs no data and no target.

    throughput.py --shape smollm2-135m --device cuda
    throughput.py --shape llama-8b --device cuda --profile 30

Sequences are half prompt, half response, of 64 to 448 tokens; tokens count prompts. How it is computed: breakeven/speed.py.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import torch

from breakeven import cli, training
from breakeven.drafter import Drafter, DrafterConfig
from breakeven.hidden_states import Chosen, encode

SHAPES = {
    "smollm2-135m": DrafterConfig(576, 1536, 9, 3, 64, 49152, 16000, [2, 15, 27], 1e-5, 1e5, None, 8192),
    "llama-8b": DrafterConfig(4096, 14336, 32, 8, 128, 128256, 32000, [2, 16, 29], 1e-5, 5e5, None, 8192),
}


class RandomSequences(Chosen):
    """Random tokens, labels and hidden states, cut from one pool in memory; nothing is held out."""

    def __init__(self, config: DrafterConfig, tokens: int, codec: str, pool: int = 1 << 14):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.pool = {
            "token_ids": torch.randint(0, config.vocab_size, (pool,), generator=generator, dtype=torch.int32),
            "argmax": torch.randint(0, config.draft_vocab_size, (pool,), generator=generator, dtype=torch.int32),
            "hidden": torch.randn(pool, len(config.layers), config.hidden_size, generator=generator).bfloat16(),
            "last": torch.randn(pool, config.hidden_size, generator=generator).bfloat16(),
        }
        if codec == "int8":
            for name in ("hidden", "last"):
                self.pool[name], self.pool[f"{name}_scale"] = encode(self.pool[name])
        draw, self.index = random.Random(0), []
        while tokens > 0:
            length = draw.randrange(64, 449)
            self.index.append((draw.randrange(pool - length), length))
            tokens -= length
        self.held_out = [False] * len(self.index)

    def training(self, samples: int | None = None) -> list[int]:
        return list(range(len(self)))

    def __len__(self):
        return len(self.index)

    def length(self, i: int) -> int:
        return self.index[i][1]

    def response_length(self, i: int) -> int:
        return self.length(i) - self.length(i) // 2

    def stored(self, i: int, *names: str) -> dict[str, torch.Tensor]:
        start, length = self.index[i]
        mask = torch.arange(length) >= length // 2
        return {name: x[start : start + length] for name, x in self.pool.items()} | {"loss_mask": mask}


def made(config: DrafterConfig, device: str) -> tuple[Drafter, training.TargetHead]:
    """A random drafter and target head on a device, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        embeddings = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        drafter = Drafter(config, embeddings).to(device)
        rows = torch.randn(config.draft_vocab_size, config.hidden_size, dtype=torch.bfloat16) * 0.02
        inside = torch.arange(config.vocab_size) < config.draft_vocab_size
        return drafter, training.TargetHead(torch.ones(config.hidden_size), rows, inside, config.rms_norm_eps)


def measure(args: argparse.Namespace) -> dict:
    """Train for `steps` optimizer steps on random data and report the speed after the warm-up."""
    config = SHAPES[args.shape]
    drafter, head = made(config, args.device)
    sequences = RandomSequences(config, args.steps * args.batch_tokens, args.codec)
    settings = training.Settings(ttt_steps=args.ttt_steps, epochs=1, batch_tokens=args.batch_tokens, learning_rate=1e-4)
    run = training.Run(drafter, head, sequences, settings, args.device, peak=args.peak_flops)
    steps = run.steps()
    if args.profile:
        for _ in range(10):
            next(steps)
        with torch.profiler.profile() as profiler:
            for _ in range(10):
                next(steps)
            run.read()
        key = "self_cuda_time_total" if args.device.startswith("cuda") else "self_cpu_time_total"
        print(profiler.key_averages().table(sort_by=key, row_limit=args.profile, max_name_column_width=70))
    for _ in steps:
        pass
    return {"shape": args.shape, "codec": args.codec, "batch": run.shape, "steps": run.step} | run.meter.report()


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m", help="target that the drafter is made for")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--batch-tokens", type=int, default=8192, help="tokens in a batch")
    parser.add_argument("--ttt-steps", type=int, default=5, help="training-time-test steps")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--codec", choices=("bfloat16", "int8"), default="bfloat16", help="of the hidden states")
    parser.add_argument("--peak-flops", type=float, help="FLOP/s of the device where breakeven/speed.py has none")
    parser.add_argument("--profile", type=int, default=0, metavar="ROWS", help="print a profile of ten steps")
    args = parser.parse_args()
    print(json.dumps(measure(args)))


if __name__ == "__main__":
    cli.run(main)
