"""Rendering a conversation to token ids: one place, so that curation, generation, training and serving agree."""

from pathlib import Path
from typing import Any

from breakeven.cli import UserError


def load_tokenizer(folder: Path | str):
    """The target's tokenizer (transformers); a folder without one is a UserError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no tokenizer can be loaded ({str(error).splitlines()[0]})") from None
    if tokenizer.chat_template is None:
        raise UserError(f"{folder}: the tokenizer has no chat template; set target.chat_template to a Jinja file")
    return tokenizer


def render(tokenizer, messages: list[dict[str, str]], chat_template_kwargs: dict[str, Any]) -> list[int]:
    """Token ids [n] of a conversation with the generation prompt at its end."""
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
    )
    return list(encoded["input_ids"])
