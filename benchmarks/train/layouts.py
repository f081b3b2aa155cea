"""Between this project's store and checkpoints and those of two other EAGLE-3 trainers; imports neither of them.

speculators 0.9.0: one sample is input_ids [T], hidden_states [T, A*H], verifier_last_hidden_states [T, H] before the final
norm, loss_mask [T]. SpecForge 0.2.0: input_ids [T], aux_hidden_state [T, A*H], hidden_state [T, H] *after* the final norm,
loss_mask [T]. Both take the features of position p with the token at p+1, as here; their loss masks are those of the
tokens, and each trainer shifts them in its own way.

Their checkpoints hold the tensors of this project's under the same names, but for the layer (speculators: layers.0) and
copies of the target's embeddings. Both write d2t as offsets.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig

from breakeven.cli import UserError
from breakeven.drafter import DrafterConfig
from breakeven.hidden_states import decode

STORED = ("token_ids", "loss_mask", "hidden", "last")
COPIES = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")  # of the target's tensors


def load(sequences, i: int) -> dict[str, Tensor]:
    """token_ids [T] int64, loss_mask [T] bool, hidden [T, A*H] and last [T, H] bfloat16 of sequence i."""
    found = sequences.stored(i, *STORED)
    hidden, last = (decode(found[name], found.get(f"{name}_scale")) for name in ("hidden", "last"))
    return {
        "token_ids": found["token_ids"].long(),
        "loss_mask": found["loss_mask"],
        "hidden": hidden.flatten(1),
        "last": last,
    }


def speculators_sample(sequences, i: int) -> dict[str, Tensor]:
    found = load(sequences, i)
    return {
        "input_ids": found["token_ids"],
        "hidden_states": found["hidden"],
        "verifier_last_hidden_states": found["last"],
        "loss_mask": found["loss_mask"],
    }


def specforge_sample(sequences, i: int, norm: Tensor, eps: float) -> dict[str, Tensor]:
    """norm [H]: the target's final norm, which SpecForge's store has already applied."""
    found = load(sequences, i)
    last = F.rms_norm(found["last"].float(), norm.shape, norm.float(), eps)
    return {
        "input_ids": found["token_ids"],
        "aux_hidden_state": found["hidden"],
        "hidden_state": last.to(torch.bfloat16),
        "loss_mask": found["loss_mask"].long(),
    }


def to_speculators(name: str) -> str:
    """A drafter tensor's name in speculators; SpecForge's names are the same as here."""
    return name.replace("midlayer.", "layers.0.", 1)


def read_export(folder: Path, d2t: Tensor) -> dict[str, Tensor]:
    """The drafter's tensors, float32, from the folder either trainer exports; the target's copies are left out.

    Raises UserError where its draft vocabulary is not the one of `d2t` [D] int64.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    theirs = tensors.pop("d2t", None)
    if theirs is None or not torch.equal(theirs.long(), d2t):
        raise UserError(f"{folder}: its d2t is missing or differs from the vocabulary it was trained with")
    return {
        name.replace("layers.0.", "midlayer.", 1): tensor.float()
        for name, tensor in tensors.items()
        if name != "t2d" and name not in COPIES
    }


def layer_config(c: DrafterConfig, **more) -> LlamaConfig:
    """The one layer of a drafter as transformers describes it; `more`: further keys of the config."""
    return LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        vocab_size=c.vocab_size,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        **more,
    )
