"""How many prompts an experiment takes from the pool, and whether they and their hidden states fit."""

import shutil
from pathlib import Path

from breakeven.cli import UserError


def check_size(available: int, asked: int, samples_per_prompt: int = 1) -> None:
    """UserError if the pool has fewer prompts than asked for; it says how many there are and what would give more."""
    if asked < 1:
        raise UserError(f"size {asked}: at least one prompt is needed")
    if asked > available:
        samples = -(-asked * samples_per_prompt // max(available, 1))
        raise UserError(
            f"{asked} prompts are asked for, but the pool holds {available}: ask for at most {available}, with"
            f" samples_per_prompt {samples} in place of {samples_per_prompt} for as many responses, or add sources or"
            " loosen the filters (languages, min and max tokens, near-duplicate threshold) and curate again"
        )


def check_split(training: int, held_out: int, samples_per_prompt: int, samples: int) -> None:
    """UserError if the prompts, `training` and `held_out` ones, cannot give `samples` training samples or judge a drafter."""
    if not training or not held_out:
        raise UserError(
            f"{training} of the prompts train and {held_out} are held out, and both are needed: raise prompts.size, or change"
            " prompts.held_out_fraction"
        )
    if training * samples_per_prompt < samples:
        raise UserError(
            f"{samples} training samples are asked for, but the {training} prompts that are not held out, with"
            f" {samples_per_prompt} responses each, give {training * samples_per_prompt}: lower drafters.NAME.samples or"
            " data_curve.samples, or raise prompts.size or responses.samples_per_prompt"
        )


def first_samples(training: list[int], samples: int | None) -> list[int]:
    """The first `samples` of the training sequences, all if None; so smaller sets lie inside larger ones."""
    if samples is not None and samples > len(training):
        raise UserError(
            f"{samples} training samples are asked for, but there are {len(training)} outside the held-out prompts:"
            " lower drafters.NAME.samples, or raise prompts.size or responses.samples_per_prompt"
        )
    return training[:samples]


def bytes_per_token(hidden_size: int, n_layers: int, codec: str = "bfloat16") -> int:
    """Storage of the hidden states of one token: n_layers features and the last state, its id, greedy successor and mask.

    Kimi-K2.5: (3 + 1) * 7168 * 2 = 57,344 and 9; int8 takes (3 + 1) * (7168 + 4) and 9; "none" stores nothing.
    """
    if codec == "none":
        return 0
    per_layer = {"bfloat16": 2 * hidden_size, "int8": hidden_size + 4}[codec]
    return (n_layers + 1) * per_layer + 4 + 4 + 1


def most_hidden_state_bytes(prompt_tokens: int, responses: int, max_tokens: int, samples: int, per_token: int) -> int:
    """What the hidden states take at most: every response as long as it may be. prompt_tokens: of all prompts."""
    return (prompt_tokens * samples + responses * max_tokens) * per_token


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise a UserError where `needed` more bytes do not fit on the file system of `folder`."""
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"{folder}: {what} would take {needed / 1e9:.2f} GB and {free / 1e9:.2f} GB are free;"
            " free some space, ask for fewer prompts (prompts.size) or shorter responses (responses.sampling.max_tokens)"
        )
