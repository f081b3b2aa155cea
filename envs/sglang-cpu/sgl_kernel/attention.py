"""Attention over a paged cache, registered as torch.ops.sgl_kernel.decode_attention_cpu and extend_attention_cpu.

Caches are [slots, kv heads, head size]; `req_to_token[r, p]` is the slot of position p of request row r. The pages of all
requests are gathered into one padded batch, so that there is one attention call for the batch. Query heads that share a
kv head are laid behind one another as queries of that head, so that keys and values are never repeated.
"""

from functools import lru_cache

import torch
from torch.nn.functional import scaled_dot_product_attention

_library = torch.library.Library("sgl_kernel", "DEF")
_library.define(
    "decode_attention_cpu(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, float k_scale, float v_scale,"
    " Tensor(c!) output, Tensor? key, Tensor? value, Tensor? loc, Tensor(d!) attn_logits, Tensor req_to_token,"
    " Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, bool is_cross_attn,"
    " int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
)
_library.define(
    "extend_attention_cpu(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, Tensor k_buffer,"
    " Tensor v_buffer, float k_scale, float v_scale, Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens,"
    " Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, float sm_scale, float logit_cap,"
    " bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask,"
    " bool is_causal=True) -> ()"
)
_library.define("init_cpu_threads_env(str cpu_ids) -> str")
_library.define("initialize(int size, int rank) -> ()")


@lru_cache(maxsize=64)
def _lengths_mask(seq_lens: tuple[int, ...]) -> torch.Tensor:
    """bool [B, 1, 1, S]: which of the S = max(seq_lens) keys belong to the request."""
    return (torch.arange(max(seq_lens)) < torch.tensor(seq_lens)[:, None])[:, None, None]


@lru_cache(maxsize=64)
def _extend_mask(seq_lens: tuple[int, ...], lengths: tuple[int, ...], causal: bool) -> torch.Tensor:
    """bool [B, N, S]: what the last `lengths` tokens of each request may see; padded queries see something too."""
    ends, own = torch.tensor(seq_lens)[:, None, None], torch.tensor(lengths)[:, None, None]
    key = torch.arange(max(seq_lens))
    if not causal:
        return (key < ends).expand(-1, max(lengths), -1)
    return (key < ends) & (key <= ends - own + torch.arange(max(lengths))[:, None])


@lru_cache(maxsize=64)
def _layout(lengths: tuple[int, ...], starts: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each extended token: its request, its place within it, its place in the flat batch; int64 [T] each."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    places = torch.cat([torch.arange(n) for n in lengths])
    return rows, places, places + torch.tensor(starts)[rows]


def _tree_mask(tree: torch.Tensor, seq_lens: tuple[int, ...], n: int) -> torch.Tensor:
    """bool [B, n, S] from the draft tokens' own mask, bool [B * n * n]: all of the prefix, then the mask."""
    tree = tree.view(-1)[: len(seq_lens) * n * n].view(len(seq_lens), n, n)
    own = torch.arange(max(seq_lens)) - torch.tensor(seq_lens)[:, None] + n  # column in the tree, [B, S]
    inside = tree.gather(2, own.clamp(0, n - 1)[:, None, :].expand(-1, n, -1))
    own = own[:, None, :]
    return (own < 0) | (inside & (own < n))


def _pages(k_cache, v_cache, req_to_token, rows, seq_lens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the requests' positions, [B, S, Hkv, D] each; zero behind a request's end.

    What the table holds there is stale, and its slots may hold NaN, which a mask alone does not keep out of the sum.
    """
    slots = req_to_token[rows.long(), : max(seq_lens)]
    k, v = k_cache[slots], v_cache[slots]
    if min(seq_lens) < max(seq_lens):
        behind = ~_lengths_mask(seq_lens).view(*slots.shape, 1, 1)
        k, v = k.masked_fill(behind, 0), v.masked_fill(behind, 0)
    return k, v


def _attend(q, k, v, mask, scale: float, cap: float) -> torch.Tensor:
    """q [B, N, H, D], k and v [B, S, Hkv, D or Dv], mask bool broadcastable to [B, 1, N, S] or None -> [B, N, H, Dv]."""
    batch, n, heads, size = q.shape
    groups = heads // k.shape[2]
    # [B, N, Hkv * G, D] -> [B, Hkv, G * N, D]
    q = q.reshape(batch, n, -1, groups, size).permute(0, 2, 3, 1, 4).reshape(batch, -1, groups * n, size)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if mask is not None and n > 1:
        mask = mask.repeat(1, 1, groups, 1)
    if cap > 0:
        scores = cap * torch.tanh((q.float() @ k.float().transpose(-1, -2)) * scale / cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        out = (scores.softmax(-1) @ v.float()).to(q.dtype)
    else:
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.view(batch, -1, groups, n, v.shape[-1]).permute(0, 3, 1, 2, 4).reshape(batch, n, heads, -1)


def _only_plain(is_cross_attn: bool, sliding_window_size: int, sinks) -> None:
    if is_cross_attn or sliding_window_size > 0 or sinks is not None:
        raise NotImplementedError("cross attention, sliding windows and attention sinks are not in this stand-in")


def decode_attention(
    query,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window_size,
    encoder_lens,
    sinks,
) -> None:
    """One new token of each request: its key and value go to slot `loc`, its query sees seq_lens[b] positions.

    query [B, H, D]; output [B, H, Dv] is written; key, value: as many as queries, or None if they are in the cache.
    """
    _only_plain(is_cross_attn, sliding_window_size, sinks)
    if key is not None:
        k_cache[loc] = key.view(-1, *k_cache.shape[1:]).to(k_cache.dtype)
        v_cache[loc] = value.view(-1, *v_cache.shape[1:]).to(v_cache.dtype)
    lengths = tuple(seq_lens.tolist())
    k, v = _pages(k_cache, v_cache, req_to_token, req_pool_indices, lengths)
    mask = None if min(lengths) == max(lengths) else _lengths_mask(lengths)
    output.copy_(_attend(query[:, None], k, v, mask, sm_scale, logit_cap)[:, 0])


def extend_attention(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_len_extend,
    sm_scale,
    logit_cap,
    is_cross_attn,
    sliding_window_size,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal=True,
) -> None:
    """The last extend_seq_lens[b] tokens of each request, of seq_lens[b] in all: a prompt, or drafts to verify.

    q_extend [T, H, D], T = sum of extend_seq_lens, request b from extend_start_loc[b]; o_extend [T, H, Dv] is written.
    k_extend, v_extend [T, Hkv, D]: keys and values of these tokens, None if they are in the cache. tree_mask bool
    [B * n * n]: which of its own n tokens a token sees; then all requests have n of them.
    """
    _only_plain(is_cross_attn, sliding_window_size, sinks)
    ends, own, starts = tuple(seq_lens.tolist()), tuple(extend_seq_lens.tolist()), tuple(extend_start_loc.tolist())
    if 0 in own:  # an idle request of a padded batch
        kept = [i for i, n in enumerate(own) if n]
        if not kept:
            return
        ends, own, starts = (tuple(values[i] for i in kept) for values in (ends, own, starts))
        req_pool_indices = req_pool_indices[kept]
    most, uniform = max(own), min(own) == max(own)
    if tree_mask is not None and not uniform:
        raise NotImplementedError("a tree mask with unequal numbers of draft tokens")
    rows, places, tokens = _layout(own, starts)

    k, v = _pages(k_buffer, v_buffer, req_to_token, req_pool_indices, ends)
    k, v = k.to(q_extend.dtype), v.to(q_extend.dtype)
    if k_extend is not None:
        # They need not be in the cache (save_kv_cache=False).
        columns = places + (torch.tensor(ends) - torch.tensor(own))[rows]
        k[rows, columns] = k_extend.view(-1, *k_buffer.shape[1:])[tokens].to(k.dtype)
        v[rows, columns] = v_extend.view(-1, *v_buffer.shape[1:])[tokens].to(v.dtype)
    mask = _extend_mask(ends, own, is_causal) if tree_mask is None else _tree_mask(tree_mask, ends, most)
    q = q_extend.new_zeros((len(own), most, *q_extend.shape[1:]))
    q[rows, places] = q_extend[tokens]
    o_extend[tokens] = _attend(q, k, v, mask[:, None], sm_scale, logit_cap)[rows, places]


def init_cpu_threads_env(cpu_ids: str) -> str:
    """The real operator binds threads to cores; here OMP_NUM_THREADS decides, and this says so in the log."""
    return f"stand-in operators: no binding to cores {cpu_ids}; {torch.get_num_threads()} torch threads"


_library.impl("decode_attention_cpu", decode_attention, "CPU")
_library.impl("extend_attention_cpu", extend_attention, "CPU")
_library.impl("init_cpu_threads_env", init_cpu_threads_env, "CompositeExplicitAutograd")
_library.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")  # shared memory of tensor parallelism
