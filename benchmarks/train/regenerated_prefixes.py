"""A pool whose prompts hold the target's own answers in place of those that the conversations came with.

    regenerated_prefixes.py --target BOX/target --pool BOX/prompts/pool.parquet \\
        --responses BOX/responses/shard-*.parquet --out OTHER/prompts/pool.parquet

An assistant turn becomes the target's first response to the prompt that ends before it, where the responses have one that came
to its end; others stay. Each was made behind the turns that the conversation came with. For the variant regenerated-prefixes of
ablation.py: generate and extract from the new pool in a folder of its own, whose hidden states are then linked
as hidden_states_regenerated.
"""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from breakeven import artefacts, chat, cli, tables, target  # noqa: E402


def answers(tokenizer, shards: list[Path]) -> dict[str, str]:
    """prompt_id -> text of the first response to it, of those that ended by themselves."""
    found = {}
    for path in shards:
        rows = artefacts.read_table(path, tables.RESPONSES).select(
            ["prompt_id", "sample", "finish_reason", "response_token_ids"]
        )
        for prompt_id, sample, reason, ids in zip(*(column.to_pylist() for column in rows.columns), strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True).strip() if (sample, reason) == (0, "stop") else ""
            if text:
                found[prompt_id] = text
    return found


def regenerated(prompt: dict, texts: dict[str, str]) -> tuple[list[dict[str, str]], int]:
    """(messages of a prompt with the answers put in, how many)."""
    conversation, messages, turn, replaced = prompt["prompt_id"].rpartition("-")[0], [], -1, 0
    for message in prompt["messages"]:
        turn += message["role"] == "user"
        text = texts.get(f"{conversation}-{turn:02d}") if message["role"] == "assistant" else None
        replaced += text is not None
        messages.append({"role": message["role"], "content": message["content"] if text is None else text})
    return messages, replaced


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--target", type=Path, required=True, help="the target's folder: its tokenizer and template")
    parser.add_argument("--pool", type=Path, required=True, help="the pool that the responses answer")
    parser.add_argument("--responses", type=Path, nargs="+", required=True, help="shards of responses")
    parser.add_argument("--out", type=Path, required=True, help="the new pool, Parquet")
    args = parser.parse_args()

    tokenizer = chat.load_tokenizer(args.target)
    kwargs = target.read_manifest(args.target)["parameters"]["chat_template_kwargs"]
    texts = answers(tokenizer, args.responses)
    pool = artefacts.read_table(args.pool, tables.PROMPTS).to_pylist()
    turns = replaced = 0
    for prompt in pool:
        prompt["messages"], number = regenerated(prompt, texts)
        turns, replaced = turns + sum(m["role"] == "assistant" for m in prompt["messages"]), replaced + number
        if number:
            prompt["n_tokens"] = len(chat.render(tokenizer, prompt["messages"], kwargs))
    artefacts.write_table(args.out, pool, tables.PROMPTS)
    manifest = artefacts.read_manifest(artefacts.manifest_path(args.pool), "prompts")
    artefacts.write_manifest(
        artefacts.manifest_path(args.out),
        "prompts",
        parameters=manifest["parameters"],
        inputs={"target": args.target / "manifest.json", "pool": args.pool}
        | {f"responses {path.name}": path for path in args.responses},
        counts=manifest["counts"] | {"assistant_turns": turns, "regenerated_turns": replaced},
        versions={name: version(name) for name in ("transformers", "tokenizers")},
        outputs=artefacts.hashes(args.out),
    )
    cli.logger.info("%d of %d assistant turns are the target's own", replaced, turns)


if __name__ == "__main__":
    cli.run(main)
