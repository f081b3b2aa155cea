"""Multi-head latent attention for drafters of DeepSeek-V2/V3 and Kimi-K2 targets (DeepSeek-AI 2024, arXiv 2405.04434).

The same three steps as `drafter.Attention`: `project`, the attention over a context of keys and values, `o_proj`. Keys
and values are decompressed here, one for each head; the engines cache the latents and fold the same matrices into the
queries, which is the same function. Shapes and names are those of Eagle3DeepseekV2ForCausalLM (vLLM 0.32.0
deepseek_eagle3.py, SGLang 0.5.23 kimi_k25_eagle3.py): q_a and kv_a read [embedding, features], 2H wide.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from breakeven.cli import UserError
from breakeven.norm import RMSNorm


@dataclass
class LatentShape:
    """The sizes of MLA, named as in config.json."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int  # of a query or key head: what is not rotated, and what is; the rotated key is shared
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "LatentShape | None":
        """The sizes in a config.json, None for plain attention. A UserError for what no engine serves."""
        if config.get("kv_lora_rank") is None:
            return None
        if not config.get("q_lora_rank"):
            raise UserError(
                "config.json: q_lora_rank is not set; engines take MLA drafters with compressed queries only, so there is"
                " no drafter of this target's own shape"
            )
        if not config.get("rope_interleave", True):
            raise UserError(
                "config.json: rope_interleave is false; vLLM rotates MLA drafters in interleaved pairs whatever it says,"
                " so there is no drafter of this target's own shape"
            )
        return cls(**{field.name: config[field.name] for field in fields(cls)})

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


TENSORS = tuple(
    f"self_attn.{name}.weight"
    for name in (
        "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip


class LatentAttention(nn.Module):
    """MLA whose compressed queries, keys and values read [embedding, features], 2H wide."""

    def __init__(self, shape: LatentShape, hidden: int, heads: int, eps: float):
        super().__init__()
        self.shape, self.heads = shape, heads
        self.q_a_proj = nn.Linear(2 * hidden, shape.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(shape.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(shape.q_lora_rank, heads * shape.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(2 * hidden, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * shape.v_head_dim, hidden, bias=False)

    def project(self, x: Tensor, rotary: nn.Module, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, 2H] -> queries and keys [B, heads, T, qk_head_dim], values [B, heads, T, v_head_dim].

        Queries carry the square of yarn's mscale, so that attention scales by qk_head_dim**-0.5 alone.
        """
        shape, split = self.shape, (x.shape[0], x.shape[1], self.heads, -1)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(split).transpose(1, 2)
        q_plain, q_rotated = q.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        latent, k_rotated = self.kv_a_proj_with_mqa(x).split([shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        k_rotated = rotary(halves(k_rotated[:, None]), positions).expand(-1, self.heads, -1, -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(split).transpose(1, 2)
        k_plain, v = kv.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        q = torch.cat([q_plain, rotary(halves(q_rotated), positions)], dim=-1) * rotary.score_scaling
        return q, torch.cat([k_plain, k_rotated], dim=-1), v

    def initialise(self, target: dict[str, Tensor]) -> None:
        """Start as the target's own attention, the embedding half of both inputs small."""
        for name in TENSORS:
            weight, source = self.get_parameter(name.removeprefix("self_attn.")), target[name]
            if weight.shape != source.shape:  # the two that read 2H
                hidden = source.shape[1]
                weight[:, :hidden].normal_(std=0.02)
                weight = weight[:, hidden:]
            weight.copy_(source)


def halves(x: Tensor) -> Tensor:
    """Interleaved pairs (0, 1), (2, 3) ... of the last dimension -> [firsts, seconds], which `Rotary` rotates.

    Engines leave the pairs interleaved; queries and keys are permuted alike, so that scores are the same.
    """
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
