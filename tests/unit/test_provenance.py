"""A shard from another target, template, pool, sampling or place is named; a sound chain passes."""

import pytest

from breakeven import artefacts
from breakeven.cli import UserError
from breakeven.provenance import check_chain

SAMPLING = {"max_tokens": 8, "temperature": 0, "seed": 0}


def write_responses(results, start, content="ids", sampling=SAMPLING):
    path = results / f"responses/shard-{start:06d}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{content} {start}")
    artefacts.write_manifest(
        artefacts.manifest_path(path),
        "responses",
        parameters={"start": start, "count": 10, "sampling": sampling, "settings": {"max_num_seqs": 4 + start}},
        inputs={"pool": results / "prompts/pool.parquet", "target": results / "target/manifest.json"},
        files={path.name: artefacts.sha256(path)},
    )
    return path


def write_states(results, start):
    path = results / f"hidden_states/shard-{start:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    artefacts.write_manifest(
        artefacts.manifest_path(path),
        "hidden_states",
        parameters={},
        inputs={
            "responses": results / f"responses/shard-{start:06d}.parquet",
            "target": results / "target/manifest.json",
        },
    )
    return path


def write_run(results, seed=0, template=None):
    """A chain of three shards; returns its hidden-state shards."""
    artefacts.write_manifest(results / "target/manifest.json", "target", parameters={"chat_template": template})
    pool = results / "prompts/pool.parquet"
    pool.parent.mkdir(parents=True)
    pool.write_text(f"ranked with seed {seed}")
    artefacts.write_manifest(
        artefacts.manifest_path(pool), "prompts", parameters={}, outputs={pool.name: artefacts.sha256(pool)}
    )
    for start in (0, 10, 20):
        write_responses(results, start)
    return [write_states(results, start) for start in (0, 10, 20)]


def copy(source, destination, *names):
    for name in names:
        (destination / name).write_bytes((source / name).read_bytes())


SHARD = ("hidden_states/shard-000010.safetensors", "hidden_states/shard-000010.manifest.json")
RESPONSES = ("responses/shard-000010.parquet", "responses/shard-000010.manifest.json")


@pytest.fixture
def here(tmp_path):
    return tmp_path / "here"


@pytest.fixture
def states(here):
    return write_run(here)


def refused(here, states, said):
    with pytest.raises(UserError) as error:
        check_chain(here / "target", states)
    assert said in str(error.value) and "\n" not in str(error.value) and "delete it and shard-0000" in str(error.value)


def test_a_sound_chain_passes(here, states):
    check_chain(here / "target", states)
    check_chain(here / "target", sorted((here / "responses").glob("*.parquet")))


@pytest.mark.parametrize("names", [SHARD, SHARD + RESPONSES])
def test_a_shard_of_another_template_is_named(here, states, tmp_path, names):
    write_run(tmp_path / "other", template="other.jinja")
    copy(tmp_path / "other", here, *names)
    refused(here, states, "hidden_states/shard-000010.safetensors: made from another target or chat template than")


def test_responses_of_another_target_are_named_where_only_they_are_read(here, states, tmp_path):
    write_run(tmp_path / "other", template="other.jinja")
    copy(tmp_path / "other", here, *RESPONSES)
    refused(
        here, sorted((here / "responses").glob("*.parquet")), "responses/shard-000010.parquet: made from another target"
    )


def test_a_shard_of_another_seed_is_named(here, states, tmp_path):
    write_run(tmp_path / "other", seed=1)
    copy(tmp_path / "other", here, *SHARD, *RESPONSES)
    refused(
        here, states, "responses/shard-000010.parquet: made from another pool of prompts (seed, sources or filters)"
    )
    for path in (here / "prompts").iterdir():
        path.unlink()
    refused(here, states, "than most shards")


def test_hidden_states_of_former_responses_are_named(here, states):
    write_responses(here, 10, content="newer ids")
    refused(here, states, "hidden_states/shard-000010.safetensors: made from other responses than")


def test_another_sampling_is_named(here, states):
    write_responses(here, 10, sampling=SAMPLING | {"seed": 1})
    write_states(here, 10)
    refused(here, states, "responses/shard-000010.parquet: made with sampling")


def test_a_shard_under_another_shards_name_is_named(here, states):
    for old, new in zip(SHARD + RESPONSES, [n.replace("000010", "000020") for n in SHARD + RESPONSES], strict=True):
        (here / new).write_bytes((here / old).read_bytes())
    manifest = artefacts.read_json(here / "responses/shard-000020.manifest.json")
    manifest["files"] = {"shard-000020.parquet": manifest["files"]["shard-000010.parquet"]}
    artefacts.write_json(here / "responses/shard-000020.manifest.json", manifest)
    refused(here, states, "responses/shard-000020.parquet: holds the prompts from rank 10, another shard's")


def test_hidden_states_that_were_handed_over_alone_are_taken(here, states):
    for path in (here / "responses").iterdir():
        path.unlink()
    check_chain(here / "target", states)
