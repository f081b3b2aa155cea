"""Paged attention against a loop over requests, heads and positions in float32."""

import pytest
import torch
from sgl_kernel import attention

HEADS, KV_HEADS, SIZE, SLOTS, ROWS, WIDTH = 6, 2, 16, 200, 5, 48


def reference(q, k, v, mask, scale, cap=0.0):
    """q [T, H, D], k, v [S, Hkv, D], mask bool [T, S] -> [T, H, D], one softmax at a time."""
    out = torch.zeros(len(q), q.shape[1], v.shape[-1])
    for t in range(len(q)):
        for h in range(q.shape[1]):
            own = h // (q.shape[1] // k.shape[1])
            scores = (k[:, own].float() @ q[t, h].float()) * scale
            if cap:
                scores = cap * torch.tanh(scores / cap)
            weights = scores.masked_fill(~mask[t], float("-inf")).softmax(0)
            out[t, h] = weights @ v[:, own].float()
    return out


class Cache:
    """Keys and values in scattered slots; every slot of the table that no request owns holds NaN."""

    def __init__(self, lengths, rows, dtype, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.lengths, self.rows = lengths, rows
        self.k = torch.full((SLOTS, KV_HEADS, SIZE), float("nan"), dtype=dtype)
        self.v = self.k.clone()
        self.table = torch.full((ROWS, WIDTH), SLOTS - 1, dtype=torch.int32)
        slots = torch.randperm(SLOTS - 1, generator=generator)
        self.keys, self.values = [], []
        for row, length in zip(rows, lengths, strict=True):
            own, slots = slots[:length], slots[length:]
            self.table[row, :length] = own.int()
            self.keys.append(torch.randn(length, KV_HEADS, SIZE, generator=generator).to(dtype))
            self.values.append(torch.randn(length, KV_HEADS, SIZE, generator=generator).to(dtype))
            self.k[own], self.v[own] = self.keys[-1], self.values[-1]


def close(got, wanted, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("lengths", [[1], [17], [9, 9], [31, 1, 12]])
def test_decode(lengths, cap, dtype):
    cache = Cache(lengths, [3, 0, 4][: len(lengths)], dtype)
    q = torch.randn(len(lengths), HEADS, SIZE).to(dtype)
    output = torch.full_like(q, float("nan"))
    # The newest token is not in the cache yet: the operator writes it.
    loc = torch.tensor([int(cache.table[r, n - 1]) for r, n in zip(cache.rows, lengths, strict=True)])
    cache.k[loc], cache.v[loc] = float("nan"), float("nan")
    key, value = (torch.stack([x[-1] for x in part]) for part in (cache.keys, cache.values))
    torch.ops.sgl_kernel.decode_attention_cpu(
        q, cache.k, cache.v, 1.0, 1.0, output, key.view(len(lengths), -1), value.view(len(lengths), -1), loc,
        torch.empty(0), cache.table, torch.tensor(cache.rows), torch.tensor(lengths), 0.3, cap, False, 0, None, None,
    )  # fmt: skip
    for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        close(
            output[i : i + 1], reference(q[i : i + 1], k, v, torch.ones(1, len(k), dtype=torch.bool), 0.3, cap), dtype
        )
    assert torch.equal(cache.k[loc], key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize(
    ("lengths", "own"), [([7], [7]), ([20], [4]), ([11, 30], [11, 5]), ([12, 9, 40], [4, 4, 4]), ([5, 8], [0, 3])]
)
def test_extend_causal(lengths, own, in_cache, dtype):
    check_extend(lengths, own, in_cache, dtype, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_cache", [False, True])
@pytest.mark.parametrize("lengths", [[14], [25, 10, 40]])
def test_extend_tree(lengths, in_cache, dtype):
    n = 5
    tree = torch.tril(torch.rand(len(lengths), n, n) < 0.5)
    tree[:, torch.arange(n), torch.arange(n)] = True
    check_extend(lengths, [n] * len(lengths), in_cache, dtype, tree)


def check_extend(lengths, own, in_cache, dtype, tree):
    cache = Cache(lengths, [2, 4, 1][: len(lengths)], dtype)
    q = torch.randn(sum(own), HEADS, SIZE).to(dtype)
    output = torch.full_like(q, float("nan"))
    starts = torch.tensor([sum(own[:i]) for i in range(len(own))])
    k_new = torch.cat([k[len(k) - n :] for k, n in zip(cache.keys, own, strict=True)])
    v_new = torch.cat([v[len(v) - n :] for v, n in zip(cache.values, own, strict=True)])
    if not in_cache:  # as with save_kv_cache=False
        for row, length, n in zip(cache.rows, lengths, own, strict=True):
            cache.k[cache.table[row, length - n : length]] = float("nan")
            cache.v[cache.table[row, length - n : length]] = float("nan")
    torch.ops.sgl_kernel.extend_attention_cpu(
        q, None if in_cache else k_new, None if in_cache else v_new, output, cache.k, cache.v, 1.0, 1.0, cache.table,
        torch.tensor(cache.rows), torch.tensor(lengths), torch.tensor(own, dtype=torch.int32), starts, max(own), 0.25,
        0.0, False, 0, None, None, None if tree is None else tree.view(-1), True,
    )  # fmt: skip
    for i, (k, v) in enumerate(zip(cache.keys, cache.values, strict=True)):
        length, n, start = lengths[i], own[i], int(starts[i])
        mask = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        if tree is not None:
            mask[:, length - n :] = tree[i]
        close(output[start : start + n], reference(q[start : start + n], k, v, mask, 0.25), dtype)


def test_a_longer_cache_of_another_request_does_not_stay_in_the_mask():
    """Masks are remembered by lengths alone: the same lengths with other contents must give other results."""
    results = []
    for seed in (0, 1):
        cache = Cache([6, 9], [0, 1], torch.float32, seed)
        q, output = torch.ones(2, HEADS, SIZE), torch.empty(2, HEADS, SIZE)
        torch.ops.sgl_kernel.decode_attention_cpu(
            q, cache.k, cache.v, 1.0, 1.0, output, None, None, None, torch.empty(0), cache.table, torch.tensor([0, 1]),
            torch.tensor([6, 9]), 0.3, 0.0, False, 0, None, None,
        )  # fmt: skip
        for i in range(2):
            mask = torch.ones(1, [6, 9][i], dtype=torch.bool)
            close(output[i : i + 1], reference(q[:1], cache.keys[i], cache.values[i], mask, 0.3), torch.float32)
        results.append(output)
    assert not torch.allclose(*results)


@pytest.mark.parametrize("change", [{"is_cross_attn": True}, {"sliding_window_size": 4}, {"sinks": torch.zeros(1)}])
def test_what_is_not_there_says_so(change):
    with pytest.raises(NotImplementedError):
        attention._only_plain(**({"is_cross_attn": False, "sliding_window_size": 0, "sinks": None} | change))
