"""The tree of draft tokens: building it, and walking it greedily.

A request's nodes are numbered 0 ... n - 1, the root (the last verified token) first, every parent before its children.
Children of a node form a list: next_token[node] is the first child, next_sibling[node] the one behind it, -1 the end.
"""

import torch

QLEN_ONLY, FULL_MASK = 1, 0


def links(parent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(next_token, next_sibling), int64 [B, n], from each node's parent, int64 [B, n], -1 without one."""
    n = parent.shape[1]
    node = torch.arange(n)
    # Numbers as values of a table, n where the relation does not hold: the smallest one is the first child or sibling.
    child = torch.where(parent[:, None, :] == node[:, None], node, n).amin(-1)
    later = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None]) & (parent[:, :, None] >= 0)
    sibling = torch.where(later, node, n).amin(-1)
    return child.masked_fill(child == n, -1), sibling.masked_fill(sibling == n, -1)


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
) -> None:
    """Tree of the selected candidates: mask, positions and links are written.

    parent_list int64 [B, 1 + (K - 1) * topk]: candidate number of the g-th expanded node, whose children are candidates
    g * topk ... g * topk + topk - 1. selected_index int64 [B, n - 1]: the candidates that became nodes 1 ..., ascending.
    verified_seq_len [B]. tree_mask bool: [B, n, n] flat (QLEN_ONLY), or [n, L_b + n] for each request one after another
    (FULL_MASK), true where a node (row) may see a column. positions [B * n]: depth + L_b. retrive_* [B, n].
    """
    n, batch = draft_token_num, len(selected_index)
    group = selected_index // topk
    parent = torch.full((batch, n), -1)
    if n > 1:
        wanted = parent_list.gather(1, group.clamp(max=parent_list.shape[1] - 1)) if parent_list.numel() else group
        at = torch.searchsorted(selected_index.contiguous(), wanted.contiguous()).clamp(max=n - 2)
        there = selected_index.gather(1, at) == wanted
        # A parent that was not selected leaves its child outside of every list: it can never be accepted.
        parent[:, 1:] = torch.where(group == 0, 0, torch.where(there, at + 1, -1))
    seen = torch.eye(n, dtype=torch.bool).repeat(batch, 1, 1)
    seen[:, :, 0] = True
    jump = parent.clamp(min=0)
    for _ in range(max(depth - 1, 0).bit_length() + 1):  # each round doubles how far up the ancestors are known
        seen = seen | seen.gather(1, jump[:, :, None].expand(-1, -1, n))
        jump = jump.gather(1, jump)
    positions.view(batch, n).copy_(verified_seq_len.view(batch, 1) + seen.sum(-1) - 1)
    retrive_index.view(batch, n).copy_(torch.arange(batch * n).view(batch, n))
    child, sibling = links(parent)
    retrive_next_token.view(batch, n).copy_(child)
    retrive_next_sibling.view(batch, n).copy_(sibling)
    mode = int(tree_mask_mode)
    if mode == QLEN_ONLY:
        tree_mask.view(-1)[: batch * n * n] = seen.view(-1)
    elif mode == FULL_MASK:
        start = 0
        for i, length in enumerate(verified_seq_len.tolist()):  # ragged; GPU backends' layout, not used on the CPU
            width = length + n
            tree_mask.view(-1)[start : start + n * width].view(n, width)[:, length:] = seen[i]
            start += n * width
    else:
        raise NotImplementedError("bit-packed tree masks")


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Walk each request's tree along the target's own choices, as far as drafts agree with them.

    candidates int64 [B, n]: drafted tokens. target_predict [B, n]: the target's choice behind each node. Written:
    accept_index [B, K + 1], flat numbers of the accepted nodes, root first; accept_token_num [B], without the root;
    predicts [B * n], the target's choice at each accepted node.
    """
    # Lists: the walk branches at every node, and a request has a handful of them.
    tokens, flat = candidates.tolist(), retrive_index.tolist()
    first_child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
    chosen = target_predict.reshape(-1).tolist()
    most = accept_index.shape[1]
    for i, (own, number) in enumerate(zip(tokens, flat, strict=True)):
        node, path = 0, [number[0]]
        while len(path) < most:
            wanted, node = chosen[path[-1]], first_child[i][node]
            while node != -1 and own[node] != wanted:
                node = sibling[i][node]
            if node == -1:
                break
            path.append(number[node])
        accepted = torch.tensor(path)
        accept_index[i, : len(path)] = accepted.to(accept_index.dtype)
        accept_token_num[i] = len(path) - 1
        predicts[accepted] = target_predict.reshape(-1)[accepted].to(predicts.dtype)
