"""Which cache slot belongs to which token. `req_to_token[r, p]` is the slot of position p of request row r.

All functions write into tensors of the caller, as SGLang's own operators do; slots are int64 or int32.
"""

import ctypes

import torch


def _spans(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, column) of every cell of the spans [start, end) of `rows`, one span after another; int64 [total] each."""
    lengths = (end - start).clamp(min=0).long()
    before = lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.sum())) + (start.long() - before).repeat_interleave(lengths)
    return rows.long().repeat_interleave(lengths), columns


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len) -> None:
    """Enter slots into the table: request i gets the next end[i] - start[i] of out_cache_loc at positions start[i]...

    req_pool_indices, start, end [B]; req_to_token [rows, pool_len] is written.
    """
    cells = _spans(req_pool_indices, start, end)
    req_to_token[cells] = out_cache_loc[: len(cells[0])].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len) -> None:
    """Read slots from the table, request after request: positions start[i] ... end[i] - 1 into out_cache_loc."""
    cells = _spans(req_pool_indices, start, end)
    out_cache_loc[: len(cells[0])] = req_to_token[cells].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
) -> None:
    """Read the topk * num_steps slots behind each sequence into out_cache_loc [B * topk * num_steps]."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long()[:, None], columns].view(-1))


def build_draft_decode_metadata_cpu(
    req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len
) -> torch.Tensor:
    """A table of its own for each draft candidate: [B * topk, pool_len].

    Row b * topk + k holds the sequence's slots, then the num_steps slots of candidate k, which lie k * num_steps behind
    the end of the sequence. What is behind those is never read.
    """
    rows, lengths = req_pool_indices.long(), seq_lens.long()
    out = req_to_token[rows].repeat_interleave(topk, 0)
    step = torch.arange(num_steps)
    source = lengths[:, None, None] + (torch.arange(topk) * num_steps)[:, None] + step  # [B, topk, num_steps]
    target = (lengths[:, None] + step).repeat_interleave(topk, 0)
    out[torch.arange(len(out))[:, None], target] = req_to_token[rows[:, None, None], source].view(-1, num_steps)
    return out


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    """The last accepted token of each request: accept_tokens [B * stride], accept_lens [B] counts the bonus token."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """Slots of the accepted tokens, closed up: accept_index holds positions in out_cache_loc, -1 for rejected ones."""
    kept = accept_index.reshape(-1)
    kept = kept[kept >= 0].long()
    accept_out_cache_loc[: len(kept)] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc) -> None:
    """Copy slots src_loc to tgt_loc in every layer's cache; the two may overlap.

    data_ptrs: addresses of the buffers, strides: bytes of one slot in each.
    """
    if not len(src_loc):
        return
    src, tgt = src_loc.long(), tgt_loc.long()
    slots = int(torch.maximum(src.max(), tgt.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (slots * stride)).from_address(address)
        cache = torch.frombuffer(memory, dtype=torch.uint8).view(slots, stride)
        cache[tgt] = cache[src]  # the right side is a copy, so overlapping slots are safe
