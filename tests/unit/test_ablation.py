"""The table of an ablation: differences to the first variant, paired; every variant names something that exists.

And the pool of one of them, with the target's own answers in its conversations."""

import argparse
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "train"))

import ablation
import regenerated_prefixes

from breakeven import artefacts, tables
from breakeven.cli import UserError

ROOT = Path(__file__).parents[2]


def test_every_variant_changes_something_that_exists():
    schema = yaml.safe_load((ROOT / "schemas/config.schema.yaml").read_text())
    settings = set(schema["properties"]["drafters"]["additionalProperties"]["properties"]["settings"]["properties"])
    box = (ROOT / "scripts/gpu_box.sh").read_text()
    for changes in ablation.VARIANTS.values():
        for name in changes:
            assert f"{name}:=" in box if name.isupper() else name in settings, name
    assert set(ablation.BASE) <= settings and next(iter(ablation.VARIANTS.values())) == {}


def write(folder: Path, accepted: int, sequences: int = 8) -> None:
    """A drafter whose every step accepts `accepted` of K tokens, or one more in every second sequence."""
    rows = [
        {"sequence": i, "conversation": i, "k": k, "steps": 10,
         "accepted_per_position": [10 * (p < min(k, accepted + i % 2)) for p in range(k)]}
        for k in ablation.KS for i in range(sequences)
    ]  # fmt: skip
    artefacts.write_table(folder / "offline_by_sequence.parquet", rows, tables.OFFLINE_BY_SEQUENCE)
    artefacts.write_json(folder / "checkpoint/speed.json", {"tokens_per_second": 1000.4})
    artefacts.write_manifest(
        folder / "checkpoint/manifest.json",
        "drafter",
        parameters={},
        counts={"optimizer_steps": 5},
        held_out={"loss": 2.0},
    )


def test_differences_are_paired(tmp_path):
    for name, accepted in (("base", 1), ("ttt-steps-3", 2)):
        write(tmp_path / f"drafters/{name}-100", accepted)
    base, other = ablation.rows(argparse.Namespace(folder=tmp_path, samples=100), ["base", "ttt-steps-3"])
    assert (base["al_1"], base["al_3"], other["al_3"]) == (2, 2.5, 3.5)
    assert (base["low_3"], base["high_3"]) == (0, 0)
    # Sequences differ by one, the two drafters by one in each of them: the pairing leaves no doubt about it.
    assert (other["difference_3"], other["low_3"], other["high_3"]) == (1, 1, 1)
    assert (other["optimizer_steps"], other["tokens_per_second"]) == (5, 1000)


def test_a_run_that_was_cut_off_gets_its_table(tmp_path, monkeypatch):
    """What is finished is in the table although no time is left; what is not is left out."""
    for name in ("base", "ttt-steps-3"):
        write(tmp_path / f"drafters/{name}-100", 1)
        artefacts.write_json(tmp_path / f"drafters/{name}-100/offline.manifest.json", {})
    words = f"ablation.py {tmp_path} --samples 100 --seconds 0 --out {tmp_path / 'a.csv'} --variants base epochs-1"
    monkeypatch.setattr(sys, "argv", [*words.split(), "ttt-steps-3"])
    ablation.main()
    lines = (tmp_path / "a.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["variant", "base", "ttt-steps-3"]


def test_walks_of_other_sequences_are_refused(tmp_path):
    write(tmp_path / "drafters/base-100", 1)
    write(tmp_path / "drafters/ttt-steps-3-100", 1, sequences=7)
    with pytest.raises(UserError, match="ttt-steps-3 walked other held-out sequences"):
        ablation.rows(argparse.Namespace(folder=tmp_path, samples=100), ["base", "ttt-steps-3"])


class Words:
    """A tokenizer whose token 0 is special and token n > 0 the word "wn"."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(f"w{i}" for i in ids if i)


def test_answers_are_the_first_ones_that_ended_by_themselves(tmp_path):
    about = {"held_out": False, "prompt_token_ids": [1], "n_reasoning": 0, "engine": "vllm", "sampling": "{}"}
    rows = [
        about | {"prompt_id": f"c-{turn:02d}", "sample": sample, "response_token_ids": ids, "finish_reason": reason}
        for turn, sample, ids, reason in [
            (0, 0, [5, 6, 0], "stop"),
            (0, 1, [9, 0], "stop"),
            (1, 0, [7], "length"),
            (2, 0, [0], "stop"),
        ]
    ]
    artefacts.write_table(tmp_path / "r.parquet", rows, tables.RESPONSES)
    assert regenerated_prefixes.answers(Words(), [tmp_path / "r.parquet"]) == {"c-00": "w5 w6"}


def test_an_answer_takes_the_place_of_its_own_turn_alone():
    words = [("system", "s"), ("user", "u0"), ("assistant", "a0"), ("user", "u1"), ("assistant", "a1"), ("user", "u2")]
    messages = [{"role": role, "content": content} for role, content in words]
    texts = {"c-1-01": "own", "c-1-02": "not yet", "c-00": "another conversation"}
    found, replaced = regenerated_prefixes.regenerated({"prompt_id": "c-1-02", "messages": messages}, texts)
    assert [m["content"] for m in found] == ["s", "u0", "a0", "u1", "own", "u2"] and replaced == 1
    assert messages[4]["content"] == "a1"
