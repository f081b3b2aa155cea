"""How fast training goes: tokens per second, model FLOP utilisation, peak memory.

FLOPs counted are those the model needs, not those a padded or recomputed run spends (MFU as in Chowdhery et al. 2022,
"PaLM", arXiv 2204.02311, appendix B): a multiply-add is 2 FLOP, a matrix product costs that once forward and twice
backward. With T tokens, R rows that draft, S training-time-test steps, N (row, step) pairs that are counted:

    multiply-adds = T (fc + kv) + R (S (qo + mlp) + (S-1) kv) + N head + heads (d_qk + d_v) * (keys attended)
    FLOP          = 6 multiply-adds - 2 T fc (features have no gradient) + 2 R head (the target's head, forward)

fc, kv, qo, mlp, head: the weights of those matrices; d_qk, d_v: width of a head's keys and values. The target's forward pass of online training is not counted.
"""

import time

import torch

from breakeven.drafter import DrafterConfig

# Dense bf16 with float32 sums, FLOP/s, by the vendor's data sheet; a name is looked for in the device's name.
PEAKS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "GH200": 989e12, "A100": 312e12, "L40S": 362e12}
WARM_UP = 5  # steps that are not timed: compilation and first allocations


def peak_flops(device: str) -> float | None:
    """Peak FLOP/s of a CUDA device that PEAKS knows, else None."""
    if not device.startswith("cuda"):
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), None)


def training_flops(config: DrafterConfig, steps: int, tokens: int, rows: int, pairs: int, keys: int) -> float:
    """FLOP of one optimizer step; `keys`: step-0 keys seen by all rows together. See the formula above."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    fc = len(config.layers) * hidden * hidden
    if config.mla:
        m = config.mla
        attended = heads * (m.qk_head_dim + m.v_head_dim)
        kv = 2 * hidden * (m.kv_lora_rank + m.qk_rope_head_dim)
        kv += m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
        qo = 2 * hidden * m.q_lora_rank + m.q_lora_rank * heads * m.qk_head_dim + heads * m.v_head_dim * hidden
    else:
        queries = heads * config.head_dim
        attended = 2 * queries
        kv = 2 * 2 * hidden * config.num_key_value_heads * config.head_dim
        qo = 2 * hidden * queries + queries * hidden
    mlp = 3 * hidden * config.intermediate_size
    head = config.draft_vocab_size * hidden
    own = rows * steps * (steps - 1) // 2
    products = tokens * (fc + kv) + rows * (steps * (qo + mlp) + (steps - 1) * kv) + pairs * head
    products += attended * (steps * keys + own)
    return 6 * products - 2 * tokens * fc + 2 * rows * head


class Meter:
    """Tokens of all devices and FLOP of this one in the steps done while it runs, the first WARM_UP left out where there
    are more."""

    def __init__(self, device: str, peak: float | None = None, devices: int = 1):
        self.device, self.peak, self.devices = device, peak or peak_flops(device), devices
        self.steps, self.tokens, self.flops, self.seconds = 0, 0, 0.0, 0.0
        self.started: float | None = None

    def start(self) -> None:
        self.started = time.monotonic()

    def stop(self) -> None:
        """Work asked for so far must be done: read a result before."""
        self.seconds += time.monotonic() - self.started
        self.started = None

    def add(self, tokens: int, flops: float) -> bool:
        """Count a step; true where the warm-up ends and the caller must wait for the device and call `restart`."""
        self.steps, self.tokens, self.flops = self.steps + 1, self.tokens + tokens, self.flops + flops
        return self.steps == WARM_UP

    def restart(self) -> None:
        self.tokens, self.flops, self.seconds = 0, 0.0, 0.0
        self.start()

    def report(self) -> dict:
        """tokens_per_second of all devices; of this one flops_per_second, mfu (None where the peak is unknown) and
        peak_memory_bytes (None on a CPU)."""
        cuda = self.device.startswith("cuda")
        rate = self.tokens / self.seconds if self.seconds else None
        utilisation = self.flops / self.seconds / self.peak if self.seconds and self.peak else None
        return {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "devices": self.devices,
            "tokens_per_second": rate,
            "flops_per_second": self.flops / self.seconds if self.seconds else None,
            "peak_flops_per_second": self.peak,
            "mfu": utilisation,
            "peak_memory_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "timed_seconds": self.seconds,
            "timed_tokens": self.tokens,
        }

    def __str__(self) -> str:
        found = self.report()
        rate, mfu, memory = found["tokens_per_second"], found["mfu"], found["peak_memory_bytes"]
        parts = [f"{rate:.0f} tok/s" if rate else "too short to time"]
        parts += [f"{self.devices} devices"] if self.devices > 1 else []
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        parts += [f"peak memory {memory / 1e9:.2f} GB"] if memory is not None else []
        return ", ".join(parts)
