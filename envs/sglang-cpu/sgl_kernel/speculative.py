"""The n-gram drafter's tree, which comes as a mask instead of a list of parents."""

import torch

from sgl_kernel.tree import links


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrive_index, retrive_next_token, retrive_next_sibling, batch, n
) -> None:
    """Positions and links from tree_mask bool [B * n * n], true where column is an ancestor of row; all are written.

    verified_seq_len [B]; positions [B * n]: number of ancestors + L_b; retrive_* [B, n].
    """
    ancestors = torch.tril(tree_mask.view(batch, n, n).bool(), diagonal=-1)
    positions.view(batch, n).copy_(ancestors.sum(-1) + verified_seq_len.view(batch, 1))
    retrive_index.view(batch, n).copy_(torch.arange(batch * n).view(batch, n))
    child, sibling = links(torch.where(ancestors, torch.arange(n), -1).amax(-1))  # the last ancestor is the parent
    retrive_next_token.view(batch, n).copy_(child)
    retrive_next_sibling.view(batch, n).copy_(sibling)
