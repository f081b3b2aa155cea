"""Faults planted in a served drafter, and whether the verdict names each; nothing planted, nothing named.

Every fault is put into a copy of a real checkpoint, which a real vLLM serves; the what-if walks know only the intact
checkpoint. The drafter must generalise to other prompts than its training's: one that has memorised its texts accepts
the same with wrong layers (places.DRAFTER).
"""

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml

from breakeven import artefacts, benchmark, chat, engines, servers, tables, verdict
from breakeven.engines import Speculation
from places import DRAFTER, ENGINE_PYTHON, MODEL_PYTHON, ROOT

pytestmark = pytest.mark.engines
K = 3
ENGINE = yaml.safe_load((ROOT / "config.yaml").read_text())["engines"]["vllm"]
SETTINGS = {part: ENGINE[part]["cpu"] for part in ("flags", "environment")}
QUESTIONS = [
    "What is the difference between a virus and a bacterium?",
    "Explain how a refrigerator keeps food cold.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "How do I remove duplicate lines from a text file in Python?",
    "Give me five tips for learning a new language as an adult.",
    "Why did the Roman Empire fall? Name the three most important reasons.",
    "Describe the water cycle to a ten-year-old child.",
    "What should I pack for a weekend of hiking in the mountains in October?",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "How does compound interest work? Give an example with numbers.",
    "Write a polite email that asks a colleague to send the missing report.",
    "What are the advantages and disadvantages of working from home?",
    "Explain what a hash table is and when to use one.",
    "Give a recipe for a simple vegetable soup.",
    "What causes the seasons on Earth?",
    "Write a function in JavaScript that reverses a string.",
]


def edit_config(folder: Path, **changes) -> None:
    config = artefacts.read_json(folder / "config.json")
    artefacts.write_json(folder / "config.json", config | changes)


def edit_tensor(folder: Path, name: str, change) -> None:
    """Rewrite one tensor in place; 16-bit floats are handed to `change` as uint16, d2t as int64."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + size])[name]
    start, end = (8 + size + offset for offset in entry["data_offsets"])
    kind = {"I64": np.int64, "BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}[entry["dtype"]]
    array = np.frombuffer(bytes(content[start:end]), dtype=kind).reshape(entry["shape"])
    content[start:end] = np.ascontiguousarray(change(array)).tobytes()
    path.write_bytes(content)


def shift_layers(folder: Path, step: int) -> None:
    """SmolLM2-135M has 30 layers; a drafter without ids was trained on the default ones."""
    trained = artefacts.read_json(folder / "config.json").get("eagle_aux_hidden_state_layer_ids") or [2, 15, 27]
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[k + step for k in trained])


def reverse_blocks(weight: np.ndarray) -> np.ndarray:
    """fc [H, A * H]: its columns belong to the layers in descending order."""
    return np.concatenate(np.split(weight, 3, axis=1)[::-1], axis=1)


def ten_thousand(folder: Path) -> None:
    edit_config(folder, rope_theta=10_000.0, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})


PLANTED = {
    None: lambda folder: None,
    "layers-plus-1": lambda folder: shift_layers(folder, 1),
    "layers-minus-1": lambda folder: shift_layers(folder, -1),
    "layers-reversed": lambda folder: edit_tensor(folder, "fc.weight", reverse_blocks),
    "d2t-zero": lambda folder: edit_tensor(folder, "d2t", np.zeros_like),
    "theta-10000": ten_thousand,
    # SGLang's wrong algorithm also swaps the head and drops d2t; this is the part of it that vLLM can do.
    "fc-skipped-own-head": lambda folder: edit_config(folder, eagle_config={"use_aux_hidden_state": False}),
    "norm-before-residual": lambda folder: edit_config(folder, norm_before_residual=True),
}


def pooled(outputs: list[verdict.Counts]) -> verdict.Counts:
    accepted = np.sum([counts.accepted for counts in outputs], axis=0)
    return verdict.Counts(sum(counts.steps for counts in outputs), tuple(accepted.tolist()))


# A server, 1,500 tokens and a dozen walks each: minutes on a CPU without bfloat16. The others at night.
BY_DAY = (None, "layers-plus-1", "fc-skipped-own-head")
# Tokens of each output where fewer do: a drafter that accepts nothing is soon known. The intact one's walk must take 100 steps.
SHORT = {"fc-skipped-own-head": 24}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in PLANTED]
)
def test_the_planted_fault_is_named(fault, finished, tmp_path):
    target, broken = finished / "results/target", tmp_path / "checkpoint"
    shutil.copytree(DRAFTER, broken)
    for path in broken.iterdir():
        path.chmod(0o644)
    PLANTED[fault](broken)
    (broken / "manifest.json").unlink()  # its checksums would name the change before a server starts

    engine = engines.engine("vllm")
    tokenizer = chat.load_tokenizer(target)
    prompts = [
        {"prompt_id": str(i), "token_ids": chat.render(tokenizer, [{"role": "user", "content": question}], {})}
        for i, question in enumerate(QUESTIONS)
    ]
    protocol = benchmark.Protocol("faults", max_tokens=SHORT.get(fault, 96), temperature=0)
    speculation = Speculation("eagle3", K, str(broken))
    with servers.speculating(
        engine, ENGINE_PYTHON, target, speculation, SETTINGS, set(), "cpu", tmp_path / "server.log"
    ) as server:
        client = benchmark.Client(engine, server.url, server.name, server.key)
        rows, _ = benchmark.measure(client, protocol, prompts, speculation)
    rows = [dict.fromkeys(tables.BENCHMARK.names) | row for row in rows]
    artefacts.write_table(tmp_path / "pass-1.parquet", rows, tables.BENCHMARK)
    subprocess.run(
        [MODEL_PYTHON, ROOT / "scripts/replay_served.py", "--target", target, "--checkpoint", DRAFTER, "--k", str(K)]
        + ["--served", tmp_path / "pass-1.parquet", "--out", tmp_path / "offline.parquet"]
        + ["--what-if", tmp_path / "what_if.parquet"],
        check=True,
    )

    outputs = [verdict.Counts(row["steps"], tuple(row["accepted_per_position"])) for row in rows]
    counted = artefacts.read_manifest(tmp_path / "what_if.manifest.json", "what_if")["by_output"]
    walks = {
        name: [verdict.Counts(counts[row["prompt_id"]][0], tuple(counts[row["prompt_id"]][1:])) for row in rows]
        for name, counts in counted.items()
    }
    served = pooled(outputs)
    found = verdict.integration(
        served, None, {name: pooled(counts) for name, counts in walks.items()}, verdict.paired(outputs, walks)
    )
    print(fault, served, *found.evidence, *found.fits[:4], sep="\n  ")
    if fault is None:
        assert found.rejected is False and found.faults == ()
    else:
        assert found.rejected is True
        assert found.fits[0].hypothesis == fault and fault in found.faults
