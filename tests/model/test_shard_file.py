"""A shard that is filled row by row, by transformers or an engine, equals the one that is made in memory."""

import os

import pytest
import torch
from safetensors.torch import load_file

import tinymodels
from breakeven import hidden_states, shard_file, target
from breakeven.cli import UserError
from tinymodels import DISTINCT


@pytest.fixture(scope="module")
def extracted(target_folder):
    """(prompts, responses, the tensors of an extraction in memory)."""
    prompts, responses = tinymodels.sequences(target_folder, count=5)
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    return prompts, responses, hidden_states.extract(capture, prompts, responses, 64, "cpu")


def chunks(lengths, size):
    """Steps of an engine with chunked prefill: every sequence in pieces, some of several sequences in one step."""
    pieces = [(i, a, min(size, n - a)) for i, n in enumerate(lengths) for a in range(0, n, size)]
    return [pieces[a : a + 2] for a in range(0, len(pieces), 2)]


class Engine:
    """An engine that knows the hidden states already."""

    def __init__(self, tensors, left_out=None, device="cpu", dtype=torch.bfloat16):
        self.tensors, self.left_out, self.device, self.dtype = tensors, left_out, device, dtype

    def extract(self, folder, sequences, path, layers, config, settings):
        starts, hidden = self.tensors["cu_seqlens"].tolist(), self.tensors["hidden"]
        captured = torch.cat([hidden, self.tensors["last"][:, None]], 1).to(self.device, self.dtype)
        writer = shard_file.Writer(path)
        for pieces in chunks(list(map(len, sequences)), 16):
            pieces = [piece for piece in pieces if piece[0] != self.left_out]
            if pieces:
                writer.add(pieces, torch.cat([captured[starts[i] + a : starts[i] + a + n] for i, a, n in pieces]))
        writer.close()
        yield from enumerate(sequences)


def fill(path, folder, extracted, codec="bfloat16", **kwargs):
    prompts, responses, tensors = extracted
    return shard_file.extract(Engine(tensors, **kwargs), folder, DISTINCT, prompts, responses, path, codec, {})


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("codec", hidden_states.CODECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filled_by_chunks_it_is_the_shard_of_the_other_path(extracted, tmp_path, target_folder, codec, device, dtype):
    made = fill(tmp_path / "shard", target_folder, extracted, codec, device=device, dtype=dtype)
    norm, head = target.load_norm_and_head(target_folder)
    shard_file.fill_argmax(made, norm, head, target.text_config(target_folder)["rms_norm_eps"], "cpu", rows=7)
    stored = load_file(tmp_path / "shard")
    expected = hidden_states.encode_shard(extracted[2], codec)
    for name in ("token_ids", "loss_mask", "cu_seqlens", "hidden", "last"):
        assert torch.equal(stored[name], expected[name]), name
    agree = (stored["argmax"] == expected["argmax"]).float().mean()
    assert agree == 1 if codec == "bfloat16" else agree > 0.9
    assert torch.equal(stored["argmax"] < 0, expected["argmax"] < 0)
    assert not shard_file.rows_path(tmp_path / "shard").exists()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("codec", hidden_states.CODECS)
def test_filled_by_transformers_it_is_the_shard_that_was_made_in_memory(
    extracted, tmp_path, target_folder, codec, device
):
    prompts, responses, tensors = extracted
    capture = hidden_states.Capture(target.load_model(target_folder, device), DISTINCT)
    made = shard_file.extract_here(capture, prompts, responses, tmp_path / "shard", codec, 64, device)
    stored = load_file(tmp_path / "shard")
    for name, expected in hidden_states.encode_shard(tensors, codec).items():
        assert torch.equal(stored[name], made[name]), name
        if device == "cpu" or name in ("token_ids", "loss_mask", "cu_seqlens"):
            assert torch.equal(stored[name], expected), name
    assert not shard_file.rows_path(tmp_path / "shard").exists()


def test_what_stops_the_target_leaves_no_rows(extracted, tmp_path, target_folder):
    prompts, responses, _ = extracted
    capture = hidden_states.Capture(target.load_model(target_folder, "cpu"), DISTINCT)
    with pytest.raises(UserError, match="sequence 1 has 1 prompt and 0 response tokens"):
        shard_file.extract_here(
            capture, [prompts[0], [3]], [responses[0], []], tmp_path / "shard", "bfloat16", 64, "cpu"
        )
    assert not shard_file.rows_path(tmp_path / "shard").exists()


def test_a_sequence_that_never_comes_is_named(extracted, target_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_file, "PATIENCE_S", 0.1)
    with pytest.raises(UserError, match=r"0 of the 41 tokens of sequence 2;"):
        fill(tmp_path / "shard", target_folder, extracted, left_out=2)
    assert not shard_file.rows_path(tmp_path / "shard").exists()


def test_what_lies_side_by_side_is_written_at_once(extracted, target_folder, tmp_path, monkeypatch):
    pwrite, written = os.pwrite, []

    def noted(descriptor, data, place):
        written.append(len(data))
        return pwrite(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", noted)
    lengths = extracted[2]["cu_seqlens"].diff().tolist()
    fill(tmp_path / "shard", target_folder, extracted)
    rows = [sum(count for *_, count in pieces) for pieces in chunks(lengths, 16)]
    assert written == [n * layers * 32 * 2 for n in rows for layers in (3, 1)]  # hidden, last; 32 numbers of 2 bytes


def test_rows_behind_a_sequence_are_refused(extracted, target_folder, tmp_path):
    class Wrong:
        def extract(self, folder, sequences, path, *_):
            shard_file.Writer(path).add([(1, 30, 20)], torch.zeros(20, 4, 32))
            yield 0, []

    with pytest.raises(ValueError, match="sequence 1 has no positions 30 ... 49"):
        shard_file.extract(Wrong(), target_folder, DISTINCT, *extracted[:2], tmp_path / "shard", "bfloat16", {})


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embeddings_where_they_are_tied(tmp_path, tied):
    folder = tinymodels.write_target(tmp_path, tie_word_embeddings=tied)
    norm, head = target.load_norm_and_head(folder)
    model = target.load_model(folder, "cpu")
    assert torch.equal(norm, model.model.norm.weight) and torch.equal(head, model.lm_head.weight)
