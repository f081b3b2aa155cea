"""Conversations turn by turn: roles by label, the first bad turn, and benchmark prompt files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from breakeven.cli import UserError

ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", "claude"), "assistant"),
    "system": "system",
}

Message = tuple[str, str]  # role, content


def walk(turns: Iterable[Any]) -> tuple[list[Message], tuple[str, str] | None]:
    """The good turns from the start, and (reason, detail) of the first bad one, None if all are good.

    A turn is {"role" or "from": a label, "content" or "value": a text}. Roles go by their label, never by position.
    """
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            return messages, ("malformed-record", f"turn {number} is a {type(turn).__name__}, not an object")
        label = turn.get("role") or turn.get("from")
        content = turn.get("content") if turn.get("content") is not None else turn.get("value")
        if not isinstance(label, str) or not isinstance(content, str):
            missing = "role" if not isinstance(label, str) else "content"
            return messages, ("malformed-record", f"turn {number} has no text as its {missing}")
        role = ROLES.get(label.strip().lower())
        if role is None:
            return messages, ("unknown-role", f"turn {number} is by {label[:40]!r}")
        if "\0" in content:
            return messages, ("nul-byte", f"turn {number}")
        if not content.strip():
            return messages, ("empty-turn", f"turn {number} ({role})")
        try:
            content.isascii() or content.encode()
        except UnicodeEncodeError:
            return messages, ("invalid-unicode", f"turn {number}")
        before = messages[-1][0] if messages else "start"
        if role == before or (role == "assistant" and before != "user") or (role == "system" and before != "start"):
            return messages, ("roles-not-alternating", f"turn {number}: {role} after {before}")
        messages.append((role, content))
    if not any(role == "user" for role, _ in messages):
        return messages, ("malformed-record", "it has no user turn")
    return messages, None


def read_benchmark_prompts(path: Path | str) -> list[dict]:
    """Read JSONL rows {"prompt_id": ..., "messages": [{"role": ..., "content": ...}, ...]}; each ends in a user turn.

    UserError, with file and row, for anything else.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text ({error})") from None
    prompts: list[dict] = []
    first: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        where = f"{path}, row {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not valid JSON ({error})") from None
        prompt_id = row.get("prompt_id") if isinstance(row, dict) else None
        if not isinstance(prompt_id, str) or not prompt_id.strip():
            raise UserError(f"{where}: the key prompt_id (a text) is missing")
        if prompt_id in first:
            raise UserError(f"{where}: prompt_id {prompt_id!r} was used in row {first[prompt_id]} already")
        if not isinstance(row.get("messages"), list) or not row["messages"]:
            raise UserError(f"{where}: the key messages (a list of turns) is missing or empty")
        messages, fault = walk(row["messages"])
        if fault:
            raise UserError(f"{where}: {fault[0]}: {fault[1]}; mend the row or take it out")
        if messages[-1][0] != "user":
            raise UserError(
                f"{where}: it ends with an {messages[-1][0]} turn, but a prompt has to end with a user turn"
            )
        first[prompt_id] = number
        prompts.append(
            {"prompt_id": prompt_id, "messages": [{"role": role, "content": text} for role, text in messages]}
        )
    if not prompts:
        raise UserError(f"{path}: it holds no prompt")
    return prompts
