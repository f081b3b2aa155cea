"""Layer conventions: what each engine and version captures, from a table read off the released sources."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from breakeven import conventions, installed, preflight
from breakeven.cli import UserError

ROOT = Path(__file__).resolve().parents[2]
N = 61  # Kimi-K2.x
DEFAULT = [2, 30, 58]
OUTPUT_IDS = [1, 29, 57]  # what SpecForge, ModelOpt and others write


def nested(ids):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}


def top(ids):
    return {"eagle_aux_hidden_state_layer_ids": ids}


@pytest.mark.parametrize(
    ("engine", "version", "family", "config", "expected"),
    [
        ("sglang", "0.5.5", "llama", nested(DEFAULT), [3, 31, 59]),
        ("sglang", "0.5.9", "deepseek", nested(DEFAULT), [3, 31, 59]),
        ("sglang", "0.5.12.post1", "deepseek", nested(DEFAULT), [3, 31, 59]),
        ("sglang", "0.5.13", "deepseek", nested(DEFAULT), DEFAULT),
        ("sglang", "0.5.23", "deepseek", nested(DEFAULT), DEFAULT),
        ("sglang", "0.5.23", "deepseek", nested(OUTPUT_IDS), DEFAULT),
        ("sglang", "0.5.23", "deepseek", nested([29, 1, 57]), OUTPUT_IDS),  # only the first id decides
        ("sglang", "0.5.23", "llama", nested(DEFAULT), [3, 31, 59]),
        ("sglang", "0.5.23", "llama", nested(OUTPUT_IDS), DEFAULT),
        ("sglang", "0.5.16", "gpt-oss", nested([24, 30, 61]), [25, 31]),
        ("sglang", "0.5.23", "gpt-oss", nested([24, 30, 61]), [24, 30, 61]),
        ("sglang", "0.5.23", "gpt-oss", nested([24, 30, 60]), [25, 31, 61]),
        ("sglang", "0.5.23", "llama", nested([58, 60]), [59]),  # the last layer's output is never reached
        ("sglang", "0.5.23", "llama", top(OUTPUT_IDS), DEFAULT),  # not read: the default
        ("sglang", "0.5.5", "deepseek", {}, DEFAULT),
        ("sglang", "0.5.23", "minimax-m3-vl", {}, [3, 31, 59]),
        ("sglang", "0.5.23", "minimax-m3-vl", nested(OUTPUT_IDS), DEFAULT),
        ("vllm", "0.32.0", "minimax-m3-vl", {}, DEFAULT),
        ("vllm", "0.32.0", "llama", top(OUTPUT_IDS), OUTPUT_IDS),
        ("vllm", "0.20.2", "deepseek", top([58, 2, 30]), DEFAULT),
        ("vllm", "0.21.0", "llama", nested(OUTPUT_IDS), DEFAULT),
        ("vllm", "0.22.0", "llama", nested(OUTPUT_IDS), OUTPUT_IDS),
        ("vllm", "0.32.0", "llama", nested(OUTPUT_IDS), DEFAULT),  # V2 runner
        ("vllm", "0.32.0", "llama", {"eagle_config": {"layer_ids": [5, 6, 7]}}, [5, 6, 7]),
        ("vllm", "0.24.0", "deepseek", top([2, 30, 61]), [2, 30]),
        ("vllm", "0.32.0", "deepseek", top([2, 30, 61]), [2, 30, 61]),
        ("vllm", "0.32.0", "gpt-oss", {}, DEFAULT),
    ],
)
def test_captured(engine, version, family, config, expected):
    assert conventions.captured(engine, version, family, config, N) == expected


def test_vllm_runners_differ():
    read = {r: conventions.captured("vllm", "0.32.0", "llama", nested([3, 4, 5]), N, r) for r in ("v1", "v2")}
    assert read == {"v1": [3, 4, 5], "v2": DEFAULT}


@pytest.mark.parametrize("family", conventions.FAMILIES)
@pytest.mark.parametrize(
    "layers", [DEFAULT, [1, 29, 57], [3, 30, 58], [2, 31, 58], [1, 2, 3], [10, 20, 30, 40], [5, 9], [7]]
)
def test_exported_ids_are_read_right(layers, family):
    keys = conventions.export_ids(layers, family, N)
    assert (keys == {}) == (layers == DEFAULT and family != "minimax-m3-vl")
    for version in ("0.20.2", "0.24.0", "0.32.0"):
        for runner in ("v1", "v2"):
            assert conventions.captured("vllm", version, family, keys, N, runner) == layers
    for version in ("0.5.13", "0.5.23") + (("0.5.5", "0.5.12") if family != "deepseek" or 2 in layers else ()):
        assert conventions.captured("sglang", version, family, keys, N) == layers
    for engine, version in conventions.NEWEST.items():
        assert conventions.number_of_features(engine, version, keys) == len(layers)


def test_last_layer_can_be_exported_for_gpt_oss_only():
    keys = conventions.export_ids([24, 30, 36], "gpt-oss", 36)
    assert conventions.captured("sglang", "0.5.23", "gpt-oss", keys, 36) == [24, 30, 36]
    assert conventions.captured("vllm", "0.32.0", "gpt-oss", keys, 36) == [24, 30, 36]
    with pytest.raises(UserError, match="last layer"):
        conventions.export_ids([2, 6, 12], "llama", 12)


@pytest.mark.parametrize("layers", [[3, 2, 1], [2, 2, 3], [0, 2, 3], [2, 3, 99], []])
def test_impossible_layers(layers):
    with pytest.raises(UserError, match="ascending"):
        conventions.export_ids(layers, "llama", 12)


def test_number_of_features_was_fixed_at_three():
    config = {"num_aux_hidden_states": 4}
    assert conventions.number_of_features("vllm", "0.21.0", config) == 3
    assert conventions.number_of_features("vllm", "0.22.0", config) == 4
    assert conventions.number_of_features("sglang", "0.5.11", config) == 3
    assert conventions.number_of_features("sglang", "0.5.12", nested([1, 2])) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.32.0", (0, 32, 0)), ("v0.5.12.post1", (0, 5, 12)), ("0.20.2+cu128", (0, 20, 2)), ("0.24.0rc1", (0, 24, 0))],
)
def test_parse_version(text, expected):
    assert conventions.parse_version(text) == expected


def test_not_a_version():
    with pytest.raises(UserError, match="latest"):
        conventions.parse_version("latest")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_moe"}, "llama"),
        ({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}}, "deepseek"),
        ({"model_type": "deepseek_v3"}, "deepseek"),
        ({"model_type": "gpt_oss"}, "gpt-oss"),
        ({"model_type": "glm4_moe_lite"}, "deepseek"),
        ({"model_type": "glm4_moe"}, "llama"),
        ({"model_type": "glm_moe_dsa"}, "deepseek"),
        ({"architectures": ["MistralLarge3ForCausalLM"], "model_type": "mistral3"}, "deepseek"),
        ({"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3"}, "llama"),
        (
            {
                "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
                "text_config": {"model_type": "minimax_m3", "architectures": ["MiniMaxM3SparseForCausalLM"]},
            },
            "minimax-m3-vl",
        ),
    ],
)
def test_family(config, expected):
    assert conventions.family(config) == expected


# --- against the source of the installed engine, where it is built ---

SITES = sorted(ROOT.glob(".envs/vllm-*/lib/python3*/site-packages"))


def source_function(file, name):
    """One function of a source file, without importing the file's module."""
    node = next(n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef) and n.name == name)
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    namespace = {}
    exec(compile(ast.Module([node], []), str(file), "exec"), namespace)  # noqa: S102 - a function of an installed package
    return namespace[name]


@pytest.mark.skipif(not SITES, reason="no vLLM environment is built here")
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.parents[2].name)
def test_installed_vllm_reads_the_same_ids(site):
    version = installed.version(site, "vllm")
    worker = site / "vllm/v1/worker"
    v1 = source_function(worker / "gpu_model_runner.py", "_get_eagle3_aux_layers_from_config")
    v2 = source_function(worker / "gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config")
    ids = [3, 4, 5]
    configs = [
        {},
        top(ids),
        top([]),
        nested(ids),
        {**top([9, 8, 7]), **nested(ids)},
        {"eagle_config": {"layer_ids": ids}},
    ]
    for config in configs:
        spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**config)))
        read = {"v1": v1(SimpleNamespace(speculative_config=spec)), "v2": v2(spec)}
        for runner, found in read.items():
            assert conventions.written_ids("vllm", version, config, runner) == (list(found) if found else None)


@pytest.mark.skipif(not SITES, reason="no vLLM environment is built here")
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.parents[2].name)
def test_installed_vllm_supports_what_the_table_says(site):
    assert all(installed.captures(site, "vllm", name) for name in preflight.TARGETS["vllm"])
    assert installed.captures(site, "vllm", "MambaForCausalLM") is False
    version = conventions.parse_version(installed.version(site, "vllm"))
    for name, first in preflight.DRAFTERS["vllm"].items():
        assert installed.knows(site, "vllm", name) == (version >= conventions.parse_version(first))
