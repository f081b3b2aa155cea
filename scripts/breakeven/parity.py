"""Which layers of the target an engine really captures: its hidden states against those of transformers.

Neighbouring layers differ little, so no tolerance decides: the layer that is claimed must be the nearest of all.
"""

from typing import Any

import torch
from torch import Tensor

from breakeven import hidden_states, target
from breakeven.cli import UserError


def reference(folder, sequences: list[list[int]], device: str, dtype: str = "bfloat16") -> Tensor:
    """Hidden states [T, N + 1, H] of all sequences, one behind the other: the inputs of layers 0 ... N - 1, and the output."""
    model = target.load_model(folder, device, dtype)
    capture = hidden_states.Capture(model, list(range(model.config.get_text_config().num_hidden_layers + 1)))
    parts = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=device)
        parts.append(capture(ids, torch.tensor([len(sequence)], device=device)).features[0].cpu())
    return torch.cat(parts)


def difference(a: Tensor, b: Tensor) -> float:
    """Median over positions of |a - b| / |b|, a and b [T, H]; some positions have norms a thousand times the others'."""
    a, b = a.float(), b.float()
    return ((a - b).norm(dim=-1) / b.norm(dim=-1)).median().item()


def compare(
    captured: Tensor, layers: list[int], known: Tensor, exact: Tensor, stored: Tensor | None
) -> list[dict[str, Any]]:
    """One row for each claimed layer.

    captured [T, A, H]: what the engine gave for `layers`; known and exact [T, N + 1, H]: transformers in bfloat16 and in
    float32; stored [T, A, H]: what the drafter is trained on. nearest: the layer whose input is nearest to what was
    captured; difference: to the claimed layer; next_layer: to the nearest of the other layers; floor: of bfloat16
    to float32 in transformers, what rounding alone makes; stored: between what is trained on and what was captured.
    """
    rows = []
    for slot, layer in enumerate(layers):
        distances = [difference(captured[:, slot], known[:, k]) for k in range(known.shape[1])]
        rows.append(
            {
                "layer": layer,
                "nearest": min(range(len(distances)), key=distances.__getitem__),
                "difference": distances[layer],
                "next_layer": min(d for k, d in enumerate(distances) if k != layer),
                "floor": difference(known[:, layer], exact[:, layer]),
                "stored": None if stored is None else difference(stored[:, slot], captured[:, slot]),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a table in Markdown, differences in percent."""
    lines = ["| layer | nearest | difference | next layer | bf16 floor | stored |", "|---|---|---|---|---|---|"]
    for row in rows:
        shown = [row[key] for key in ("difference", "next_layer", "floor", "stored")]
        cells = ["-" if value is None else f"{100 * value:.2f} %" for value in shown]
        lines.append(f"| {row['layer']} | {row['nearest']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def refuse_other_layers(rows: list[dict[str, Any]], engine: str) -> None:
    """UserError where the engine captures another layer than the claimed one, or the store holds another."""
    wrong = [row for row in rows if row["nearest"] != row["layer"]]
    if wrong:
        found = ", ".join(f"{row['nearest']} for {row['layer']}" for row in wrong)
        raise UserError(
            f"{engine} captures other layers than the drafter is trained on: {found} (k stands for the input of layer k); its"
            " layer ids mean something else than breakeven/conventions.py says, so a drafter would be served wrong features"
        )
    wrong = [row for row in rows if row["stored"] is not None and row["stored"] > row["next_layer"]]
    if wrong:
        raise UserError(
            f"the stored hidden states of layer {wrong[0]['layer']} are {wrong[0]['stored']:.1%} from what {engine} captures,"
            f" farther than another layer's ({wrong[0]['next_layer']:.1%}); extract them again"
        )
