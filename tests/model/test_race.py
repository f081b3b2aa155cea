"""The race's own parts: samples as the other trainers read them, their checkpoints as ours, batches and useful work."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "train"))

import jobs
import layouts

import tinymodels
from breakeven import speed, target, training
from breakeven.cli import UserError
from breakeven.hidden_states import Sequences

IDS = torch.arange(1, 120, 2)
D2T = IDS - torch.arange(len(IDS))


@pytest.fixture
def sequences(states):
    return Sequences([states])


@pytest.fixture
def drafter(target_folder):
    return tinymodels.make_drafter(target_folder, IDS)


def test_speculators_sample_is_the_stored_sequence(sequences):
    sample, stored = (
        layouts.speculators_sample(sequences, 2),
        sequences.load(2, "token_ids", "hidden", "last", "loss_mask"),
    )
    assert sample["input_ids"].dtype == torch.int64 and sample["input_ids"].tolist() == stored["token_ids"].tolist()
    size = stored["last"].shape[1]
    for k in range(stored["hidden"].shape[1]):  # layer by layer, side by side
        assert torch.equal(sample["hidden_states"][:, k * size : (k + 1) * size], stored["hidden"][:, k])
    assert torch.equal(sample["verifier_last_hidden_states"], stored["last"])
    assert torch.equal(sample["loss_mask"], stored["loss_mask"])


def test_specforge_sample_gives_the_targets_predictions_by_its_head_alone(sequences, target_folder):
    names = ["model.norm.weight", "model.embed_tokens.weight"]
    norm, head = target.load_tensors(target_folder, names).values()
    sample = layouts.specforge_sample(sequences, 1, norm, target.text_config(target_folder)["rms_norm_eps"])
    greedy = sequences.load(1, "argmax")["argmax"].long()
    known = greedy >= 0
    predicted = F.linear(sample["hidden_state"], head).argmax(-1)
    assert known.sum() > 20 and (predicted == greedy)[known].float().mean() > 0.9
    assert sample["loss_mask"].sum() == sequences.response_length(1)


@pytest.mark.parametrize("rename", [layouts.to_speculators, str], ids=["speculators", "specforge"])
def test_export_reads_back_as_the_drafter(drafter, tmp_path, rename):
    tensors = {rename(name): x.bfloat16() for name, x in drafter.state_dict().items()}
    t2d = torch.zeros(tinymodels.VOCABULARY, dtype=torch.bool)
    copies = {"embed_tokens.weight": drafter.embed_tokens.clone(), "d2t": D2T, "t2d": t2d}
    save_file(tensors | copies, tmp_path / "model.safetensors")
    found = layouts.read_export(tmp_path, D2T)
    assert found.keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16().float())
    with pytest.raises(UserError, match="differs from the vocabulary"):
        layouts.read_export(tmp_path, D2T + 1)


def test_plan_is_the_trainers_epochs_cut_off(sequences, drafter):
    chosen = sequences.training()
    lengths = [sequences.length(i) for i in range(len(sequences))]
    once = sum(lengths[i] for i in chosen)
    first, second = (training.epoch_batches(lengths, chosen, 100, 3, epoch) for epoch in (0, 1))
    assert jobs.plan(sequences, chosen, once, 100, 3) == first
    assert jobs.plan(sequences, chosen, once + 1, 100, 3) == first + second[:1]
    assert jobs.plan(sequences, chosen, 1, 100, 3) == first[:1]


def test_useful_work_is_what_the_trainer_counts(sequences, drafter):
    batch = training.collate(sequences, [0, 1, 2], 3)
    counted = speed.training_flops(drafter.config, 3, *batch.flops)
    parts = [(sequences.length(i), sequences.response_length(i)) for i in range(3)]
    assert sum(jobs.useful_flops(drafter.config, 3, *part) for part in parts) == pytest.approx(counted)
    # A prompt of one token: row p predicts x[p+2], so the first response token has no row.
    short = speed.training_flops(drafter.config, 3, 6, 4, 4 + 3 + 2, 1 + 2 + 3 + 4)
    assert jobs.useful_flops(drafter.config, 3, 6, 5) == short
