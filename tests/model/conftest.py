"""Tiny random targets and hidden states of the Llama's own greedy responses, made once."""

import pytest

import tinymodels


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    return tinymodels.write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def mla_target(tmp_path_factory):
    return tinymodels.write_mla_target(tmp_path_factory.mktemp("mla-target"))


@pytest.fixture(scope="session")
def states(target_folder, tmp_path_factory):
    return tinymodels.write_shard(target_folder, tmp_path_factory.mktemp("states") / "shard-000000.safetensors")


@pytest.fixture(scope="session")
def responses(target_folder, tmp_path_factory):
    """The sequences of `states` as responses alone."""
    return tinymodels.write_responses(target_folder, tmp_path_factory.mktemp("responses") / "shard-000000.parquet")
