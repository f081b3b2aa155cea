"""Cache bookkeeping against loops over requests and positions."""

import pytest
import torch
from sgl_kernel import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)

ROWS, WIDTH = 6, 40
REQUESTS, START, END = [4, 0, 5], [3, 7, 2], [6, 7, 9]  # the second one gets nothing


@pytest.fixture
def table():
    return torch.arange(1000, 1000 + ROWS * WIDTH, dtype=torch.int32).view(ROWS, WIDTH)


def test_slots_enter_the_table(table):
    before, slots = table.clone(), torch.arange(50, 60)
    assign_req_to_token_pool_cpu(torch.tensor(REQUESTS), table, torch.tensor(START), torch.tensor(END), slots, WIDTH)
    given = iter(slots.tolist())
    for row, start, end in zip(REQUESTS, START, END, strict=True):
        for position in range(start, end):
            before[row, position] = next(given)
    assert torch.equal(table, before)
    assert next(given, None) is None


def test_slots_come_out_of_the_table(table):
    out = torch.full((12,), -1)
    assign_extend_cache_locs_cpu(torch.tensor(REQUESTS), table, torch.tensor(START), torch.tensor(END), out, WIDTH)
    cells = [int(table[r, p]) for r, s, e in zip(REQUESTS, START, END, strict=True) for p in range(s, e)]
    assert out.tolist() == cells + [-1, -1]


@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (4, 2)])
def test_slots_of_drafts(table, topk, steps):
    out = torch.empty(3 * topk * steps, dtype=torch.long)
    assign_draft_cache_locs_contiguous_cpu(torch.tensor(REQUESTS), table, torch.tensor(START), out, WIDTH, topk, steps)
    assert out.tolist() == [
        int(table[r, s + i]) for r, s in zip(REQUESTS, START, strict=True) for i in range(topk * steps)
    ]


@pytest.mark.parametrize(("topk", "steps"), [(1, 1), (1, 3), (4, 2), (3, 5)])
def test_tables_of_draft_candidates(table, topk, steps):
    lengths, before = [3, 20, 9], table.clone()
    got = build_draft_decode_metadata_cpu(table, torch.tensor(REQUESTS), torch.tensor(lengths), topk, steps, WIDTH)
    assert got.shape == (3 * topk, WIDTH)
    for i, (row, length) in enumerate(zip(REQUESTS, lengths, strict=True)):
        for k in range(topk):
            wanted = table[row, :length].tolist() + [int(table[row, length + k * steps + s]) for s in range(steps)]
            assert got[i * topk + k, : length + steps].tolist() == wanted
    assert torch.equal(table, before)


def test_bonus_tokens():
    tokens, bonus = torch.arange(12), torch.empty(3, dtype=torch.int32)
    fill_bonus_tokens_cpu(tokens, torch.tensor([1, 4, 2]), bonus, 4)
    assert bonus.tolist() == [0, 7, 9]


def test_accepted_slots_close_up():
    out = torch.full((6,), -1)
    fill_accept_out_cache_loc_cpu(torch.tensor([[0, 2, -1], [4, -1, -1]]), torch.arange(100, 106), out)
    assert out.tolist() == [100, 102, 104, -1, -1, -1]


def test_cache_moves_in_every_layer_even_where_slots_overlap():
    layers = [torch.randn(10, 2, 8).bfloat16(), torch.randn(10, 3, 4)]
    before = [layer.clone() for layer in layers]
    source, target = [5, 2, 7, 8], [2, 3, 5, 1]
    copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([layer[0].numel() * layer.element_size() for layer in layers]),
        torch.tensor(target),
        torch.tensor(source),
    )
    for layer, old in zip(layers, before, strict=True):
        moved = dict(zip(target, source, strict=True))
        for slot in range(10):
            assert torch.equal(layer[slot], old[moved.get(slot, slot)])
    copy_all_layer_kv_cache_cpu(
        torch.tensor([0]), torch.tensor([8]), torch.tensor([], dtype=int), torch.tensor([], dtype=int)
    )
