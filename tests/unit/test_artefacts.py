"""Files are written whole or not at all; manifests add up; errors say what to do; full disks are named."""

import errno
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from breakeven import artefacts, selection
from breakeven.cli import UserError

SCHEMA = pa.schema([("a", pa.int32()), ("b", pa.list_(pa.int32()))])


def test_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    artefacts.write_json(path, {"old": 1})
    with pytest.raises(TypeError):
        artefacts.write_json(path, {"new": object()})
    with pytest.raises(RuntimeError), artefacts.atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert artefacts.read_json(path) == {"old": 1} and list(tmp_path.iterdir()) == [path]


def test_tables_keep_their_schema(tmp_path):
    path = tmp_path / "t.parquet"
    artefacts.write_table(path, [{"a": 1, "b": [1, 2]}, {"a": None, "b": None}], SCHEMA)
    assert artefacts.read_table(path, SCHEMA).to_pylist() == [{"a": 1, "b": [1, 2]}, {"a": None, "b": None}]
    with pytest.raises(UserError, match="column 'c' is missing; it has a, b"):
        artefacts.read_table(path, pa.schema([("c", pa.int32())]))
    path.write_bytes(b"PAR1 broken")
    with pytest.raises(UserError, match="not a readable Parquet file"):
        artefacts.read_table(path)
    with pytest.raises(UserError, match="no such file"):
        artefacts.read_table(tmp_path / "gone.parquet")


def test_manifests_add_up_and_know_their_artefact(tmp_path):
    path = tmp_path / "manifest.json"
    counts = {"in": 5, "kept": 3, "rejected": {"duplicate": 2}}
    artefacts.write_manifest(path, "prompts", parameters={}, counts=counts, inputs={"x": __file__})
    found = artefacts.read_manifest(path, "prompts")
    assert found["counts"] == counts and found["inputs"]["x"] == artefacts.sha256(__file__)
    with pytest.raises(UserError, match="manifest of 'prompts', but one of 'target'"):
        artefacts.read_manifest(path, "target")
    with pytest.raises(AssertionError, match="5 in, but kept"):
        artefacts.write_manifest(path, "prompts", parameters={}, counts=counts | {"kept": 4})
    path.write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        artefacts.read_manifest(path, "prompts")


def run(body: str, *arguments) -> subprocess.CompletedProcess:
    code = f"from breakeven import cli, artefacts\ndef main():\n    {body}\ncli.run(main)"
    scripts = Path(artefacts.__file__).parents[1]
    return subprocess.run([sys.executable, "-c", code, *arguments], cwd=scripts, capture_output=True, text=True)


def test_errors_are_one_line_and_the_exit_code_says_so():
    done = run("raise cli.UserError('x.json, key a: 3 is no text; write a text')")
    assert done.returncode == 1 and done.stderr == "error: x.json, key a: 3 is no text; write a text\n"
    assert run("pass").returncode == 0 and run("raise KeyboardInterrupt").returncode == 130
    assert run("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)").returncode == 143


def test_a_full_disk_is_named():
    """/dev/full answers every write with 'no space left on device'."""
    done = run("f = open('/dev/full', 'w'); f.write('x'); f.flush()")
    assert done.returncode == 1 and "the disk is full" in done.stderr and "Traceback" not in done.stderr


def test_the_file_that_filled_the_disk_is_named(tmp_path):
    with pytest.raises(OSError) as error, artefacts.atomic(tmp_path / "table.parquet"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert error.value.filename == str(tmp_path / "table.parquet")


def test_hidden_states_that_do_not_fit_are_refused_with_both_numbers(tmp_path):
    selection.check_space(tmp_path / "not" / "there", 1, "x")
    with pytest.raises(UserError, match=r"would take 5000000.00 GB and \d+\.\d\d GB are free"):
        selection.check_space(tmp_path, 5 * 10**15, "the hidden states of 7 responses")


def test_the_reference_cases_hidden_states_are_known_beforehand():
    assert selection.bytes_per_token(7168, 3) == 57_344 + 9
    # 14.4 million tokens of Kimi-K2.5 took 828 GB.
    assert 14.4e6 * selection.bytes_per_token(7168, 3) == pytest.approx(828e9, rel=0.01)
