"""Rendering a conversation: one place, so that curation, generation, training and serving agree."""

import os
from pathlib import Path
from typing import Any

from breakeven import artefacts
from breakeven.cli import UserError


def load_tokenizer(target: Path | str):
    """The tokenizer of a target folder (transformers); UserError without one, or without a chat template."""
    # Curation and benchmarks run without torch, on purpose; transformers would warn about it in every log.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    target = Path(target)
    if not any(target.glob("tokenizer*")) and not any(target.glob("vocab*")):
        raise UserError(f"{target}: this folder has no tokenizer (tokenizer.json); give the folder of the whole target")
    for path in target.iterdir():
        if path.suffix != ".safetensors":
            artefacts.verify(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a broken tokenizer file raises whatever its reader raises
        raise UserError(f"{target}: its tokenizer cannot be read ({str(error).splitlines()[0][:300]})") from None
    if not tokenizer.chat_template:
        raise UserError(f"{target}: its tokenizer has no chat template; set target.chat_template to a Jinja file")
    return tokenizer


def render_text(tokenizer, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> str:
    """The prompt as text, generation prompt included; ValueError where the chat template refuses the messages."""
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses it: {error}") from None


def render(tokenizer, messages: list[dict[str, str]], kwargs: dict[str, Any]) -> list[int]:
    """The prompt as token ids [n]; the template writes every special token itself."""
    return tokenizer(render_text(tokenizer, messages, kwargs), add_special_tokens=False)["input_ids"]
