"""Training on two ranks (gloo, two processes on the CPU) is training on one, data parallel or sharded.

Curves, weights, resuming, a killed rank, what a rank holds.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import tinymodels
from breakeven import artefacts, checkpoint, ranks, training, vocabulary
from breakeven.hidden_states import Sequences

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "train_drafter.py")
# Nine training sequences make five batches an epoch, so that the last step of an epoch is not full.
SETTINGS = {"ttt_steps": 3, "epochs": 8, "learning_rate": 2e-3, "batch_tokens": 80}


@pytest.fixture(scope="module")
def data(target_folder, states, tmp_path_factory):
    """train_drafter.py's options that name what it reads."""
    folder = tmp_path_factory.mktemp("ranks")
    d2t, t2d = vocabulary.maps(range(0, 120, 2), tinymodels.VOCABULARY)
    save_file({"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}, folder / "vocabulary.safetensors")
    artefacts.write_manifest(folder / "vocabulary.manifest.json", "vocabulary", parameters={})
    return ["--target", target_folder, "--hidden-states", states, "--vocabulary", folder / "vocabulary.safetensors"]


def options(data, out, batches_per_step, *more, **changes):
    settings = json.dumps(SETTINGS | {"batches_per_step": batches_per_step} | changes)
    return list(
        map(str, [*data, "--settings", settings, "--threads", 2 if "--ranks" in more else 1, "--out", out, *more])
    )


def alone(data, out, batches_per_step, *more, **changes):
    """Train on one rank, in this process."""
    threads = torch.get_num_threads()
    try:
        tinymodels.run_script("train_drafter", *options(data, out, batches_per_step, *more, **changes))
    finally:
        torch.set_num_threads(threads)
    return out


def two_ranks(data, out, batches_per_step, *more, **changes):
    """Start training on two ranks."""
    command = [sys.executable, SCRIPT, *options(data, out, batches_per_step, "--ranks", 2, *more, **changes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def curves(folder):
    rows = artefacts.read_table(folder / "training.parquet").to_pylist()
    return [[row["step"], row["split"], row["tokens"], row["loss"], *row["accuracy"]] for row in rows]


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """One rank, four batches a step, of which the last of an epoch has one; gradients are clipped."""
    folder = alone(data, tmp_path_factory.mktemp("one") / "checkpoint", 4)
    norms = artefacts.read_table(folder / "training.parquet")["gradient_norm"].drop_null().to_pylist()
    assert max(norms) > 1 > min(norms)
    return folder


WAYS = pytest.mark.parametrize("way", [(), ("--sharded",)], ids=["data parallel", "sharded"])


@WAYS
def test_curves_and_weights_are_those_of_one_rank(way, data, one, tmp_path):
    process = two_ranks(data, tmp_path / "two", 4, *way)
    log, _ = process.communicate(timeout=120)
    assert process.returncode == 0, log
    mine, reference = curves(tmp_path / "two"), curves(one)
    assert len(mine) == len(reference) == 8 * 3  # two steps and a validation
    for a, b in zip(mine, reference, strict=True):
        # The sums of four gradients differ in their order; weights then round to other bf16 numbers here and there.
        assert a[:3] == b[:3] and a[3] == pytest.approx(b[3], rel=2e-3) and a[4:] == pytest.approx(b[4:], abs=0.03)
    assert log.count("training: ") == 1 and log.count("epoch 8: held-out loss") == 1, log
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == sorted(p.name for p in one.iterdir())
    assert artefacts.read_json(tmp_path / "two" / "speed.json")["devices"] == 2


@WAYS
def test_a_run_goes_on_with_other_ranks_and_a_killed_rank_ends_all(way, data, tmp_path, monkeypatch):
    """One rank for four steps, then two of which one is killed, then one again. Two batches a step: equal to the bit."""
    # The norm of a sharded gradient is summed in another order; where it clips, it does so by another last bit.
    settings = {"gradient_clip": 1e9} if way else {}
    reference = alone(data, tmp_path / "reference", 2, **settings)

    class Stopped(Exception):
        pass

    save = training.Run.save

    def save_and_stop(run, path, key):
        save(run, path, key)
        if run.step == 4:
            raise Stopped

    out, state = tmp_path / "checkpoint", tmp_path / "checkpoint.partial" / "state.pt"
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        patched.setattr(training.Run, "save", save_and_stop)
        alone(data, out, 2, "--save-every", 0, **settings)

    process = two_ranks(data, out, 2, "--save-every", 0, *way, **settings)
    while process.poll() is None and torch.load(state, weights_only=True)["place"][2] < 7:
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    victim = next(rank for rank in children if rank.environ()["RANK"] == "1")
    os.kill(victim.pid, signal.SIGKILL)
    log, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "resuming at epoch 2, optimizer step 4" in log and log.count("resuming") == 1
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in children)
    assert not out.exists() and 7 <= torch.load(state, weights_only=True)["place"][2] < 24

    alone(data, out, 2, **settings)
    assert curves(out) == curves(reference)
    found, expected = (load_file(folder / "model.safetensors") for folder in (out, reference))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    if not way:  # the table of the run holds the norms
        assert (out / "manifest.json").read_bytes() == (reference / "manifest.json").read_bytes()


@pytest.mark.parametrize("change", ["nothing", "scratch", "weights"])
def test_a_run_from_another_start_does_not_go_on_from_a_state(change, data, one, tmp_path, monkeypatch):
    start, out, resumed = shutil.copytree(one, tmp_path / "start"), tmp_path / "checkpoint", []
    (start / "manifest.json").unlink()  # as a published drafter has none

    def stop(*_, **__):
        raise InterruptedError

    def resume(run, path, key, do=training.Run.resume):
        resumed.append(do(run, path, key))

    monkeypatch.setattr(training.Run, "resume", resume)
    with monkeypatch.context() as patched, pytest.raises(InterruptedError):
        patched.setattr(checkpoint, "save", stop)
        alone(data, out, 4, "--save-every", 0, "--initialise-from", start, epochs=1)
    if change == "weights":
        weights = load_file(start / "model.safetensors")
        save_file(weights | {"norm.weight": weights["norm.weight"] + 1}, start / "model.safetensors")
    alone(data, out, 4, "--initialise-from", "scratch" if change == "scratch" else start, epochs=1)
    assert resumed == [False, change == "nothing"]
    inputs = artefacts.read_manifest(out / "manifest.json", "drafter")["inputs"]
    assert ("initialise_from/model.safetensors" in inputs) == (change != "scratch")


def test_more_ranks_than_batches_in_a_step_are_refused(data, tmp_path):
    process = two_ranks(data, tmp_path / "checkpoint", 1)
    log, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "2 ranks cannot share the 1 batches of an optimizer step" in log
    assert not (tmp_path / "checkpoint").exists()


def held(run):
    """Bytes of memory behind what a rank keeps between steps: weights, gradients and both moments."""
    kept = [x for p in run.drafter.parameters() for x in (p, p.grad, *run.optimizer.state[p].values()) if x is not None]
    return sum(x.to_local().untyped_storage().nbytes() for x in kept if hasattr(x, "to_local"))


def each_holds_half(own, target_folder, states, state):
    def make():
        ids = torch.arange(0, 120, 2)
        drafter = tinymodels.make_drafter(target_folder, ids)
        inside = torch.isin(torch.arange(tinymodels.VOCABULARY), ids)
        head = training.TargetHead(torch.ones(32), drafter.embed_tokens[ids].float(), inside, 1e-6)
        settings = training.Settings(**SETTINGS | {"epochs": 1, "batches_per_step": 2})
        return training.Run(drafter, head, Sequences([states]), settings, "cpu", ranks=own)

    first = make()
    whole = sum(4 * p.numel() for p in first.drafter.parameters())
    next(first.steps())
    assert held(first) == 4 * whole // 2
    first.save(state, "key")
    own.wait()
    second = make()
    assert second.resume(state, "key")
    assert held(second) == 3 * whole // 2  # no gradient yet
    list(second.steps())
    assert held(second) == 4 * whole // 2


class Odd(torch.nn.Module):
    """Three rows and one number for two ranks."""

    def __init__(self):
        super().__init__()
        self.rows = torch.nn.Parameter(torch.arange(6.0).view(3, 2))
        self.one = torch.nn.Parameter(torch.ones(1))


def parts_make_a_whole(own):
    module, whole = Odd(), Odd()
    own.shard(module)
    assert len(module.rows.to_local()) == (2, 1)[own.rank] and len(module.one.to_local()) == (1, 0)[own.rank]
    own.gather(module)
    if own.writer:  # the other has no gradient, as in a step with fewer batches than ranks
        (module.rows * torch.tensor([3.0, 4.0])).sum().backward()
    counts = own.sum_gradients(module, torch.ones(2))
    gradients = own.gathered({name: p.grad for name, p in module.named_parameters()})
    state = own.gathered(module.state_dict())
    assert counts.tolist() == [2, 2]
    if own.writer:
        assert gradients["rows"].tolist() == [[3, 4]] * 3 and gradients["one"].tolist() == [0]
        assert all(torch.equal(state[name], p) for name, p in whole.named_parameters())
    else:
        assert not gradients and not state
    for name, p in module.named_parameters():
        assert torch.equal(own.own_part(whole.get_parameter(name).detach(), p).to_local(), p.to_local())
    assert own.all_write(own.writer) and not own.all_write(not own.writer)


def rank_of_two(rank, port, *args):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ranks.joined("cpu", sharded=True) as (own, _):
        parts_make_a_whole(own)
        each_holds_half(own, *args)


def test_two_ranks_hold_parts_that_make_a_whole(target_folder, states, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(rank_of_two, (port, target_folder, states, tmp_path / "state.pt"), nprocs=2)


LEAVES = """
import atexit, os, pathlib, sys, time
sys.path.insert(0, {scripts!r})
from breakeven import ranks
with ranks.joined("cpu") as (own, _):
    if own.writer:
        time.sleep(1)
        pathlib.Path({file!r}).write_text("whole")
    else:
        atexit.register(os.abort)  # as a thread of torch's did that was still there
"""


def test_no_rank_ends_the_others_by_how_it_leaves(tmp_path):
    script, file = tmp_path / "leaves.py", tmp_path / "written"
    script.write_text(LEAVES.format(scripts=os.path.dirname(SCRIPT), file=str(file)))
    done = subprocess.run([*ranks.torchrun(2), str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "whole"
