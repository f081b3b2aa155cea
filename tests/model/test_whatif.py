"""Fault hypotheses against an independent reference: one chain at a time, written after vLLM's llama_eagle3.py."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tinymodels
from breakeven import artefacts, checkpoint, hidden_states, tables, target, vocabulary, walk, whatif

LAYERS = [1, 3, 4]
IDS = torch.arange(1, 120, 2)
K = 3
NAMES = [
    "as-built", "layers-minus-1", "layers-plus-1", "layers-reversed", "shift-by-one", "fc-skipped", "fc-skipped-own-head",
    "d2t-zero", "d2t-absolute", "theta-10000", "norm-before-residual", "norm-before-fc", "norm-output", "target-head",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(target_folder):
    return target.load_model(target_folder, "cpu")


@pytest.fixture(scope="module")
def drafter(target_folder):
    """Initialised from the target, but with norm weights that are not all one, so that a norm in the wrong place shows."""
    made = tinymodels.make_drafter(target_folder, IDS, layers=LAYERS)
    with torch.no_grad():
        for norm in (made.midlayer.input_layernorm, made.midlayer.hidden_norm, made.norm):
            norm.weight.uniform_(0.3, 2.0)
        made.fc.weight.normal_(std=0.2)
        made.lm_head.weight.normal_(std=0.3)
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def capture(model):
    return hidden_states.Capture(model, whatif.neighbours(LAYERS, 6))


@pytest.fixture(scope="module")
def sequences(target_folder, capture):
    prompts, responses = tinymodels.sequences(target_folder, count=4)
    return hidden_states.InMemory(hidden_states.extract(capture, prompts, responses, 1, "cpu"))


def norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x, position, theta):
    """x [heads, d], the two halves of a head being the real and imaginary parts."""
    half = x.shape[-1] // 2
    angle = position * theta ** -(torch.arange(half) / half)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat([turned.real, turned.imag], -1)


def reference(drafter, tokens, features, row, fc=True, theta=5000.0, head=None, ids=IDS, flags=()):
    """K drafted target ids of one row. features [T, A, H] or, without fc, [T, H]; everything in float32."""
    weights = {name: tensor.float() for name, tensor in drafter.state_dict().items()}
    layer = {name.removeprefix("midlayer."): w for name, w in weights.items() if name.startswith("midlayer.")}
    head = weights["lm_head.weight"] if head is None else head
    fed = features.float().flatten(1)
    if fc:
        if "norm_before_fc" in flags:
            fed = norm(fed, torch.ones(fed.shape[1]))
        fed = fed @ weights["fc.weight"].T
    keys, values, drafts, hidden = [], [], [], None
    for position in range(row + K):
        after = position - row
        token = tokens[position + 1] if after <= 0 else drafts[-1]
        hidden = fed[position] if after <= 0 else hidden
        embedded = norm(drafter.embed_tokens[token].float(), layer["input_layernorm.weight"])
        normed = norm(hidden, layer["hidden_norm.weight"])
        residual = normed if "norm_before_residual" in flags else hidden
        x = torch.cat([embedded, normed])
        q, k, v = ((layer[f"self_attn.{n}_proj.weight"] @ x).view(-1, 8) for n in "qkv")
        keys.append(rotate(k, position, theta))
        values.append(v)
        queries = rotate(q, position, theta).view(2, 2, 8)  # two key heads, each with two query heads
        scores = torch.einsum("gqd,tgd->gqt", queries, torch.stack(keys)) / 8**0.5
        attended = torch.einsum("gqt,tgd->gqd", scores.softmax(-1), torch.stack(values)).flatten()
        residual = residual + layer["self_attn.o_proj.weight"] @ attended
        x = norm(residual, layer["post_attention_layernorm.weight"])
        gated = F.silu(layer["mlp.gate_proj.weight"] @ x) * (layer["mlp.up_proj.weight"] @ x)
        hidden = residual + layer["mlp.down_proj.weight"] @ gated
        final = norm(hidden, weights["norm.weight"])
        if "norm_output" in flags:
            hidden = final
        if after >= 0:
            drafts.append(int(ids[(head @ final).argmax()]))
    return drafts


def faults(name, model, tokens):
    """(features, options) of the reference under a hypothesis; hidden states are transformers' own."""
    states = [h[0] for h in model(tokens[None], output_hidden_states=True).hidden_states]  # the last one is post-norm

    def of(*layers):
        return torch.stack([states[k] for k in layers], dim=1)

    head = model.lm_head.weight[:60].float()
    delayed = of(*LAYERS)[[0, *range(len(tokens) - 1)]]
    return {
        "as-built": (of(1, 3, 4), {}),
        "layers-minus-1": (of(0, 2, 3), {}),
        "layers-plus-1": (of(2, 4, 5), {}),
        "layers-reversed": (of(4, 3, 1), {}),
        "shift-by-one": (delayed, {}),
        "fc-skipped": (states[-1], {"fc": False, "head": head, "ids": torch.arange(60)}),
        "fc-skipped-own-head": (states[-1], {"fc": False}),
        "d2t-zero": (of(1, 3, 4), {"ids": torch.arange(60)}),
        "d2t-absolute": (of(1, 3, 4), {"ids": torch.tensor([min(j + 2 * j + 1, 119) for j in range(60)])}),
        "theta-10000": (of(1, 3, 4), {"theta": 10_000.0}),
        "norm-before-residual": (of(1, 3, 4), {"flags": ["norm_before_residual"]}),
        "norm-before-fc": (of(1, 3, 4), {"flags": ["norm_before_fc"]}),
        "norm-output": (of(1, 3, 4), {"flags": ["norm_output"]}),
        "target-head": (of(1, 3, 4), {"head": head}),
    }[name]


def test_every_hypothesis_is_there(drafter, capture):
    assert [h.name for h in whatif.hypotheses(drafter, IDS, capture)] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_hypothesis_equals_the_reference(name, drafter, capture, sequences, model):
    found = {h.name: h for h in whatif.hypotheses(drafter, IDS, capture)}
    hypothesis, built = found[name], found["as-built"]
    differs = False
    for i in range(len(sequences)):
        loaded = sequences.load(i, "token_ids", "hidden", "last")
        tokens = loaded["token_ids"].long()
        features, options = faults(name, model, tokens)
        mine = walk.draft(hypothesis.drafter, hypothesis.ids, tokens, hypothesis.features(loaded), 5, K)
        for row in (5, 9, 20, len(tokens) - 2):
            assert mine[row - 5].tolist() == reference(drafter, tokens.tolist(), features, row, **options)
        differs |= not torch.equal(mine, walk.draft(built.drafter, IDS, tokens, built.features(loaded), 5, K))
    assert differs == (name != "as-built")


def test_the_drafter_itself_stays_as_it_was(drafter, capture, sequences):
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    config = replace(drafter.config)
    whatif.evaluate(drafter, IDS, capture, sequences, [0], K, "cpu")
    assert drafter.config == config and drafter.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())


def test_as_built_equals_the_plain_walk(target_folder, drafter, capture, sequences, model):
    """The features are picked out of a wider extraction; a walk over just the drafter's layers must find the same."""
    prompts, responses = tinymodels.sequences(target_folder, count=4)
    alone = hidden_states.InMemory(
        hidden_states.extract(hidden_states.Capture(model, LAYERS), prompts, responses, 1, "cpu")
    )
    plain = walk.evaluate(drafter, IDS, alone, [0, 1, 2, 3], K, "cpu")
    found = whatif.evaluate(drafter, IDS, capture, sequences, [0, 1, 2, 3], K, "cpu")
    for a, b in zip(plain, found["as-built"], strict=True):
        assert a.matched.tolist() == b.matched.tolist() and a.judged.tolist() == b.judged.tolist()
    rows = whatif.table(found, K)
    assert [row["hypothesis"] for row in rows] == [name for name in NAMES for _ in range(K)]
    offline = walk.table(plain, [K], "served")
    for mine, theirs in zip(rows[:K], offline, strict=True):
        assert all(mine[name] == theirs[name] for name in ("k", "position", "steps", "accepted", "marginal"))


def test_hypotheses_that_change_nothing_are_left_out(drafter, capture):
    full = whatif.variant(drafter, rope_theta=10_000.0)
    names = [h.name for h in whatif.hypotheses(full, torch.arange(60), capture)]
    assert "theta-10000" not in names and "d2t-zero" not in names and "as-built" in names


def test_each_sequence_is_counted_by_itself(drafter, capture, sequences):
    found = whatif.evaluate(drafter, IDS, capture, sequences, [0, 1, 2, 3], K, "cpu")
    outputs = whatif.by_output(found, K)
    pooled = {(row["hypothesis"], row["position"]): row for row in whatif.table(found, K)}
    for name in NAMES:
        assert len(outputs[name]) == 4
        assert sum(counts[0] for counts in outputs[name]) == pooled[name, 1]["steps"]
        for i in range(1, K + 1):
            assert sum(counts[i] for counts in outputs[name]) == pooled[name, i]["accepted"]


@pytest.mark.parametrize("flag", checkpoint.FLAGS)
def test_a_published_drafter_with_a_norm_flag_is_walked_with_it(flag, drafter, target_folder, capture, tmp_path):
    """As built it carries the flag; turning it over gives the drafter without."""
    flagged = whatif.flipped(drafter, flag)
    d2t, t2d = vocabulary.maps(IDS.numpy(), tinymodels.VOCABULARY)
    checkpoint.save(tmp_path, flagged, d2t, t2d, target.text_config(target_folder))
    loaded, ids = checkpoint.load(tmp_path, target_folder, "cpu")
    assert getattr(loaded.config, flag) is True and ids.tolist() == IDS.tolist()
    back = {h.name: h for h in whatif.hypotheses(loaded, ids, capture)}[flag.replace("_", "-")].drafter
    torch.manual_seed(0)
    tokens, features = torch.randint(3, 120, (20,)), torch.randn(20, 3, 32)
    with_flag, without = (walk.draft(d, IDS, tokens, features, 4, K) for d in (loaded, back))
    assert not torch.equal(with_flag, without)
    for row in (4, 12, 18):
        assert with_flag[row - 4].tolist() == reference(loaded, tokens.tolist(), features, row, flags=[flag])
        assert without[row - 4].tolist() == reference(loaded, tokens.tolist(), features, row)


@pytest.mark.parametrize("length", [30, K])  # K tokens: no step can be judged
def test_replay_served_writes_both_tables(length, target_folder, drafter, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    d2t, t2d = vocabulary.maps(IDS.numpy(), tinymodels.VOCABULARY)
    checkpoint.save(folder, drafter, d2t, t2d, target.text_config(target_folder))
    prompts, responses = tinymodels.sequences(target_folder, count=3)
    rows = [
        dict.fromkeys(tables.BENCHMARK.names)
        | {
            "prompt_id": str(i),
            "prompt_token_ids": p,
            "output_token_ids": r[:length],
            "accepted_per_position": [3, 2, 1],
        }
        for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
    ]
    artefacts.write_table(tmp_path / "pass-1.parquet", rows, tables.BENCHMARK)
    given = ["--target", target_folder, "--checkpoint", folder, "--k", K, "--served", tmp_path / "pass-1.parquet"]
    written = ["--out", tmp_path / "offline.parquet", "--what-if", tmp_path / "what_if.parquet"]
    tinymodels.run_script("replay_served", *given, *written)
    offline = artefacts.read_table(tmp_path / "offline.parquet", tables.OFFLINE)
    what_if = artefacts.read_table(tmp_path / "what_if.parquet", tables.WHAT_IF)
    assert what_if.num_rows == K * len(NAMES)
    assert what_if["accepted"].to_pylist()[:K] == offline["accepted"].to_pylist()
    manifest = artefacts.read_manifest(tmp_path / "what_if.manifest.json", "what_if")
    assert set(manifest["by_output"]) == set(NAMES) and len(manifest["by_output"]["as-built"]) == 3
