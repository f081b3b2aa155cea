"""Curation of prompts: every malformed case, the counts, duplicates, leakage, order, sources."""

import json
import random
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from breakeven import artefacts, chat, conversations, prompts, selection, sources, tables
from breakeven.cli import UserError
from breakeven.wheels import wheel_folder

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "resources" / "reference-prompts.jsonl"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if think %}<think>{% endif %}"
)
WORDS = [
    "apple",
    "river",
    "stone",
    "window",
    "garden",
    "engine",
    "mirror",
    "yellow",
    "travel",
    "circle",
    "number",
    "basket",
    "winter",
    "planet",
    "silver",
    "doctor",
    "letter",
    "market",
    "bridge",
    "castle",
    "dragon",
    "forest",
    "island",
    "jacket",
    "kitchen",
    "ladder",
    "monkey",
    "needle",
    "orange",
    "pencil",
    "rabbit",
    "saddle",
    "ticket",
    "umbrella",
    "valley",
    "wagon",
    "zebra",
    "anchor",
    "butter",
    "candle",
    "desert",
    "elbow",
    "feather",
    "glacier",
    "harbor",
    "insect",
    "jungle",
    "kettle",
    "lemon",
]


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    artefacts.write_manifest(folder / "manifest.json", "target", parameters={"chat_template_kwargs": {"think": True}})
    return folder


@pytest.fixture(scope="session")
def tokenizer(target):
    return chat.load_tokenizer(target)


def text(seed, n=30) -> str:
    """English enough, and unlike any other seed's."""
    return "please tell me about " + " ".join(random.Random(seed).choices(WORDS, k=n))


def turn(role, content):
    return {"role": role, "content": content}


def talk(*contents, labels=("user", "assistant")) -> dict:
    return {"messages": [turn(labels[i % 2], content) for i, content in enumerate(contents)]}


def write_jsonl(path, rows) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def curate(tokenizer, tmp_path, rows=None, given=None, **more):
    """Curate rows (one jsonl source) or a dict {name: (weight, rows)}; returns pool rows, rejected, counts."""
    given = given or {"rows": (1, rows)}
    listed = []
    for name, (weight, own) in given.items():
        path = write_jsonl(tmp_path / f"{name}.jsonl", own)
        listed.append({"name": name, "kind": "jsonl", "path": str(path), "weight": weight})
    opened = sources.open_sources(listed, tmp_path)
    filters = dict(seed=0, languages=["any"], min_tokens=1, max_tokens=4000, near_duplicate_threshold=0.8)
    filters |= dict(held_out_fraction=0.1, benchmark_prompts=[]) | more
    pool, rejected, counts = prompts.curate(opened, tokenizer, **filters)
    assert counts["in"] == counts["kept"] + sum(counts["rejected"].values())
    assert counts["kept"] == len(pool) and sum(counts["rejected"].values()) == len(rejected.rows)
    assert [row["rank"] for row in pool] == list(range(len(pool)))
    assert len({row["prompt_id"] for row in pool}) == len(pool)
    assert all(row["messages"][-1]["role"] == "user" for row in pool)
    return pool, rejected, counts


# Records and turns


@pytest.mark.parametrize(
    ("row", "reason", "kept"),
    [
        ("{broken\n", "malformed-record", 0),
        ("[" * 100_000 + "\n", "malformed-record", 0),
        ([1, 2], "malformed-record", 0),
        ({"id": 3}, "malformed-record", 0),
        ({"messages": []}, "malformed-record", 0),
        ({"messages": {"role": "user"}}, "malformed-record", 0),
        ({"messages": [turn("system", "be kind")]}, "malformed-record", 0),
        ({"messages": [turn("user", text("a")), "next"]}, "malformed-record", 1),
        ({"messages": [{"role": "user"}]}, "malformed-record", 0),
        ({"messages": [{"content": "who"}]}, "malformed-record", 0),
        ({"messages": [turn("user", 7)]}, "malformed-record", 0),
        ({"messages": [turn("narrator", "once")]}, "unknown-role", 0),
        (talk(text("a"), "yes", labels=("assistant", "user")), "roles-not-alternating", 0),
        ({"messages": [turn("user", text("a")), turn("human", text("b"))]}, "roles-not-alternating", 1),
        ({"messages": [turn("user", text("a")), turn("gpt", "b"), turn("system", "c")]}, "roles-not-alternating", 1),
        ({"messages": [turn("system", "a"), turn("system", "b"), turn("user", "c")]}, "roles-not-alternating", 0),
        (talk(text("a"), " \n", text("b")), "empty-turn", 1),
        (talk(""), "empty-turn", 0),
        (talk(text("a"), "fine", "with \0 inside"), "nul-byte", 1),
        ({"prompt": "half a pair \ud800"}, "invalid-unicode", 0),
        (talk("tiny"), "too-short", 0),
        ({"prompt": text("a") + " word" * 20_000}, "too-long", 0),
        (talk(text("a"), "word " * 20_000, text("b"), "c", text("d")), "too-long", 1),
    ],
)
def test_a_bad_record_has_its_reason_and_its_good_prefixes_stay(tokenizer, tmp_path, row, reason, kept):
    pool, rejected, counts = curate(tokenizer, tmp_path, [row, talk(text("good"))], min_tokens=40)
    times = 2 if reason == "too-long" and kept else 1  # both later prefixes
    assert counts["rejected"] == {reason: times}
    assert all(row["source"] == "rows" and row["record"].split("/")[0] == "1" for row in rejected.rows)
    assert len(pool) == kept + 1 and counts["in"] == kept + 1 + times
    pa.Table.from_pylist(rejected.rows, schema=tables.REJECTED)


def test_a_100_kb_prompt_is_never_tokenized(tokenizer, tmp_path, monkeypatch):
    rendered = []
    render = prompts.render_text
    monkeypatch.setattr(prompts, "render_text", lambda t, m, k: rendered.append(len(str(m))) or render(t, m, k))
    curate(tokenizer, tmp_path, [{"prompt": "word " * 20_000}, talk(text(1))], max_tokens=500)
    assert rendered and max(rendered) < 4000


def test_roles_go_by_label_and_no_turn_is_lost(tokenizer, tmp_path):
    six = [text(i) for i in range(6)]
    labels = ("human", "gpt", "user", "chatgpt", "Human", "bing")
    rows = [
        {"conversations": [{"from": label, "value": value} for label, value in zip(labels, six, strict=True)]},
        {"conversations": [{"from": "system", "value": "You are brief."}, {"from": "human", "value": text("s")}]},
        {"conversations": [{"from": "gpt", "value": text("g")}, {"from": "human", "value": text("h")}]},
    ]
    pool, rejected, _ = curate(tokenizer, tmp_path, rows)
    by_length = {len(row["messages"]): row for row in pool}
    roles = ["user", "assistant"] * 3
    assert by_length[5]["messages"] == [turn(role, content) for role, content in zip(roles[:5], six[:5], strict=True)]
    assert by_length[2]["messages"] == [turn("system", "You are brief."), turn("user", text("s"))]
    assert sorted(by_length) == [1, 2, 3, 5] and len(pool) == 4
    assert [(row["record"], row["reason"]) for row in rejected.rows] == [("3", "roles-not-alternating")]
    first, second, third = (by_length[n]["prompt_id"] for n in (1, 3, 5))
    assert first.split("-")[0] == second.split("-")[0] == third.split("-")[0]
    assert [name.split("-")[1] for name in (first, second, third)] == ["00", "01", "02"]


def test_in_is_kept_plus_rejected_for_any_garbage(tokenizer, tmp_path):
    draw = random.Random(5)
    contents = ["", " ", "\0", "\ud800", "ok", "再见", None, 3, [], "go on", "word " * 900] + [
        text(i) for i in range(12)
    ]
    labels = ["user", "human", "gpt", "assistant", "system", "tool", None, 4]

    def garbage():
        kind = draw.random()
        if kind < 0.1:
            return draw.choice(
                ["{", "null\n", "3\n", '"a"\n', "[]\n", "\n", '{"prompt": null}\n', '{"messages": "x"}\n']
            )
        if kind < 0.2:
            return {"prompt": draw.choice(contents)}
        good = draw.random() < 0.6
        turns = []
        for i in range(draw.randrange(7)):
            label = ("user", "gpt")[i % 2] if good else draw.choice(labels)
            turns.append(draw.choice([{"from": label, "value": draw.choice(contents)}] * 9 + ["x", None, {}]))
        return {draw.choice(["messages", "conversations"]): turns}

    for number in range(15):
        rows = [row if not isinstance(row, str) else row.rstrip("\n") + "\n" for row in (garbage() for _ in range(60))]
        _, rejected, counts = curate(
            tokenizer,
            tmp_path,
            [*rows, talk(text("x", 50))],
            languages=["en"],
            min_tokens=12,
            max_tokens=300,
            seed=number,
        )
        assert counts["in"] >= sum(bool(row.strip()) if isinstance(row, str) else True for row in rows)
        assert len({(row["record"], row["reason"]) for row in rejected.rows}) == len(rejected.rows)


# Filters


def test_n_tokens_is_the_length_of_the_rendered_prompt(tokenizer, tmp_path):
    rows = [talk(text(1), "an <|im_end|> inside", text(2), "z " * 40, text(3)), talk(text(4) + "\n\n  ")]
    pool, _, _ = curate(tokenizer, tmp_path, rows, chat_template_kwargs={"think": True})
    assert len(pool) == 4
    for row in pool:
        rendered = tokenizer.apply_chat_template(
            row["messages"], tokenize=False, add_generation_prompt=True, think=True
        )
        assert rendered.endswith("assistant\n<think>")
        assert row["n_tokens"] == len(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def test_pieces_that_do_not_add_up_are_tokenized_whole(tokenizer):
    class Shifty:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        def __call__(self, texts, **_):  # a tokenizer that adds a token at the start of each text
            return {"input_ids": [[0, *ids] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]}

    sample = ["<|im_start|>user\nabc<|im_end|>\n"]
    counter = prompts.TokenCounter(Shifty(), sample)
    assert not counter.exact and prompts.TokenCounter(tokenizer, sample).exact
    assert counter.count(sample) == [len(Shifty()(sample)["input_ids"][0])]


def test_a_template_that_refuses_a_prompt_rejects_it(target, tmp_path):
    strict = chat.load_tokenizer(target)
    strict.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    rows = [{"messages": [turn("system", "be kind"), turn("user", text(1))]}, talk(text(2))]
    pool, rejected, _ = curate(strict, tmp_path, rows)
    assert len(pool) == 1 and [row["reason"] for row in rejected.rows] == ["chat-template"]


@pytest.mark.parametrize(
    ("contents", "english"),
    [
        (["What is the capital of Denmark and how many people live there?"], True),
        (["Quelle est la capitale du Danemark et combien de personnes y habitent ?"], False),
        (["다음 문장을 영어로 번역해 주세요. 감사합니다."], False),
        (["continue"], True),
        (["2+2=?"], True),
        (["Erzähl mir bitte etwas über die Geschichte der Stadt Hamburg", "Gern ...", "ok"], False),
        (["Fix this:\n```\nfunción = montaña + señor + mañana\n```\nWhy does it fail to compile?"], True),
        (["Why does this crash? def f(x): return {k: v for k, v in x.items()} https://example.org/un/deux"], True),
    ],
)
def test_language(tokenizer, tmp_path, contents, english):
    pool, rejected, _ = curate(tokenizer, tmp_path, [talk(*contents), talk(text(1))], languages=["en"])
    assert any(row["messages"][-1]["content"] == contents[-1] for row in pool) == english
    assert {row["reason"] for row in rejected.rows} == (set() if english else {"language"})
    assert {row["language"] for row in pool} == {"en"}


# Duplicates, leakage


def test_exact_duplicates_are_found_through_case_width_and_space(tokenizer, tmp_path):
    rows = [
        talk("ABC  one two\nthree four"),
        talk("abc one two three four "),
        talk("ＡＢＣ one two three four"),
        talk("abc"),
    ]
    pool, rejected, counts = curate(tokenizer, tmp_path, rows)
    assert counts["rejected"] == {"duplicate": 2} and len(pool) == 2
    kept = next(row for row in pool if "one" in row["messages"][0]["content"])
    assert all(kept["prompt_id"] in row["detail"] for row in rejected.rows)


def test_of_near_duplicates_the_best_rank_survives_in_any_file_order(tokenizer, tmp_path):
    base = text("base", 100)
    variants = [talk(base + f" and {word}") for word in WORDS[:8]]
    alone = {}
    for variant in variants:  # the key of each variant when nothing competes
        words = variant["messages"][0]["content"]
        digest = prompts.hashlib.blake2b(f"user\0{prompts.normalize(words)}\0".encode(), digest_size=16).digest()
        alone[words] = prompts.uniform("rank", 0, digest)
    best = min(alone, key=alone.get)
    others = [talk(text(i)) for i in range(5)]
    for seed in range(3):
        rows = variants + others
        random.Random(seed).shuffle(rows)
        pool, _, counts = curate(tokenizer, tmp_path, rows)
        assert counts["rejected"] == {"near-duplicate": 7} and len(pool) == 6
        assert [c for row in pool if (c := row["messages"][0]["content"]) in alone] == [best]


def test_what_is_only_alike_stays(tokenizer, tmp_path):
    base = text("base", 60).split()
    half = base[:30] + text("other", 60).split()[30:]
    pool, _, _ = curate(tokenizer, tmp_path, [talk(" ".join(base)), talk(" ".join(half)), talk("c++?"), talk("c#?")])
    assert len(pool) == 4


def test_prefixes_of_one_conversation_are_no_duplicates_of_each_other(tokenizer, tmp_path):
    pool, _, _ = curate(tokenizer, tmp_path, [talk(text(1, 200), "yes", "go on", "well", "go on please")])
    assert len(pool) == 3


def test_forks_of_a_conversation_are_near_duplicates_by_their_whole_text(tokenizer, tmp_path):
    rows = [talk(text("long", 380), text("shared", 80), text(tail, 24)) for tail in ("one", "two")]
    _, rejected, counts = curate(tokenizer, tmp_path, rows)
    assert counts["rejected"] == {"duplicate": 1, "near-duplicate": 1}
    assert {row["record"][1:] for row in rejected.rows if row["reason"] == "near-duplicate"} == {"/1"}


BENCHMARK = [
    {"prompt_id": "long", "messages": [turn("user", text("secret", 60))]},
    {"prompt_id": "short", "messages": [turn("user", "Write a haiku about an old red bicycle in winter")]},
    {"prompt_id": "tiny", "messages": [turn("user", "Tell a joke!")]},
]


@pytest.mark.parametrize(
    ("contents", "dropped"),
    [
        ([text("secret", 60)], [0]),
        (["Here is a task: " + " ".join(text("secret", 60).upper().split()[20:34]) + " ok?"], [0]),
        ([text(1), "You asked: " + text("secret", 60), text(2)], [1]),
        (["write a haiku about an old blue bicycle in winter, please."], []),
        (["Could you write a haiku about an old red bicycle today"], [0]),
        (["Write a haiku about a sleepy cat"], []),
        (["tell a joke"], [0]),
        (["tell a joke about some horses"], []),
        ([text(3), "ok", "tell a joke"], []),
        (["Here is a task: " + " ".join(text("secret", 60).split()[20:30]) + " ok?"], []),
    ],
)
def test_overlap_with_a_benchmark_prompt(tokenizer, tmp_path, contents, dropped):
    rows = [talk(*contents), talk(text("other"))]
    pool, rejected, _ = curate(tokenizer, tmp_path, rows, benchmark_prompts=BENCHMARK)
    assert [row["record"] for row in rejected.rows] == [f"1/{number}" for number in dropped]
    assert {row["reason"] for row in rejected.rows} <= {"overlaps-benchmark"}


# Order


def many(count, offset=0):
    return [talk(text(i), text(-i - 1, 5), text(i + 10_000, 8)) for i in range(offset, offset + count)]


def test_the_pool_does_not_depend_on_file_order_and_depends_on_the_seed(tokenizer, tmp_path):
    rows = many(60) + many(20)  # 20 doubled
    first, _, _ = curate(tokenizer, tmp_path, rows)
    random.Random(1).shuffle(rows)
    second, _, _ = curate(tokenizer, tmp_path, rows)
    assert first == second and len(first) == 120
    other, _, _ = curate(tokenizer, tmp_path, rows, seed=1)
    assert {row["prompt_id"] for row in other} == {row["prompt_id"] for row in first}
    assert [row["prompt_id"] for row in other] != [row["prompt_id"] for row in first]


def test_weights_decide_the_mix_and_not_the_order_within_a_source(tokenizer, tmp_path):
    small, large = many(100), many(300, offset=1000)
    pool, _, _ = curate(tokenizer, tmp_path, given={"small": (1, small), "large": (3, large)})
    share = Counter(row["source"] for row in pool[:200])
    assert 0.65 < share["large"] / 200 < 0.85  # a share of 3/4, four standard deviations
    even, _, _ = curate(tokenizer, tmp_path, given={"small": (1, small), "large": (1, large)})
    assert 0.36 < Counter(row["source"] for row in even[:200])["large"] / 200 < 0.64
    alone, _, _ = curate(tokenizer, tmp_path, given={"large": (1, large)})
    ids = [row["prompt_id"] for row in alone]
    for mixed in (pool, even):
        assert [row["prompt_id"] for row in mixed if row["source"] == "large"] == ids


def test_held_out_goes_by_conversation_and_by_opening(tokenizer, tmp_path):
    rows = many(300) + [talk(text(0), "another answer", text("fork"))]
    pool, _, counts = curate(tokenizer, tmp_path, rows, held_out_fraction=0.2)
    by_opening = {}
    for row in pool:
        by_opening.setdefault(row["messages"][0]["content"], set()).add(row["held_out"])
    assert all(len(values) == 1 for values in by_opening.values()) and len(by_opening) == 300
    assert 0.12 < counts["held_out"] / len(pool) < 0.28
    smaller, _, _ = curate(tokenizer, tmp_path, many(100), held_out_fraction=0.2)
    whole = {row["prompt_id"]: row["held_out"] for row in pool}
    assert all(whole[row["prompt_id"]] == row["held_out"] for row in smaller)


# Sources


def test_a_json_array_that_is_cut_off_keeps_every_whole_record(tokenizer, tmp_path):
    whole = json.dumps([talk(text(i)) for i in range(5)], indent=1)
    cut = whole[: whole.rindex("please")]
    path = tmp_path / "cut.json"
    path.write_text(cut)
    opened = sources.open_sources([{"name": "cut", "kind": "sharegpt", "path": str(path)}], tmp_path)
    records = list(opened[0].records())
    assert [record.turns is not None for record in records] == [True] * 4 + [False]
    assert records[-1].reason == "truncated" and records[-1].place == "4"
    lost = len(cut) - len(whole[: whole.rindex('{\n  "messages"')])
    assert opened[0].lost == {"records": 1, "bytes": lost} and str(lost) in records[-1].detail


def test_bad_bytes_in_a_json_array_cost_only_their_turn(tokenizer, tmp_path):
    path = tmp_path / "bytes.json"
    path.write_bytes(json.dumps([talk("XX"), talk(text(1))]).encode().replace(b"XX", b"\xff\xfe"))
    opened = sources.open_sources([{"name": "a", "kind": "sharegpt", "path": str(path)}], tmp_path)
    faults = [conversations.walk(record.turns)[1] for record in opened[0].records()]
    assert faults[0][0] == "invalid-unicode" and faults[1] is None


def test_every_kind_gives_the_same_prompts(tokenizer, tmp_path):
    rows = many(6)
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    data = tmp_path / "repo" / "data"
    data.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows[:3]), data / "train-00000-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(rows[3:]), data / "train-00001-of-00002.parquet")
    pq.write_table(pa.Table.from_pylist(many(2, 500)), data / "test-00000-of-00001.parquet")
    wheel = tmp_path / "some_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_data/__init__.py", "raise RuntimeError('nothing may import this')")
        archive.writestr("some_data/rows.json", json.dumps(rows))
        archive.writestr("some_data-1.0.dist-info/extra.json", "{}")
    each = [
        {"kind": "jsonl", "path": str(tmp_path / "a.jsonl")},
        {"kind": "parquet", "path": str(tmp_path / "a.parquet")},
        {"kind": "sharegpt", "path": str(tmp_path / "a.json")},
        {"kind": "hub", "repo": str(tmp_path / "repo"), "split": "train"},
        {"kind": "wheel", "package": str(wheel)},
        {"kind": "wheel", "package": str(wheel), "file": "some_data/*.json"},
    ]
    found = []
    for source in each:
        opened = sources.open_sources([{"name": "x", "weight": 1, **source}], tmp_path / "cache")
        assert str(tmp_path) not in json.dumps(opened[0].described)
        found.append([[dict(message) for message in record.turns] for record in opened[0].records()])
    assert all(turns == [row["messages"] for row in rows] for turns in found)


def test_a_wheel_is_unpacked_once_and_its_lack_is_told(tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a.txt", "x")
    folder = wheel_folder(str(wheel), tmp_path / "cache")
    wheel.unlink()
    assert wheel_folder(str(wheel), tmp_path / "cache") == folder and (folder / "a.txt").read_text() == "x"
    broken = tmp_path / "b-1-py3-none-any.whl"
    broken.write_text("no zip")
    for bad, said in ((str(broken), "not a readable wheel"), ("no such==name==1", "cannot be had")):
        with pytest.raises(UserError, match=said):
            wheel_folder(bad, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "a list with at least one source"),
        ([], "a list with at least one source"),
        (["x"], r"sources\[0\]"),
        ([{"kind": "jsonl"}], "the key name"),
        ([{"name": "a", "kind": "csv"}], "unknown kind 'csv'"),
        ([{"name": "a", "kind": "jsonl", "path": "x", "weight": 0}], "weight is 0"),
        ([{"name": "a", "kind": "jsonl", "path": "x", "weight": True}], "weight is True"),
        ([{"name": "a", "kind": "jsonl"}], "the key path is missing"),
        ([{"name": "a", "kind": "jsonl", "path": "x", "pth": "y"}], "unknown key 'pth'"),
        ([{"name": "a", "kind": "jsonl", "path": 3}], "a text is needed"),
        ([{"name": "a", "kind": "jsonl", "path": "gone.jsonl"}], "gone.jsonl: no such file"),
        ([{"name": "a", "kind": "hub", "repo": "no/folder"}], "the key revision is missing"),
    ],
)
def test_a_bad_source_is_named(tmp_path, given, said):
    with pytest.raises(UserError, match=said):
        sources.open_sources(given, tmp_path)


def test_bad_files_and_empty_pools_are_told(tokenizer, tmp_path):
    path = tmp_path / "x.parquet"
    path.write_text("not parquet")
    opened = sources.open_sources([{"name": "a", "kind": "parquet", "path": str(path)}], tmp_path)
    with pytest.raises(UserError, match="not a readable Parquet file"):
        list(opened[0].records())
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(UserError, match="none of the columns messages, conversations, prompt, but text"):
        list(opened[0].records())
    with pytest.raises(UserError, match=r"no prompt of the sources is left.*1 too-short"):
        curate(tokenizer, tmp_path, [talk("hi")], min_tokens=100)
    with pytest.raises(UserError, match="holds no record"):
        curate(tokenizer, tmp_path, ["\n"])
    with pytest.raises(UserError, match="language 'english'"):
        curate(tokenizer, tmp_path, [talk("hi")], languages=["english"])
    with pytest.raises(UserError, match="min tokens 9 and max tokens 3"):
        curate(tokenizer, tmp_path, [talk("hi")], min_tokens=9, max_tokens=3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="has no tokenizer"):
        chat.load_tokenizer(tmp_path / "empty")


# Benchmark prompts, sizes, command line


def test_the_reference_prompts_are_read():
    rows = conversations.read_benchmark_prompts(REFERENCE)
    assert [row["prompt_id"] for row in rows] == ["explain", "code", "story", "reasoning", "plan"]
    assert all([message["role"] for message in row["messages"]] == ["user"] for row in rows)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{oops\n", "row 2: not valid JSON"),
        ("[]\n", "row 2: the key prompt_id"),
        ({"messages": [turn("user", "x")]}, "row 2: the key prompt_id"),
        ({"prompt_id": "a", "messages": [turn("user", "x")]}, "row 2: prompt_id 'a' was used in row 1"),
        ({"prompt_id": "b"}, "row 2: the key messages"),
        ({"prompt_id": "b", "messages": [turn("user", " ")]}, "row 2: empty-turn"),
        ({"prompt_id": "b", "messages": [turn("user", "a\0")]}, "row 2: nul-byte"),
        (
            {"prompt_id": "b", "messages": [turn("user", "a"), turn("assistant", "b")]},
            "row 2: it ends with an assistant",
        ),
    ],
)
def test_a_bad_benchmark_prompt_is_named_by_its_row(tmp_path, row, said):
    path = write_jsonl(tmp_path / "b.jsonl", [{"prompt_id": "a", "messages": [turn("user", "x")]}, row])
    with pytest.raises(UserError, match=said):
        conversations.read_benchmark_prompts(path)


def test_asking_for_more_than_there_is_says_what_would_give_more():
    selection.check_size(31, 31)
    with pytest.raises(UserError, match=r"100 prompts .* holds 31: .*samples_per_prompt 7 in place of 2 .*add sources"):
        selection.check_size(31, 100, samples_per_prompt=2)
    with pytest.raises(UserError, match="at least one"):
        selection.check_size(31, 0)


@pytest.mark.parametrize(
    "split, said",
    [
        (
            (20299, 2261, 4, 88_000),
            "88000 training samples are asked for, .* 20299 prompts .* 4 responses each, give 81196",
        ),
        ((20, 0, 1, 0), "20 of the prompts train and 0 are held out"),
        ((0, 20, 1, 0), "0 of the prompts train and 20 are held out"),
    ],
)
def test_prompts_that_cannot_train_or_judge_a_drafter_are_refused(split, said):
    selection.check_split(22_000, 560, 4, 88_000)
    with pytest.raises(UserError, match=said):
        selection.check_split(*split)


def script(name, *arguments):
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_from_the_command_line(target, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [*many(20), "{broken\n"])
    out, rejected = tmp_path / "out" / "pool.parquet", tmp_path / "out" / "rejected.parquet"
    arguments = ["--target", target, "--benchmark-prompts", REFERENCE, "--out", out, "--rejected", rejected]
    arguments += ["--languages", "any", "--cache", tmp_path / "cache", "--sources"]
    given = json.dumps([{"name": "rows", "kind": "jsonl", "path": str(path), "weight": 2}])
    done = script("curate_prompts.py", *arguments, given)
    assert done.returncode == 0, done.stderr
    manifest = artefacts.read_manifest(tmp_path / "out" / "pool.manifest.json", "prompts")
    assert manifest["counts"]["kept"] == 40 and manifest["counts"]["rejected"] == {"malformed-record": 1}
    assert manifest["counts"]["sources"]["rows"]["in"] == 41 and str(tmp_path) not in json.dumps(manifest)
    pool = artefacts.read_table(out, tables.PROMPTS)
    assert pool["rank"].to_pylist() == list(range(40)) and artefacts.read_table(rejected, tables.REJECTED).num_rows == 1

    before = out.read_bytes(), (tmp_path / "out" / "pool.manifest.json").read_bytes()
    assert script("curate_prompts.py", *arguments, given).returncode == 0
    assert before == (out.read_bytes(), (tmp_path / "out" / "pool.manifest.json").read_bytes())

    chosen = tmp_path / "out" / "selection.json"
    select = ["--pool", out, "--target", target, "--max-tokens", 100, "--hidden-states", tmp_path / "states"]
    (target / "config.json").write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 8}))
    assert script("select_prompts.py", *select, "--size", 30, "--out", chosen).returncode == 0
    counts = artefacts.read_manifest(chosen, "selection")["counts"]
    held_out, tokens = sum(pool["held_out"].to_pylist()[:30]), sum(pool["n_tokens"].to_pylist()[:30])
    per_token = 4 * 64 * 2 + 9
    assert counts == {
        "size": 30,
        "held_out": held_out,
        "training": 30 - held_out,
        "pool": 40,
        "hidden_state_bytes_at_most": (tokens + 30 * 100) * per_token,
        "hidden_state_bytes_per_token": per_token,
    }
    done = script("select_prompts.py", *select, "--size", 41, "--out", tmp_path / "more.json")
    assert done.returncode == 1 and "holds 40" in done.stderr and not (tmp_path / "more.json").exists()
    refused = (
        (["--samples", 31], "31 training samples are asked for"),
        (["--layers", "0,2,4"], "numbers between 1 and 8"),
    )
    for more, said in refused:
        done = script("select_prompts.py", *select, "--size", 30, *more, "--out", tmp_path / "more.json")
        assert done.returncode == 1 and said in done.stderr and not (tmp_path / "more.json").exists()
    (target / "config.json").write_text(json.dumps({"hidden_size": 10**12, "num_hidden_layers": 8}))
    done = script("select_prompts.py", *select, "--size", 30, "--out", tmp_path / "more.json")
    assert done.returncode == 1 and " GB are free" in done.stderr and not (tmp_path / "more.json").exists()


def test_broken_sources_leave_nothing(target, tmp_path):
    out, rejected = tmp_path / "no.parquet", tmp_path / "rejected.parquet"
    arguments = ["--target", target, "--out", out, "--rejected", rejected, "--sources", "[{]"]
    done = script("curate_prompts.py", *arguments)
    assert done.returncode == 1 and "not valid JSON" in done.stderr and not out.exists()
