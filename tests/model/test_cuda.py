"""The CUDA path (flex attention, compiled steps, padded batches) against the CPU path; needs a GPU."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tinymodels
from breakeven import target, training
from breakeven.drafter import Drafter, DrafterConfig
from breakeven.hidden_states import Capture, Chosen, Responses, encode
from breakeven.mla import LatentShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CONFIG = DrafterConfig(128, 256, 6, 2, 32, 500, 300, [1, 2, 3], 1e-6, 1e4, None, 2048)
LATENT = dataclasses.replace(CONFIG, mla=LatentShape(48, 40, 64, 32, 64))  # keys 96 wide, values 64
SETTINGS = training.Settings(ttt_steps=4, epochs=2, batch_tokens=1024, learning_rate=3e-3)


class Random(Chosen):
    """Sequences of random tokens and hidden states; every tenth is held out."""

    def __init__(self, count=40, codec="bfloat16", longest=400):
        super().__init__()
        draw = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)
        self.sequences, self.answers = [], []
        for _ in range(count):
            prompt, answer = int(draw.integers(2, longest // 2)), int(draw.integers(2, longest // 2))
            length = prompt + answer
            made = {
                "token_ids": torch.randint(0, 500, (length,), generator=generator).int(),
                "loss_mask": torch.arange(length) >= prompt,
                "argmax": torch.randint(0, 500, (length,), generator=generator).int(),
            }
            for name, shape in (("hidden", (length, 3, 128)), ("last", (length, 128))):
                made[name] = torch.randn(shape, generator=generator).bfloat16()
                if codec == "int8":
                    made[name], made[f"{name}_scale"] = encode(made[name])
            self.sequences.append(made)
            self.answers.append(answer)
        self.held_out = [i % 10 == 0 for i in range(count)]

    def __len__(self):
        return len(self.sequences)

    def length(self, i):
        return len(self.sequences[i]["token_ids"])

    def response_length(self, i):
        return self.answers[i]

    def stored(self, i, *names):
        return self.sequences[i]

    def training(self, samples):
        return [i for i, flag in enumerate(self.held_out) if not flag]


def parts(device, config=CONFIG):
    torch.manual_seed(0)
    drafter = Drafter(config, torch.randn(500, 128)).to(device)
    inside = torch.zeros(500, dtype=torch.bool)
    inside[:300] = True
    head = training.TargetHead(torch.rand(128), torch.randn(300, 128), inside, 1e-6)
    moved = [x.to(device) for x in (head.norm, head.rows, head.in_vocabulary)]
    return drafter, training.TargetHead(*moved, 1e-6)


def loss_of(device, sequences, chosen, shape=None, unrolled=training.unroll, config=CONFIG):
    drafter, head = parts(device, config)
    batch = training.decoded(training.collate(sequences, chosen, 4, shape).to(device))
    loss, right, counted = training.chain_loss(drafter, head, batch, SETTINGS, unrolled)
    return loss, right, counted, torch.autograd.grad(loss, list(drafter.parameters()))


@pytest.mark.parametrize(
    "config, codec",
    [(CONFIG, "bfloat16"), (CONFIG, "int8"), (LATENT, "bfloat16")],
    ids=["bfloat16", "int8", "MLA"],
)
@pytest.mark.parametrize("way", ["by sequence", "blocks", "blocks, compiled", "blocks, exactly full"])
def test_loss_and_gradients_are_those_of_the_cpu(way, config, codec):
    sequences, chosen = Random(codec=codec), [1, 2, 3, 4]
    total = sum(sequences.length(i) for i in chosen)
    if way == "blocks, exactly full":  # cut the last sequence, so that no position is left for padding
        spare = total % 128
        last = sequences.sequences[4]
        sequences.sequences[4] = {name: x[: len(x) - spare] for name, x in last.items()}
        total -= spare
    expected = loss_of("cpu", sequences, chosen, config=config)
    shape = None if way == "by sequence" else (training.rounded(total), training.rounded(len(chosen) * 200))
    unrolled = torch.compile(training.unroll) if "compiled" in way else training.unroll
    found = loss_of("cuda", sequences, chosen, shape, unrolled, config)
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=1e-4, atol=1e-4)
    assert found[1].tolist() == expected[1].tolist() and found[2].tolist() == expected[2].tolist()
    for mine, reference in zip(found[3], expected[3], strict=True):
        torch.testing.assert_close(mine.cpu(), reference, rtol=2e-3, atol=2e-5)


def run_of(sequences, settings=SETTINGS):
    drafter, head = parts("cuda")
    return training.Run(drafter, head, sequences, settings, "cuda")


def test_a_killed_and_resumed_run_ends_with_the_same_weights(tmp_path):
    sequences = Random(longest=300)
    rows, second = tinymodels.resumed(lambda: run_of(sequences), 5, tmp_path / "state.pt")
    assert rows == [row["loss"] for row in second.rows] and all(loss is not None for loss in rows)


def test_a_sequence_longer_than_the_budget_is_trained():
    settings = dataclasses.replace(SETTINGS, batch_tokens=128, epochs=1)
    run = run_of(Random(count=6), settings)
    assert all(row["loss"] > 0 for row in list(run.steps()) if row["split"] == "train")


ONLINE = training.Settings(ttt_steps=3, epochs=2, batch_tokens=256, learning_rate=1e-3)


@pytest.fixture(scope="module")
def online(tmp_path_factory):
    """Makes a run whose hidden states the target computes; heads as wide as the kernels need them."""
    folder = tinymodels.write_target(tmp_path_factory.mktemp("target"), head_dim=32, hidden_size=128)
    path = tinymodels.write_responses(folder, tmp_path_factory.mktemp("responses") / "shard-000000.parquet", count=24)

    def make(budget=1024):
        ids = torch.arange(0, 120, 2)
        drafter = tinymodels.make_drafter(folder, ids).to("cuda")
        rows = drafter.embed_tokens[ids.to("cuda")].float()
        inside = torch.isin(torch.arange(120), ids).to("cuda")
        capture = Capture(target.load_model(folder, "cuda"), tinymodels.DISTINCT)
        head = training.TargetHead(torch.ones(128, device="cuda"), rows, inside, 1e-6)
        return training.Run(drafter, head, Responses([path], capture, budget), ONLINE, "cuda")

    return make


def test_the_targets_pass_over_several_batches_gives_what_the_padded_one_does(online):
    run = online()
    batches = run.batches(0)
    found = list(run._batches(batches))
    assert len(batches) > 1 and len({len(b.tokens) for b in found}) == 1
    for indices, batch in zip(batches, found, strict=True):
        alone = [run.sequences.load(i, "hidden", "last", "argmax") for i in indices]
        used = sum(batch.lengths)
        for mine, name in ((batch.features, "hidden"), (batch.last, "last")):
            reference = torch.cat([own[name] for own in alone]).float()
            # bf16, six layers: other kernels round differently, by some percent; a wrong mask or position by far more.
            assert (mine[:used].float() - reference).abs().mean() < 0.04 * reference.abs().mean()


@pytest.mark.parametrize("budget", [256, 1024])
def test_online_training_killed_and_resumed_ends_with_the_same_weights(online, tmp_path, budget):
    rows, second = tinymodels.resumed(lambda: online(budget), 3, tmp_path / "state.pt")
    assert rows == [row["loss"] for row in second.rows]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("way", [(), ("--sharded",)], ids=["data parallel", "sharded"])
def test_two_gpus_train_as_one(way):
    script = Path(__file__).parents[2] / "benchmarks" / "train" / "scaling.py"
    command = [sys.executable, str(script), "--device", "cuda", "--ranks", "2", "--batches-per-step", "4", *way]
    # Weights and optimizer state are most of what this takes.
    command += ["--shape", "llama-8b", "--batch-tokens", "1024", "--steps", "12", "--rounds", "1", "--limit", "300"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["largest_relative_loss_difference"] < 2e-3
    assert [run["sharded"] for run in found["measured"]] == [bool(way), False]
    both, (one,) = (run["peak_memory_bytes_by_rank"] for run in found["measured"])
    assert len(both) == 2 and (not way or max(both) < one)
