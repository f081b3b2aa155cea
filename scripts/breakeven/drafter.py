"""The EAGLE-3 drafter, in one file but for multi-head latent attention, which is in mla.py.

Notation, used in every docstring here: T positions of one or more sequences, packed one behind the other; R rows that
draft; H hidden size, V target vocabulary, D draft vocabulary, A number of target layers whose hidden states are features
(n_aux, 3 by default). Tensors keep a leading dimension of one batch, B = 1.

At position p the drafter sees the features of position p, fused by `fc`, and the embedding of token x[p+1]; it predicts
x[p+2] (Li et al. 2025, "EAGLE-3", arXiv 2503.01840). Later draft steps of a chain that starts at row p feed the layer's
own pre-norm output back instead of features. Keys: step t of row p attends the step-0 keys of rows <= p, and the row's
own keys of steps 1 ... t; its rotary position is p + t. Teacher-forced training and the simulated walk of `acceptance`
run the same `Drafter.step`; they differ in the tokens they feed.
"""

import functools
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from breakeven import mla
from breakeven.configs import rope
from breakeven.mla import LatentAttention, LatentShape
from breakeven.norm import RMSNorm
from breakeven.target import computes_bfloat16

# cuDNN's attention plans anew for every shape, and batches differ: 55 ms a call where the kernel takes 0.1 (H200).
torch.backends.cuda.enable_cudnn_sdp(False)

BLOCK = 128  # rows and keys in a block of flex attention's mask


@dataclass
class DrafterConfig:
    """The shape of a drafter; everything but the vocabulary and the layers is the target's."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of MLA: the part that is rotated
    vocab_size: int
    draft_vocab_size: int
    layers: list[int]  # physical: the input of decoder layer k of the target
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    hidden_act: str = "silu"
    mla: LatentShape | None = None  # None: grouped-query attention
    # Variants that published drafters use and `load` honours; those trained here have none (docs/design.md, section 5).
    norm_before_residual: bool = False  # the residual is the normed features
    norm_before_fc: bool = False  # one norm over all target hidden states before fc
    norm_output: bool = False  # the next step's features are the layer's output after the final norm
    fc_norm: bool = False  # each target hidden state has a norm of its own before fc ("EAGLE-3.1")

    @classmethod
    def from_target(cls, config: dict[str, Any], draft_vocab_size: int, layers: list[int]) -> "DrafterConfig":
        """The drafter's shape from the target's config.json (its text_config for multi-modal targets)."""
        heads = config["num_attention_heads"]
        theta, scaling = rope(config)
        latent = LatentShape.of(config)
        head_dim = latent.qk_rope_head_dim if latent else config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=heads if latent else config.get("num_key_value_heads", heads),
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            layers=list(layers),
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=config["max_position_embeddings"],
            hidden_act=config.get("hidden_act", "silu"),
            mla=latent,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Rotary(nn.Module):
    """Rotary embedding with the target's base and scaling (`transformers` computes the frequencies)."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        frequencies, self.attention_scaling = inverse_frequencies(config)
        self.score_scaling = score_scaling(config.rope_scaling)
        self.register_buffer("inverse_frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [B, heads, T, head_dim] by positions [T]."""
        angles = positions.float()[:, None] * self.inverse_frequencies
        angles = torch.cat([angles, angles], dim=-1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        first, second = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def inverse_frequencies(config: DrafterConfig) -> tuple[Tensor, float]:
    """Rotary frequencies [head_dim / 2] (float32) and the attention scaling factor."""
    if config.rope_scaling is None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return config.rope_theta**-exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(config.rope_scaling)
    kind = scaling.setdefault("rope_type", scaling.get("type"))
    llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_theta": config.rope_theta, **scaling},
    )
    return ROPE_INIT_FUNCTIONS[kind](llama, "cpu")


def score_scaling(scaling: dict[str, Any] | None) -> float:
    """What MLA's scores are multiplied by under yarn, beside head_dim**-0.5: mscale squared (DeepSeek-V2/V3)."""
    mscale, factor = (scaling or {}).get("mscale_all_dim", 0), (scaling or {}).get("factor", 1)
    return (0.1 * mscale * math.log(factor) + 1) ** 2 if mscale and factor > 1 else 1.0


class Attention(nn.Module):
    """Grouped-query attention whose queries, keys and values read [embedding, features], 2H wide."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        width = 2 * config.hidden_size
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def project(self, x: Tensor, rotary: Rotary, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, 2H] -> queries [B, heads, T, head_dim], keys and values [B, kv_heads, T, head_dim]."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotary(q, positions), rotary(k, positions), v

    def initialise(self, target: dict[str, Tensor]) -> None:
        """Start as the target's own attention, the embedding half of q, k and v small."""
        for name in ("q_proj", "k_proj", "v_proj"):
            weight, source = getattr(self, name).weight, target[f"self_attn.{name}.weight"]
            weight[:, : source.shape[1]].normal_(std=0.02)
            weight[:, source.shape[1] :] = source
        self.o_proj.weight.copy_(target["self_attn.o_proj.weight"])


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        if config.hidden_act != "silu":
            raise ValueError(f"hidden_act {config.hidden_act!r} is not supported; targets with silu are")

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The one decoder layer; parameter names are those that vLLM and SGLang load as `midlayer`."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = (
            LatentAttention(config.mla, config.hidden_size, config.num_attention_heads, config.rms_norm_eps)
            if config.mla
            else Attention(config)
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


@dataclass
class Rows:
    """Where the rows that draft stand in a packed batch, R of its T positions; no sequence attends another.

    index [R] int64: their places among the T positions, ascending. positions [T] int64: the place of each position in
    its own sequence. spans: (first place, end place, first row, end row) of each sequence, for the attention sequence
    by sequence; blocks: the mask of flex attention, which takes its place where there is one (see `row_blocks`).
    """

    index: Tensor
    positions: Tensor
    spans: list[tuple[int, int, int, int]]
    blocks: BlockMask | None = None

    @classmethod
    def suffix(cls, length: int, first_row: int, device="cpu") -> "Rows":
        """One sequence of `length` positions whose rows from `first_row` on draft."""
        positions = torch.arange(length, device=device)
        return cls(positions[first_row:], positions, [(0, length, 0, length - first_row)])


@dataclass
class Context:
    """The keys and values that a chain of draft steps attends, one entry a step.

    keys[0], values[0]: [B, kv_heads, T, head_dim] of all T positions; keys[t], values[t] for t >= 1: of R rows only.
    Values of MLA are v_head_dim wide.
    """

    keys: list[Tensor]
    values: list[Tensor]


class Drafter(nn.Module):
    """EAGLE-3 network: fc, one decoder layer, final norm, head over the draft vocabulary; frozen target embeddings.

    `embed_tokens` [V, H] is the target's and is neither trained nor saved.
    """

    def __init__(self, config: DrafterConfig, embeddings: Tensor):
        super().__init__()
        self.config = config
        width = len(config.layers) * config.hidden_size
        self.input_norm = RMSNorm(width, config.rms_norm_eps) if config.norm_before_fc else nn.Identity()
        norms = [RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in config.layers] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config)
        if embeddings.shape != (config.vocab_size, config.hidden_size):
            raise ValueError(
                f"embeddings are {tuple(embeddings.shape)}, not ({config.vocab_size}, {config.hidden_size})"
            )
        self.register_buffer("embed_tokens", embeddings, persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """Target hidden states [B, T, A, H] -> fused features [B, T, H]."""
        features = features.to(self.dtype)
        if self.config.fc_norm:
            features = torch.stack([norm(f) for norm, f in zip(self.fc_norm, features.unbind(-2), strict=True)], -2)
        return self.fc(self.input_norm(features.flatten(-2)))

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    def step(self, tokens: Tensor, features: Tensor, context: Context | None, rows: Rows) -> tuple[Tensor, Context]:
        """One draft step of the rows.

        Step 0 (context None): tokens [B, T] and features [B, T, H] of all positions p, where tokens[:, p] is x[p+1].
        Later steps: tokens [B, R] and features [B, R, H] of the rows; features are the former step's output. Returns
        the layer's pre-norm output [B, R, H], which is both the input of `logits` and the next step's features, and the
        context with this step's keys and values.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        t = 0 if context is None else len(context.keys)
        positions = rows.positions if t == 0 else rows.positions[rows.index] + t
        if self.config.norm_output and t > 0:
            features = self.norm(features)
        embedded = F.embedding(tokens, self.embed_tokens).to(features.dtype)
        normed = layer.hidden_norm(features)
        if self.config.norm_before_residual:
            features = normed
        x = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        q, k, v = attention.project(x, self.rotary, positions)
        if context is None:
            context = Context([k], [v])
            q, features = q.index_select(2, rows.index), features.index_select(1, rows.index)
        else:
            context = Context([*context.keys, k], [*context.values, v])
        attend = attend_by_sequence if rows.blocks is None else attend_by_blocks
        attended = attend(q, context, rows)
        hidden = features + attention.o_proj(attended.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return hidden, context

    def logits(self, hidden: Tensor) -> Tensor:
        """Draft-vocabulary logits [..., D] of pre-norm hidden states [..., H]."""
        return self.lm_head(self.norm(hidden))


def autocast(device: str):
    """bf16 autocast, where the device computes in bf16; the master weights stay float32."""
    return torch.autocast(device.split(":")[0], torch.bfloat16, enabled=computes_bfloat16(device))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, kv_heads, T, d] -> [B, heads, T, d], each key head serving heads / kv_heads query heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def chain_mask(rows: Tensor, width: int, steps: int) -> Tensor:
    """Which keys a draft step sees, for rows [R] of one sequence of `width` positions: bool [R, width + steps * R].

    The row at position p sees step-0 keys 0 ... p and, of each later step, its own key.
    """
    causal = torch.arange(width, device=rows.device) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.cat([causal, *[own] * steps], dim=1)


def attend_by_sequence(q: Tensor, context: Context, rows: Rows) -> Tensor:
    """Attention of queries [B, heads, R, head_dim] with a dense mask for each sequence; as wide as the values."""
    outputs = []
    for start, end, first, last in rows.spans:
        if first == last:
            continue
        keys, values = (
            repeat_heads(torch.cat([x[0][:, :, start:end], *(own[:, :, first:last] for own in x[1:])], 2), q.shape[1])
            for x in (context.keys, context.values)
        )
        mask = chain_mask(rows.index[first:last] - start, end - start, len(context.keys) - 1)
        outputs.append(F.scaled_dot_product_attention(q[:, :, first:last], keys, values, attn_mask=mask))
    return torch.cat(outputs, dim=2) if len(outputs) != 1 else outputs[0]


def attend_by_blocks(q: Tensor, context: Context, rows: Rows) -> Tensor:
    """The same attention without a dense mask: flex attention over step 0, then each row's own keys, merged exactly.

    A softmax over all keys is that of [log-sum-exp over step 0, scores of the own keys], applied to [the output over
    step 0, own values].
    """
    keys, values = context.keys, context.values
    v = values[0].to(q.dtype)
    # Inside a compiled chain it becomes part of it.
    flex = flex_attention if torch.compiler.is_compiling() else compiled_flex_attention()
    attended, extra = flex(
        q, keys[0].to(q.dtype), v, block_mask=rows.blocks, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    if len(keys) == 1:
        return attended
    batch, heads, count, width = q.shape
    grouped = (batch, keys[0].shape[1], -1, count, width)  # key head by key head
    query = q.float().view(grouped)
    scores = [(query * k.float()[:, :, None]).sum(-1) * width**-0.5 for k in keys[1:]]
    weights = torch.stack([extra.lse.float().view(grouped[:-1]), *scores]).softmax(dim=0)
    merged = weights[0][..., None] * attended.float().unflatten(1, (grouped[1], -1))
    for weight, v in zip(weights[1:], values[1:], strict=True):
        merged = merged + weight[..., None] * v.float()[:, :, None]
    return merged.view(attended.shape).to(q.dtype)


@functools.cache
def compiled_flex_attention():
    """Flex attention as kernels of its own: without compilation it would be dense."""
    return torch.compile(flex_attention, dynamic=False)


def row_blocks(starts: Tensor, index: Tensor, length: int) -> BlockMask:
    """The mask of flex attention for rows [R] at places `index` whose sequences begin at places `starts` [R] int64.

    R and `length`, the number of keys, are multiples of BLOCK.
    """
    low = starts.view(-1, BLOCK).amin(1) // BLOCK
    counts = index.view(-1, BLOCK).amax(1) // BLOCK - low + 1
    blocks = torch.arange(length // BLOCK, device=index.device)
    indices = (low[:, None] + blocks).clamp(max=length // BLOCK - 1)

    def sees(batch, head, row, key):
        return (key >= starts[row]) & (key <= index[row])

    return BlockMask.from_kv_blocks(
        counts.int()[None, None],
        indices.int()[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(len(index), length),
    )


def initialise_from_target(drafter: Drafter, target: dict[str, Tensor], target_ids: Tensor) -> None:
    """Start from what the target already knows: its last layer, final norm and the head rows of the draft vocabulary.

    `target` maps short names (see `target_tensor_names`) to tensors; `target_ids` [D] int64 are the target ids of the
    draft vocabulary. fc starts as a copy of the highest layer's features, so that the layer sees at first nearly what
    it saw in the target; the embedding half of the attention's input starts small.
    The MLP may be narrower in the target (the shared expert of a mixture): it fills the first of the drafter's inner
    dimensions, and the others, whose routed experts have no one counterpart, start with no effect on the output.
    """
    config, layer = drafter.config, drafter.midlayer
    hidden = config.hidden_size
    with torch.no_grad():
        drafter.fc.weight.normal_(std=0.02 / math.sqrt(len(config.layers)))
        drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
        layer.self_attn.initialise(target)
        layer.mlp.down_proj.weight.zero_()
        for name in ("gate_proj", "up_proj", "down_proj"):
            source = target[f"mlp.{name}.weight"]
            getattr(layer.mlp, name).weight[: source.shape[0], : source.shape[1]] = source
        layer.input_layernorm.weight.fill_(1.0)
        layer.hidden_norm.weight.copy_(target["input_layernorm.weight"])
        layer.post_attention_layernorm.weight.copy_(target["post_attention_layernorm.weight"])
        drafter.norm.weight.copy_(target["norm.weight"])
        drafter.lm_head.weight.copy_(target["lm_head.weight"][target_ids])


def initialise_from_drafter(drafter: Drafter, ids: Tensor, other: Drafter, other_ids: Tensor) -> int:
    """Take over another drafter's weights; the draft vocabularies may differ, everything else must be the same.

    ids [D], other_ids [D'] int64, in any order: target ids of the two vocabularies. Head rows go by target id; rows that
    the other does not have are left as they are. Returns how many were taken. Raises ValueError for another shape.
    """
    mine, theirs = drafter.config.to_dict(), other.config.to_dict()
    for key in mine:
        same = mine[key] == theirs[key]
        if isinstance(mine[key], float) and isinstance(theirs[key], float):
            same = math.isclose(mine[key], theirs[key], rel_tol=1e-6)  # a config may hold a float32's digits
        if key != "draft_vocab_size" and not same:
            raise ValueError(f"{key} is {theirs[key]}, that of the drafter to train is {mine[key]}")
    order = other_ids.argsort()  # some publish d2t in order of frequency
    place = order[torch.searchsorted(other_ids[order], ids).clamp(max=len(other_ids) - 1)]
    known = other_ids[place] == ids
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            source = other.get_parameter(name)
            if name == "lm_head.weight":
                parameter[known] = source[place[known]].to(parameter.dtype)
            else:
                parameter.copy_(source)
    return int(known.sum())


ATTENTION = tuple(f"self_attn.{name}_proj.weight" for name in "qkvo")
OTHERS = (
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}_layernorm.weight" for name in ("input", "post_attention")),
)


def target_tensor_names(config: dict[str, Any]) -> dict[str, str]:
    """Short name -> name in the target's checkpoint, for initialise_from_target and the embeddings.

    Targets with the names of Llama, and those of DeepSeek-V2/V3 and Kimi-K2, whose last layer is a mixture of experts:
    its shared expert stands for the MLP.
    """
    last = config["num_hidden_layers"] - 1
    layer = f"model.layers.{last}."
    names = {name: layer + name for name in (*(mla.TENSORS if config.get("kv_lora_rank") else ATTENTION), *OTHERS)}
    if config.get("n_routed_experts") and last >= config.get("first_k_dense_replace", 0):
        names = {short: name.replace(".mlp.", ".mlp.shared_experts.") for short, name in names.items()}
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return names | {
        "norm.weight": "model.norm.weight",
        "lm_head.weight": head,
        "embed_tokens.weight": "model.embed_tokens.weight",
    }
