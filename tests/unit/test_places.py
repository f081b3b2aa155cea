import numpy as np
import pytest

import benchmark_files as files
from breakeven import artefacts, comparison, places, tables


def walks(rates, outputs=8, k=3, seed=0):
    """Accepted tokens of each step; rates: (end place, probability of each drafted token), in order."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(outputs):
        steps, place = [], 1
        while place < rates[-1][0]:
            rate = next(rate for end, rate in rates if place < end)
            steps.append(int(np.cumprod(rng.random(k) < rate).sum()))
            place += steps[-1] + 1
        found.append(steps)
    return found


def test_a_step_counts_where_its_drafts_begin():
    rows = places.table([[2, 0, 3, 1], []], 3, trained=5)  # places 1, 4, 5 and 9
    assert [(row["first"], row["end"], row["histogram"]) for row in rows] == [
        (0, 5, [1, 0, 1, 0]),
        (5, 128, [0, 1, 0, 1]),
    ]
    assert [row["steps"] for row in rows] == [2, 2] and [row["acceptance_length"] for row in rows] == [2.0, 3.0]
    assert all(1 <= row["low"] <= row["acceptance_length"] <= row["high"] <= 4 for row in rows)
    assert places.table([], 3, None) == []


def test_a_drop_beyond_the_trained_length_is_seen():  # B051
    rows = places.table(walks([(2048, 0.7), (6000, 0.2)]), 3, trained=2048)
    lengths = {row["first"]: row["acceptance_length"] for row in rows}
    assert set(lengths) == {0, 128, 512, 2048}
    assert all(lengths[first] == pytest.approx(2.53, abs=0.2) for first in (0, 128, 512))
    assert lengths[2048] == pytest.approx(1.25, abs=0.1)
    said = places.fall(rows)
    assert "beyond output token 2048" in said and "responses.sampling.max_tokens" in said
    assert f"to {lengths[2048]:.2f}" in said


@pytest.mark.parametrize(
    "rates, trained",
    [
        ([(6000, 0.7)], 2048),  # no drop
        ([(2048, 0.7), (6000, 0.2)], None),  # nobody knows what it was trained on
        ([(2048, 0.7), (6000, 0.2)], 8192),  # trained beyond all outputs
        ([(2048, 0.7), (2050, 0.2)], 2048),  # too few steps beyond
    ],
)
def test_nothing_is_said_without_ground(rates, trained):
    assert places.fall(places.table(walks(rates), 3, trained)) is None


def test_of_noise_alone_hardly_any_drop_is_named():
    named = [places.fall(places.table(walks([(700, 0.6)], outputs=4, seed=seed), 3, 512)) for seed in range(200)]
    assert sum(said is not None for said in named) <= 2


def test_the_comparison_takes_it_from_the_walk_on_the_arms_own_outputs(tmp_path):
    drop = places.table(walks([(2048, 0.7), (6000, 0.2)]), 3, trained=2048)
    kept = {"vllm-own-k3": drop, "own": places.table(walks([(600, 0.7)]), 3, trained=2048)}
    paths = {}
    for name, rows in kept.items():
        paths[name] = tmp_path / name / "offline.parquet"
        files.write_offline(paths[name])
        manifest = artefacts.manifest_path(paths[name])
        artefacts.write_manifest(manifest, "offline", parameters={}, inputs={}, by_output_position=rows)
    base, fast = files.default(), files.default("vllm-own-k3", k=3, drafter="own", rate=42.0)
    for spec in (base, fast):
        files.write(tmp_path / "benchmarks", spec)
    out = [tmp_path / f"{name}.parquet" for name in ("summary", "acceptance", "requests")]
    result = comparison.run(tmp_path / "benchmarks", ["vllm-none", "vllm-own-k3"], paths, *out)
    details = result.details["vllm-own-k3"]
    assert [row["first"] for row in details["by_output_position"]] == [0, 128, 512, 2048]
    assert any("beyond output token 2048" in warning for warning in details["warnings"])
    assert result.details["vllm-none"]["by_output_position"] == []
    assert artefacts.read_table(out[0], tables.SUMMARY).num_rows == 2


def test_what_a_drafter_was_trained_on_is_in_its_manifest(tmp_path):
    assert places.longest_trained(tmp_path) is None  # a published drafter
    for counts, found in (({"longest_response": 256}, 256), ({"training_sequences": 1}, None)):
        artefacts.write_manifest(tmp_path / "manifest.json", "drafter", parameters={}, inputs={}, counts=counts)
        assert places.longest_trained(tmp_path) == found
