"""What must not happen to those who use it: code from a checkpoint, words for a shell, a key for everyone to read."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml
from snakemake.utils import format

from breakeven import artefacts, chat, engines, reportpage, servers
from breakeven.cli import UserError
from breakeven.engines import Speculation
from project import ROOT, copy_project, snakemake

SOURCES = sorted((ROOT / "scripts").rglob("*.py"))


def calls(path: Path):
    """(dotted name, keywords) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_of_a_checkpoint_is_run(path):
    """Pickles are read as tensors alone, code beside a model is never allowed, no shell sees a name, YAML is plain."""
    for name, words in calls(path):
        values = {key: getattr(value, "value", None) for key, value in words.items()}
        assert name not in ("pickle.load", "pickle.loads", "torch.hub.load", "os.system", "eval", "exec", "yaml.load")
        assert values.get("shell") is not True and values.get("allow_pickle") is not True
        assert values.get("trust_remote_code") is not True
        if name == "torch.load":
            assert values.get("weights_only") is True


def test_code_beside_a_tokenizer_is_not_run(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", null]}, "chat_template": "x"}'
    )
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\nclass OwnConfig: pass\n")
    with pytest.raises(UserError, match="its tokenizer cannot be read"):
        chat.load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_is_off_in_the_default_config():
    """Where an experiment allows it, its engine's flags or responses say so, and so does the manifest that records them."""
    for path in [ROOT / "config.yaml", *(ROOT / "experiments").glob("*.yaml")]:
        allowed = re.findall(r"trust.remote.code: true", path.read_text())
        assert not allowed or path.name == "kimi-k2.5.yaml", path


def test_the_page_says_that_code_of_the_model_was_run(tmp_path):
    path = tmp_path / "pass-1.manifest.json"
    artefacts.write_manifest(path, "benchmark", parameters={"arm": "a", "flags": {"trust-remote-code": True}})
    found = reportpage.read_manifests([path])
    assert ("flags.trust-remote-code", "true") in [tuple(item) for item in found[0]["parameters"]]


@pytest.mark.parametrize("name", engines.ENGINES)
def test_a_server_listens_on_this_machine_alone_and_its_key_is_in_no_command_line(name, tmp_path):
    engine = engines.engine(name)
    command = engine.command("python", "target", "name", 5000, Speculation(), {"max-running-requests": 1}, set())
    assert command[command.index("--host") + 1] == "127.0.0.1"
    words = engines.require_key("a-secret", tmp_path)
    assert "a-secret" not in " ".join(words)
    assert "a-secret" in (tmp_path / "key.yaml").read_text()


def test_no_key_reads_as_an_option_or_a_number(tmp_path, monkeypatch):
    """These bytes are "-_v7..." in base64, and one key in 64 began so: SGLang then said that --api-key has no value."""
    monkeypatch.setattr("secrets.token_bytes", lambda count: b"\xfb" * count)
    assert servers.draw_key().isalnum()
    engines.require_key("0012", tmp_path)
    assert yaml.safe_load((tmp_path / "key.yaml").read_text()) == {"api-key": "0012"}


HOSTILE = "my 'prompts' $(touch pwned); touch pwned #.jsonl"


def test_file_names_of_the_config_are_words_of_no_shell(tmp_path):
    """A prompt file and a drafter's folder with everything in their names that a shell would act on."""
    work = copy_project(tmp_path / "project")
    (work / HOSTILE).write_text((work / "resources/reference-prompts.jsonl").read_text())
    drafter = work / "a drafter; touch pwned"
    drafter.mkdir()
    for file in ("config.json", "model.safetensors"):
        (drafter / file).write_text("{}")
    overlay = {
        "protocols": {"quick": {"prompts": HOSTILE}},
        "drafters": {"own": {"initialise_from": drafter.name, "samples": 90}, "given": {"checkpoint": drafter.name}},
        "arms": {"vllm-given-k3": {"engine": "vllm", "protocol": "quick", "drafter": "given", "k": 3}},
    }
    (work / "hostile.yaml").write_text(yaml.safe_dump(overlay))
    done = snakemake(work, "--dry-run", "--forceall", "--printshellcmds", config="hostile.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    commands = re.findall(r"^Shell command: (.+)$", done.stdout + done.stderr, re.M)
    words = {word for command in commands for word in shlex.split(command)}
    assert {HOSTILE, drafter.name} <= words
    # The prompts are checked against what is to be trained.
    (selecting,) = [command for command in commands if "scripts/select_prompts.py" in command]
    assert "--samples 90 " in selecting
    # New weights where training starts from run it again.
    started = re.search(r"^rule train_drafter:\n    input: (.*)$", done.stdout + done.stderr, re.M)
    assert f"{drafter.name}/model.safetensors" in started[1]
    # Only the rules' own redirections and pipes are left for the shell.
    operators = {word for command in commands for word in split(command) if set(word) <= set("();<>|&")}
    assert operators <= {">", ">&", "|", "&&"}, operators
    assert not any("$(" in word and "'" not in command for command in commands for word in split(command))


def test_paths_of_shards_are_words_of_no_shell():
    """A shard may lie in an object store whose name the config gives; several are quoted one by one."""
    assert format("{files:q}", files=["a b/1", "$(c)/2"]) == "'a b/1' '$(c)/2'"
    assert format("{files:q}", files=[]) == ""
    rules = "".join(path.read_text() for path in sorted((ROOT / "rules").glob("*.smk")))
    assert len(re.findall(r"\{(?:input|output)\.(?:sequences|responses|states|manifests):q\}", rules)) >= 8
    assert not re.findall(r"\{(?:input|output)\.(?:sequences|responses|states|manifests)\}", rules)


def split(command: str) -> list[str]:
    return list(shlex.shlex(command, posix=True, punctuation_chars=True))
