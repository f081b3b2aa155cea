"""Files are written whole or not at all; manifests add up; errors say what to do; full disks are named."""

import errno
import os
import signal
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


def test_a_file_has_the_rights_of_any_new_one(tmp_path):
    """A library may make files that only their owner reads; the results of a cluster are read by others."""
    mask = os.umask(0o027)
    try:
        with artefacts.atomic(tmp_path / "made") as temporary:
            os.close(os.open(temporary, os.O_CREAT, 0o600))
    finally:
        os.umask(mask)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o640


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


@pytest.fixture
def table(tmp_path):
    """A table and the manifest beside it."""
    path = tmp_path / "shard-000000.parquet"
    artefacts.write_table(path, [{"a": n, "b": [n] * 9} for n in range(50)], SCHEMA)
    artefacts.write_manifest(artefacts.manifest_path(path), "x", parameters={"k": 3}, files=artefacts.hashes(path))
    return path


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_every_flipped_byte_of_a_table_is_named(table):
    for at in range(0, table.stat().st_size, 7):
        flip(table, at)
        with pytest.raises(UserError, match=r"shard-000000.parquet: damaged or changed .* its sha256 is \w{64}, .*"):
            artefacts.read_table(table, SCHEMA)
        flip(table, at)
    assert artefacts.read_table(table, SCHEMA).num_rows == 50
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(UserError, match="shard-000000.manifest.json says .*; delete it and run the workflow again"):
        artefacts.read_table(table)


def test_every_flipped_byte_of_a_manifest_is_named_or_has_no_meaning(table):
    path = artefacts.manifest_path(table)
    sound = artefacts.read_manifest(path, "x")
    meaning = {key: value for key, value in sound.items() if key != artefacts.OWN_SHA256}
    for at in range(path.stat().st_size):
        flip(path, at)
        try:
            found = artefacts.read_json(path)
            assert {key: found.get(key) for key in sound if key != artefacts.OWN_SHA256} == meaning, at
        except UserError as error:
            assert str(path) in str(error)
        flip(path, at)


def test_a_manifest_that_is_written_anew_is_sound(table):
    """Numbers as keys, which JSON turns into texts, and a change through the same functions."""
    path = artefacts.manifest_path(table)
    artefacts.write_manifest(path, "x", parameters={}, drift={1: 0.5, 10: 0.1, 4: float("nan")})
    artefacts.write_json(path, artefacts.read_json(path) | {"parameters": {"k": 4}})
    assert artefacts.read_manifest(path, "x")["parameters"] == {"k": 4}


def test_files_of_another_manifest_of_the_folder_are_compared(tmp_path):
    for name in ("pool", "rejected"):
        artefacts.write_table(tmp_path / f"{name}.parquet", [{"a": 1, "b": []}], SCHEMA)
    both = artefacts.hashes(tmp_path / "pool.parquet", tmp_path / "rejected.parquet")
    artefacts.write_manifest(tmp_path / "pool.manifest.json", "prompts", parameters={}, outputs=both)
    flip(tmp_path / "rejected.parquet", 9)
    with pytest.raises(UserError, match=r"rejected.parquet: damaged .*pool.manifest.json says"):
        artefacts.read_table(tmp_path / "rejected.parquet")


@pytest.mark.parametrize("place", ["checkpoint/manifest.json", "manifest.json"])
def test_a_checkpoint_is_compared_before_it_is_served(tmp_path, place):
    """A trained drafter's manifest lies in its folder, a fetched one's above it."""
    weights = tmp_path / "checkpoint/model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"weights")
    artefact = "drafter" if place.startswith("checkpoint") else "published_drafter"
    artefacts.write_manifest(tmp_path / place, artefact, parameters={}, files=artefacts.hashes(weights))
    artefacts.verify_folder(weights.parent)
    flip(weights, 0)
    with pytest.raises(UserError, match="model.safetensors: damaged or changed since it was written"):
        artefacts.verify_folder(weights.parent)


def test_a_file_that_no_manifest_names_is_read(tmp_path):
    path = tmp_path / "foreign.parquet"
    artefacts.write_table(path, [{"a": 1, "b": []}], SCHEMA)
    assert artefacts.read_table(path).num_rows == 1


def run(body: str, environment=None) -> subprocess.CompletedProcess:
    code = f"from breakeven import cli, artefacts\ndef main():\n    {body}\ncli.run(main)"
    scripts = Path(artefacts.__file__).parents[1]
    environment = os.environ | (environment or {})
    return subprocess.run([sys.executable, "-c", code], cwd=scripts, env=environment, capture_output=True, text=True)


def test_errors_are_one_line_and_the_exit_code_says_so():
    done = run("raise cli.UserError('x.json, key a: 3 is no text; write a text')")
    assert done.returncode == 1 and done.stderr == "error: x.json, key a: 3 is no text; write a text\n"
    assert run("pass").returncode == 0 and run("raise KeyboardInterrupt").returncode == 130
    assert run("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(5)").returncode == 143
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
    hung_up = run("import os, signal, time; os.kill(os.getpid(), signal.SIGHUP); time.sleep(1)")
    assert hung_up.returncode == (0 if ignored else 129)


def test_a_full_disk_is_named():
    """/dev/full answers every write with 'no space left on device'."""
    done = run("f = open('/dev/full', 'w'); f.write('x'); f.flush()")
    assert done.returncode == 1 and "the disk is full" in done.stderr and "Traceback" not in done.stderr


def test_a_full_disk_is_named_in_the_words_of_a_library():
    done = run("raise RuntimeError('I/O error: No space left on device (os error 28)')")
    assert done.returncode == 1 and done.stderr.startswith("error: the disk is full; free some space")


@pytest.mark.parametrize(
    "first, code", [("OSError(28, 'No space')", 1), ("SystemExit(143)", 143), ("KeyboardInterrupt()", 130)]
)
def test_what_stopped_a_script_counts_also_where_another_error_hides_it(first, code):
    done = run(f"try:\n        raise {first}\n    finally:\n        raise RuntimeError('unexpected pos 704 vs 598')")
    assert done.returncode == code and ("error: the disk is full" in done.stderr) == (code == 1)
    assert "Traceback" not in done.stderr


def test_a_job_ends_with_the_snakemake_that_started_it():
    """BREAKEVEN_PARENT names a process that is gone."""
    parent = subprocess.Popen([sys.executable, "-c", "pass"])
    parent.wait()
    done = run("import time; time.sleep(60)", environment={"BREAKEVEN_PARENT": str(parent.pid)})
    assert done.returncode == 143 and "Snakemake that started this job is gone" in done.stderr


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
