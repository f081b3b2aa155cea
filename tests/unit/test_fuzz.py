"""Whatever a file from elsewhere holds: a result or a UserError, never another exception, never a hang.

BREAKEVEN_FUZZ=5000 draws that many random examples for each test, in place of the few and fixed ones.
"""

import contextlib
import copy
import json
import os
import signal
import tempfile
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from breakeven import benchmark, conversations, diagnose, engines, headers, preflight, sources, wheels
from breakeven.cli import UserError
from breakeven.engines import Reply
from factory import FAMILIES, good

EXAMPLES = int(os.environ.get("BREAKEVEN_FUZZ", 0))
settings.register_profile(
    "files",
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("files")
HANG_S = 60

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-3, 200), st.floats(), st.text(max_size=12)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
# What is nearly right reaches further than noise.
DAMAGE = st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 255)), max_size=6)


@pytest.fixture(autouse=True)
def no_hang():
    """SIGALRM ends a test that stands still."""

    def stop(*_):
        raise TimeoutError("an example took too long")

    signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)


@contextlib.contextmanager
def allowed():
    """A UserError with a message is an answer; anything else fails the test."""
    signal.alarm(HANG_S)
    try:
        yield
    except UserError as error:
        assert str(error).strip()
    signal.alarm(0)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture(scope="module")
def pairs(folder):
    """A good drafter and target of each family, to be damaged."""
    return {family: good(folder / family, family) for family in FAMILIES}


def damaged(content: bytes, damage, cut: int | None) -> bytes:
    """Bytes of a file with some overwritten and the end cut off."""
    changed = bytearray(content[: None if cut is None else cut % (len(content) + 1)])
    for place, value in damage:
        if changed:
            changed[place % len(changed)] = value
    return bytes(changed)


def places(tree, path=()):
    """Every key and index of a JSON value, as paths."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def replaced(tree, changes):
    """A JSON value with other values at some of its places."""
    tree = copy.deepcopy(tree)
    for place, value in changes:
        paths = places(tree)
        if not paths:
            return value
        *parents, last = paths[place % len(paths)]
        at = tree
        for key in parents:
            at = at[key]
        at[last] = value
    return tree


CHANGES = st.lists(st.tuples(st.integers(0, 2**32), JSON), min_size=1, max_size=3)
KEYS = (
    "eagle_aux_hidden_state_layer_ids", "eagle_config", "target_hidden_size", "num_aux_hidden_states", "rope_scaling",
    "quantization_config", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "bias", "text_config",
    "speculators_model_type", "transformer_layer_config", "dtype", "use_aux_norm", "layer_types",
)  # fmt: skip
ENGINES = st.sampled_from([("vllm", "0.20.2"), ("vllm", "0.32.0"), ("sglang", "0.5.5"), ("sglang", "0.5.23")])


@given(st.sampled_from(FAMILIES), ENGINES, CHANGES, st.dictionaries(st.sampled_from(KEYS), JSON, max_size=2), st.data())
def test_a_drafters_config(pairs, folder, family, engine, changes, more, data):
    drafter, target = pairs[family]
    which = data.draw(st.sampled_from(["drafter", "target", "manifest"]))
    file = {"drafter": drafter / "config.json", "target": target / "config.json", "manifest": drafter / "manifest.json"}
    path = file[which]
    sound = path.read_text()
    content = replaced(json.loads(sound), changes)
    if isinstance(content, dict):
        content |= more
    path.write_text(json.dumps(content))
    try:
        with allowed():
            case = preflight.Case(checkpoint=drafter, target=target, engine=engine[0], version=engine[1], k=3)
            for finding in preflight.examine(case):
                assert finding.as_json()
            assert isinstance(preflight.summary(case), dict)
    finally:
        path.write_text(sound)


@given(
    st.sampled_from(["drafter/config.json", "target/config.json", "target/tokenizer.json"]),
    DAMAGE,
    st.none() | st.integers(0),
)
def test_a_damaged_config(pairs, folder, name, damage, cut):
    path = folder / "llama" / name
    sound = path.read_bytes()
    path.write_bytes(damaged(sound, damage, cut))
    try:
        with allowed():
            preflight.examine(preflight.Case(*pairs["llama"], engine="vllm", version="0.32.0"))
    finally:
        path.write_bytes(sound)


@given(DAMAGE, st.none() | st.integers(0))
def test_damaged_weights(pairs, folder, damage, cut):
    path = pairs["llama"][0] / "model.safetensors"
    sound = path.read_bytes()
    # Most of the damage falls on the header, where the structure is.
    size = 8 + int.from_bytes(sound[:8], "little")
    path.write_bytes(damaged(sound[:size], damage, cut) + (sound[size:] if cut is None else b""))
    try:
        with allowed():
            preflight.examine(preflight.Case(*pairs["llama"], engine="sglang", version="0.5.23"))
    finally:
        path.write_bytes(sound)


@given(st.dictionaries(st.text(max_size=6), JSON, max_size=3) | JSON, st.binary(max_size=64), st.integers(-8, 8))
def test_a_safetensors_header(folder, header, rest, wrong):
    text = json.dumps(header).encode()
    path = folder / "header.safetensors"
    path.write_bytes(max(0, len(text) + wrong).to_bytes(8, "little") + text + rest)
    with allowed():
        for tensor in headers.read_header(path).values():
            headers.array(tensor)
            headers.nonfinite(tensor)


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*headers.DTYPES, "F4", 3, None]),
        "shape": st.lists(st.integers(-2, 2**40), max_size=4) | JSON,
    }
    | {"data_offsets": st.lists(st.integers(-9, 2**66), max_size=3) | JSON}
)


@given(st.dictionaries(st.text(max_size=6), ENTRY, min_size=1, max_size=3), st.binary(max_size=64))
def test_a_safetensors_header_with_entries(folder, header, rest):
    text = json.dumps(header).encode()
    path = folder / "entries.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + rest)
    with allowed():
        for tensor in headers.read_header(path).values():
            headers.array(tensor)
            headers.nonfinite(tensor)


@given(JSON)
def test_an_index_of_shards(folder, index):
    (folder / "index").mkdir(exist_ok=True)
    (folder / "index/model.safetensors.index.json").write_text(json.dumps(index))
    with allowed():
        headers.read(folder / "index")


@given(st.sampled_from(["../config.json", "/etc/passwd", "a", "", 3, "a/b"]))
def test_an_index_does_not_leave_its_folder(folder, name):
    (folder / "index").mkdir(exist_ok=True)
    (folder / "index/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(UserError):
        headers.read(folder / "index")


TURN = st.dictionaries(
    st.sampled_from(["role", "from", "content", "value"]),
    SCALARS | st.sampled_from(["user", "gpt", "system", "hi"]),
    max_size=4,
)
ROW = st.dictionaries(
    st.sampled_from(["messages", "conversations", "prompt", "instruction", "prompt_id", "id"]),
    JSON | st.lists(TURN | JSON, max_size=3),
    max_size=3,
)
LINES = st.lists(ROW.map(json.dumps) | st.text(max_size=20), max_size=4).map("\n".join)


def read_prompts(path: Path) -> None:
    """What curation does with a file: every record, every turn of it."""
    lost = dict.fromkeys(("records", "bytes"), 0)
    for record in sources._READERS[path.suffix](path, lost):
        if record.turns is not None:
            conversations.walk(record.turns)


@given(LINES.map(str.encode) | st.binary(max_size=80), st.sampled_from([".jsonl", ".json", ".sharegpt"]))
def test_prompt_files(folder, content, suffix):
    path = folder / f"prompts{suffix}"
    path.write_bytes(content)
    with allowed():
        read_prompts(path)


@given(st.lists(ROW, max_size=3), DAMAGE, st.none() | st.integers(0))
def test_a_cut_off_list_of_conversations(folder, rows, damage, cut):
    path = folder / "conversations.json"
    path.write_bytes(damaged(json.dumps(rows).encode(), damage, cut))
    with allowed():
        read_prompts(path)


@given(
    st.sampled_from([1_000, 100_000]),
    st.sampled_from(["[", '{"messages":', '{"a":[']),
    st.sampled_from([".jsonl", ".json"]),
)
def test_nesting_without_end(folder, depth, opening, suffix):
    path = folder / f"nested{suffix}"
    path.write_text(opening * depth)
    with allowed():
        read_prompts(path)
    with allowed():
        conversations.read_benchmark_prompts(path)
    with allowed():
        headers.read_json(path)


@given(DAMAGE, st.none() | st.integers(0), st.sampled_from(["text", "turns", "numbers"]))
def test_a_damaged_parquet_file(folder, damage, cut, kind):
    content = {
        "text": {"prompt": ["Hello", None, "x"]},
        "turns": {"messages": [[{"role": "user", "content": "Hello"}], [], None]},
        "numbers": {"prompt": [1, 2, 3]},
    }
    path = folder / f"{kind}.parquet"
    pq.write_table(pa.table(content[kind]), path)
    path.write_bytes(damaged(path.read_bytes(), damage, cut))
    with allowed():
        read_prompts(path)


@given(LINES | st.binary(max_size=60))
def test_benchmark_prompts(folder, content):
    path = folder / "benchmark.jsonl"
    path.write_bytes(content.encode(errors="surrogatepass") if isinstance(content, str) else content)
    with allowed():
        assert conversations.read_benchmark_prompts(path)


NUMBER = st.sampled_from(["1", "0", "2.5", "-3", "NaN", "+Inf", "-Inf", "1e400", "x", "", "9" * 400, "1_0", "٣"])
METRIC = st.sampled_from(
    [
        "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total", "generation_tokens_total", "prompt_tokens_total",
        "request_decode_time_seconds_sum", "spec_verify_calls_total", "num_requests_total", "spec_accept_length",
    ]
)  # fmt: skip
LABELS = st.sampled_from(
    ['model_name="m"', 'model_name="m",position="0"', 'model_name="m",position="x"', 'position="-1",model_name="m"',
     'model_name="m",engine="1"', 'model_name="m', "", 'position="٣",model_name="m"']
)  # fmt: skip
SAMPLE = st.builds("{}:{}{{{}}} {}".format, st.sampled_from(["vllm", "sglang"]), METRIC, LABELS, NUMBER)
METRICS = st.lists(SAMPLE | st.text(max_size=20), max_size=8).map("\n".join)


@given(METRICS, st.none() | st.integers(0))
def test_metrics_of_a_server(text, cut):
    text = text if cut is None else text[: cut % (len(text) + 1)]
    for name in engines.ENGINES:
        with allowed():
            counters = engines.engine(name).read_counters(text, "m")
            assert counters.completion_tokens - counters.completion_tokens == 0


@given(METRICS, METRICS)
def test_metrics_in_files(folder, before, after):
    for name, text in (("before", before), ("after", after)):
        (folder / name).write_text(text, errors="surrogatepass")
    with allowed():
        diagnose.read_metrics(folder / "before", folder / "after")


PIECES = [
    "vLLM API server version 0.32.0", "V1 LLM engine (v", "V1 LLM engine (v0.32.0)", "enforce_eager=True",
    "SpeculativeConfig(method='eagle3', num_spec_tokens=3", "SpeculativeConfig(method='", "num_spec_tokens=" + "9" * 500,
    "Using auxiliary layers from speculative config: (2, 15, 27)", "Using auxiliary layers from speculative config: ( , )",
    "SpecDecoding metrics: Mean acceptance length: 2.1, Accepted: 3 tokens, Drafted: 30 tokens, "
    "Per-position acceptance rate: 0.5, 0.3, 0.1, Avg", "SpecDecoding metrics: Mean acceptance length: ..., Drafted: 3 "
    "tokens, Per-position acceptance rate: 0.5, ., Avg", "Mean acceptance length: 1, Drafted: 0 tokens, Per-position "
    "acceptance rate: ,,, Avg", "server_args=ServerArgs(speculative_algorithm='EAGLE3', speculative_num_steps=3, "
    "speculative_eagle_topk=1, speculative_num_draft_tokens=4)", "server_args=ServerArgs(speculative_num_steps=None",
    "#running-req: 1, accept len: 2.2, accept rate: 0.4", "accept len: nan", "accept len: .", "accept len: 1.2.3",
    "Mean acceptance length: 1.2.3", "disable_cuda_graph=True", "Capture cuda graph end",
]  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=12), max_size=6).map("\n".join), DAMAGE)
def test_server_logs(folder, text, damage):
    path = folder / "server.log"
    path.write_bytes(damaged(text.encode(errors="surrogatepass"), damage, None))
    with allowed():
        settings_found = diagnose.read_log(path)
        assert isinstance(settings_found.sentences(), list)
        assert settings_found.length is None or settings_found.length == settings_found.length


EVENTS = {
    "vllm": {
        "choices": [{"text": "a", "token_ids": [5], "finish_reason": None}],
        "usage": {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
        "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 2], "num_draft_tokens": 4}},
    },
    "sglang": {
        "text": "a",
        "output_ids": [5],
        "meta_info": {
            "completion_tokens": 1, "cached_tokens": 0, "finish_reason": {"type": "stop"}, "spec_verify_ct": 3,
            "spec_correct_drafts_histogram": [1, 2], "spec_num_proposed_drafts": 4,
        },
    },
}  # fmt: skip


@given(st.sampled_from(engines.ENGINES), st.lists(CHANGES, min_size=1, max_size=3))
def test_events_of_a_stream(name, every):
    engine, reply = engines.engine(name), Reply()
    with allowed():
        for changes in every:
            line = b"data: " + json.dumps(replaced(EVENTS[name], changes)).encode()
            benchmark.read_line(engine, line, reply)
        benchmark.check_reply(reply)
        assert all(isinstance(token, int) for token in reply.token_ids)


@given(st.sampled_from(engines.ENGINES), st.binary(max_size=60), DAMAGE, st.none() | st.integers(0))
def test_lines_of_a_stream(name, noise, damage, cut):
    sound = b"data: " + json.dumps(EVENTS[name]).encode()
    for line in (noise, b"data: " + noise, damaged(sound, damage, cut), b"data: " + b"[" * 100_000):
        with allowed():
            benchmark.read_line(engines.engine(name), line, Reply())


@given(
    st.lists(
        st.text(max_size=20)
        | st.sampled_from(["../outside", "/outside", "a/../../outside", "C:\\outside", "..\\outside"]),
        max_size=3,
    ),
    DAMAGE,
    st.none() | st.integers(0),
)
def test_a_wheel_stays_in_its_folder(names, damage, cut):
    with tempfile.TemporaryDirectory() as made:
        made = Path(made)
        with zipfile.ZipFile(made / "w.whl", "w") as archive:
            for name in names:
                with contextlib.suppress(ValueError, IndexError):
                    archive.writestr(name, "content")
        content = (made / "w.whl").read_bytes()
        (made / "w.whl").write_bytes(damaged(content, damage, cut))
        (made / "cache").mkdir()
        with allowed():
            wheels.wheel_folder(str(made / "w.whl"), made / "cache")
        assert sorted(path.name for path in made.iterdir()) == ["cache", "w.whl"]
        assert not Path("/outside").exists()
