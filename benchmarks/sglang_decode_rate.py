"""Decode rate of a plain SGLang server on this project's CPU operators against transformers' own, in one run.

    .envs/sglang-cpu/bin/python benchmarks/sglang_decode_rate.py --target results/target --threads 2

Single stream, greedy, bf16, the same prompts and numbers of tokens. transformers runs before and after the server, never
beside it: an idle SGLang server keeps a core busy. Prints tok/s of each and their ratio; the goal is 0.5 or more.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# The second folder lets this environment's torchvision load, which transformers asks for.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("scripts", "envs/sglang-cpu")]

from breakeven import benchmark, chat, cli, conversations, servers, target  # noqa: E402
from breakeven.engines import Speculation, sglang  # noqa: E402

FLAGS = {
    "device": "cpu",
    "dtype": "bfloat16",
    "context-length": 2048,
    "max-running-requests": 4,
    "max-total-tokens": 8192,
    "disable-radix-cache": True,
    "attention-backend": "torch_native",
    "prefill-attention-backend": "intel_amx",
    "decode-attention-backend": "intel_amx",
}


def transformers_rates(folder: Path, prompts: list[list[int]], tokens: int, threads: int) -> list[float]:
    """Decode tok/s of each prompt: the time of `tokens` + 1 tokens less that of one, which is the prefill."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    def seconds(ids: list[int], count: int) -> float:
        start = time.perf_counter()
        model.generate(torch.tensor([ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
        return time.perf_counter() - start

    seconds(prompts[0], 16)
    return [tokens / (seconds(ids, tokens + 1) - seconds(ids, 1)) for ids in prompts]


def server_rates(folder: Path, prompts: list[list[int]], tokens: int, threads: int, log: Path) -> list[float]:
    """Decode tok/s of each prompt from a server of its own."""
    settings = {"flags": FLAGS, "environment": {"OMP_NUM_THREADS": str(threads)}, "startup_timeout": 600}
    sampling = {"max_tokens": tokens + 1, "temperature": 0, "ignore_eos": True}
    with servers.speculating(sglang, sys.executable, folder, Speculation(), settings, set(), "cpu", log) as server:
        client = benchmark.Client(sglang, server.url, server.name, server.key)
        for _ in range(2):
            client.stream(prompts[0], sampling | {"max_tokens": 16})
        rates = []
        for ids in prompts:
            reply, first, last = client.stream(ids, sampling)
            rates.append((len(reply.token_ids) - 1) / (last - first))
    return rates


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", required=True, type=Path, help="the target's folder")
    parser.add_argument("--prompts", type=Path, default=Path("resources/reference-prompts.jsonl"), help="JSONL file")
    parser.add_argument("--tokens", type=int, default=128, help="decoded tokens of each prompt")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine; no more than quiet cores")
    parser.add_argument("--log", type=Path, help="where the server's output goes")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    kwargs = target.read_manifest(args.target)["parameters"]["chat_template_kwargs"]
    tokenizer = chat.load_tokenizer(args.target)
    prompts = [
        chat.render(tokenizer, prompt["messages"], kwargs)
        for prompt in conversations.read_benchmark_prompts(args.prompts)
    ]
    with tempfile.TemporaryDirectory() as folder:
        log = args.log or Path(folder) / "server.log"
        before = transformers_rates(args.target, prompts, args.tokens, args.threads)
        served = server_rates(args.target, prompts, args.tokens, args.threads, log)
        after = transformers_rates(args.target, prompts, args.tokens, args.threads)
    own = statistics.mean(before + after)
    print(f"transformers  {statistics.mean(before):6.1f} tok/s before, {statistics.mean(after):6.1f} after")
    print(
        f"sglang        {statistics.mean(served):6.1f} tok/s, per prompt {' '.join(f'{rate:.1f}' for rate in served)}"
    )
    print(f"ratio         {statistics.mean(served) / own:6.2f} with {args.threads} threads")


if __name__ == "__main__":
    cli.run(main)
