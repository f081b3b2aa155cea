"""Tiny random models for tests: targets of six layers (Llama, DeepSeek-V3), shards of their greedy responses, drafters."""

import random
import runpy
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from breakeven import artefacts, hidden_states, tables, target
from breakeven.drafter import Drafter, DrafterConfig, Rows, initialise_from_target, target_tensor_names

VOCABULARY = 120
DISTINCT = [1, 3, 5]
YARN = {"rope_theta": 5000.0, "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 64}


def write_target(folder: Path, **changes) -> Path:
    """A random Llama with a manifest; no tokenizer, since everything here is token ids."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
            "initializer_range": 0.3,
        }
        | changes
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    artefacts.write_manifest(folder / "manifest.json", "target", parameters={"chat_template_kwargs": {}})
    return folder


def write_mla_target(folder: Path, **changes) -> Path:
    """A random DeepSeek-V3: MLA with yarn, one dense layer, five mixtures of four experts and a shared one."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 64,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_nextn_predict_layers": 0,
            "max_position_embeddings": 512,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "rope_parameters": dict(YARN),
            "initializer_range": 0.3,
        }
        | changes
    )
    DeepseekV3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    artefacts.write_manifest(folder / "manifest.json", "target", parameters={"chat_template_kwargs": {}})
    return folder


def sequences(folder: Path, count: int = 12, prompt: int = 9, response: int = 30) -> tuple[list, list]:
    """Random prompts of different lengths and the target's greedy responses to them."""
    model = target.load_model(folder, "cpu")
    draw = random.Random(1)
    prompts, responses = [], []
    for i in range(count):
        ids = [draw.randrange(3, VOCABULARY) for _ in range(prompt + i % 3)]
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=response, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        prompts.append(ids)
        responses.append(out[0, len(ids) :].tolist())
    return prompts, responses


def write_shard(folder: Path, path: Path, layers=tuple(DISTINCT), codec="bfloat16", **kwargs) -> Path:
    """A shard of hidden states with its manifest; every fourth sequence is held out."""
    prompts, responses = sequences(folder, **kwargs)
    capture = hidden_states.Capture(target.load_model(folder, "cpu"), list(layers))
    tensors = hidden_states.extract(capture, prompts, responses, 128, "cpu")
    tensors["held_out"] = torch.tensor([i % 4 == 0 for i in range(len(prompts))])
    tensors["temperature"] = torch.zeros(len(prompts))
    tensors["conversation"] = torch.arange(len(prompts))
    save_file(hidden_states.encode_shard(tensors, codec), path)
    artefacts.write_manifest(
        artefacts.manifest_path(path),
        "hidden_states",
        parameters={"layers": list(layers), "codec": codec},
        inputs={"target": folder / "manifest.json"},
    )
    return path


def write_responses(folder: Path, path: Path, **kwargs) -> Path:
    """The same sequences as a shard of responses, with its manifest."""
    prompts, responses = sequences(folder, **kwargs)
    rows = [
        dict.fromkeys(tables.RESPONSES.names)
        | {"prompt_id": f"prompt{i}", "held_out": i % 4 == 0, "sampling": '{"temperature": 0}'}
        | {"prompt_token_ids": prompt, "response_token_ids": response}
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
    ]
    artefacts.write_table(path, rows, tables.RESPONSES)
    artefacts.write_manifest(artefacts.manifest_path(path), "responses", parameters={})
    return path


def make_drafter(folder: Path, ids: torch.Tensor, layers=tuple(DISTINCT), seed: int = 0) -> Drafter:
    """A drafter initialised from the target, with a draft vocabulary of `ids`."""
    torch.manual_seed(seed)
    config = target.text_config(folder)
    names = target_tensor_names(config)
    loaded = target.load_tensors(folder, list(names.values()))
    tensors = {short: loaded[name] for short, name in names.items()}
    drafter = Drafter(DrafterConfig.from_target(config, len(ids), list(layers)), tensors["embed_tokens.weight"])
    initialise_from_target(drafter, tensors, ids)
    return drafter


def random_drafter(shape: DrafterConfig, seed: int = 0) -> Drafter:
    """A drafter with random weights and embeddings."""
    torch.manual_seed(seed)
    return Drafter(shape, torch.randn(shape.vocab_size, shape.hidden_size))


def check_steps(drafter: Drafter, reference_chain, first_row: int) -> None:
    """Draft steps of all rows at once are those of `reference_chain`(drafter, tokens, features, row, steps), row by row."""
    torch.manual_seed(1)
    length, steps = 11, 3
    tokens = torch.randint(3, 120, (length + steps + 1,)).tolist()
    features = drafter.fuse(torch.randn(1, length, 3, 32))
    hidden, context, outputs = features, None, []
    for step in range(steps):
        start = 0 if step == 0 else first_row
        fed = torch.tensor([tokens[start + 1 + step : length + 1 + step]])
        hidden, context = drafter.step(fed, hidden, context, Rows.suffix(length, first_row))
        outputs.append(hidden[0])
    for row in (first_row, first_row + 3, length - 1):
        expected = reference_chain(drafter, tokens, features[0], row, steps)
        for step in range(steps):
            torch.testing.assert_close(outputs[step][row - first_row], expected[step], atol=1e-4, rtol=1e-4)


def run_script(name: str, *arguments) -> None:
    """Run a script in this process."""
    script, before = Path(artefacts.__file__).parents[1] / f"{name}.py", sys.argv
    sys.argv = list(map(str, [script, *arguments]))
    try:
        runpy.run_path(sys.argv[0])["main"]()
    finally:
        sys.argv = before


def resumed(make_run, stop: int, path: Path):
    """Losses of a whole run, and a run stopped after `stop` rows and resumed from `path`, whose weights are the same."""
    whole = make_run()
    losses = [row["loss"] for row in list(whole.steps())]
    first = make_run()
    for number, _ in enumerate(first.steps(), 1):
        if number == stop:
            first.save(path, "key")
            break
    second = make_run()
    assert second.resume(path, "key")
    list(second.steps())
    for name, tensor in whole.drafter.state_dict().items():
        assert torch.equal(tensor, second.drafter.state_dict()[name]), name
    return losses, second
