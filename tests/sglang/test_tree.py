"""Token trees and greedy verification against small independent ones made of Python dicts."""

import random

import pytest
import torch
from sgl_kernel import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from sgl_kernel.speculative import reconstruct_indices_from_tree_mask
from sglang.srt.speculative.eagle_utils import organize_draft_results


def random_draft(topk, steps, n, seed):
    """What SGLang's drafter hands over, made with its own organize_draft_results, and the same tree as parents.

    Every step keeps the topk best of topk * topk candidates. Returns parent list, selected candidates [1, n - 1] and
    parent node of each node by candidate number.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(1, topk, generator=generator)
    score_list, token_list, parents_list = [scores[:, None]], [torch.arange(topk)[None]], [torch.arange(-1, topk)[None]]
    candidate_parent = dict.fromkeys(range(topk), None)  # candidate -> candidate it hangs on, None: the root
    expanded = list(range(topk))
    for step in range(1, steps):
        child = scores.view(topk, 1) * torch.rand(
            topk, topk, generator=generator
        )  # a child is less likely than its parent
        first = topk + (step - 1) * topk * topk
        for i in range(topk):
            for j in range(topk):
                candidate_parent[first + i * topk + j] = expanded[i]
        best = torch.topk(child.flatten(), topk)
        scores, expanded = best.values[None], [first + int(i) for i in best.indices]
        score_list.append(child[None])
        token_list.append(torch.arange(first, first + topk * topk)[None])
        parents_list.append(torch.tensor([expanded]))
    parent_list, selected, _ = organize_draft_results(score_list, token_list, parents_list, n)
    node_of = {int(c): i + 1 for i, c in enumerate(selected[0])}
    parents = [-1] + [0 if candidate_parent[c] is None else node_of[candidate_parent[c]] for c in node_of]
    return parent_list, selected, parents


def reference_tree(parents, length):
    """(mask rows, positions, first children, next siblings) of one request, by following parents."""
    n = len(parents)
    mask, positions = [[False] * n for _ in range(n)], []
    for node in range(n):
        at, depth = node, 0
        while at > 0:
            mask[node][at] = True
            at, depth = parents[at], depth + 1
        mask[node][0] = True
        positions.append(length + depth)
    children = [[i for i in range(n) if parents[i] == node] for node in range(n)]
    first = [own[0] if own else -1 for own in children]
    sibling = [-1] * n
    for own in children:
        for a, b in zip(own, own[1:], strict=False):
            sibling[a] = b
    return mask, positions, first, sibling


SHAPES = [(1, 1, 2), (1, 3, 4), (1, 16, 17), (4, 1, 4), (4, 3, 8), (3, 4, 16), (8, 5, 60)]


@pytest.mark.parametrize(("topk", "steps", "n"), SHAPES)
def test_tree_of_eagle(topk, steps, n):
    batch = [random_draft(topk, steps, n, seed) for seed in range(4)]
    lengths = [5, 91, 1, 30]
    parent_list, selected = (torch.cat([draft[i] for draft in batch]) for i in (0, 1))
    mask = torch.ones(4 * n * n, dtype=torch.bool)
    positions = torch.empty(4 * n, dtype=torch.long)
    index, child, sibling = torch.full((3, 4, n), -1)
    build_tree_kernel_efficient_cpu(
        parent_list, selected, torch.tensor(lengths), mask, positions, index, child, sibling, topk, steps, n, 1
    )
    for i, (draft, length) in enumerate(zip(batch, lengths, strict=True)):
        wanted = reference_tree(draft[2], length)
        assert mask.view(4, n, n)[i].tolist() == wanted[0]
        assert positions.view(4, n)[i].tolist() == wanted[1]
        assert child[i].tolist() == wanted[2]
        assert sibling[i].tolist() == wanted[3]
    assert index.flatten().tolist() == list(range(4 * n))
    full = torch.ones(sum(n * (length + n) for length in lengths), dtype=torch.bool)
    build_tree_kernel_efficient_cpu(
        parent_list, selected, torch.tensor(lengths), full, positions, index, child, sibling, topk, steps, n, 0
    )
    start = 0
    for i, length in enumerate(lengths):
        part = full[start : start + n * (length + n)].view(n, length + n)
        assert part[:, :length].all() and torch.equal(part[:, length:], mask.view(4, n, n)[i])
        start += part.numel()


@pytest.mark.parametrize("seed", range(5))
def test_tree_of_ngram_from_its_mask(seed):
    rng, n, lengths = random.Random(seed), 9, [4, 17, 1]
    trees = [[-1] + [rng.randrange(i) for i in range(1, n)] for _ in lengths]
    wanted = [reference_tree(parents, length) for parents, length in zip(trees, lengths, strict=True)]
    mask = torch.tensor([tree[0] for tree in wanted]).flatten()
    positions = torch.empty(3 * n, dtype=torch.long)
    index, child, sibling = torch.full((3, 3, n), -1)
    reconstruct_indices_from_tree_mask(mask, torch.tensor(lengths), positions, index, child, sibling, 3, n)
    for i in range(3):
        assert positions.view(3, n)[i].tolist() == wanted[i][1]
        assert child[i].tolist() == wanted[i][2]
        assert sibling[i].tolist() == wanted[i][3]


def reference_walk(parents, tokens, choices, most):
    """Accepted nodes of one request: from the root to the child that holds the target's choice, while there is one."""
    path = [0]
    while len(path) < most:
        fitting = [i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == choices[path[-1]]]
        if not fitting:
            break
        path.append(fitting[0])
    return path


@pytest.mark.parametrize("seed", range(20))
def test_greedy_walk(seed):
    rng, n, batch, most = random.Random(seed), 10, 3, 5
    trees = [[-1] + [rng.randrange(max(0, i - 3), i) for i in range(1, n)] for _ in range(batch)]
    tokens = torch.tensor([[rng.randrange(2) for _ in range(n)] for _ in range(batch)])
    choices = torch.tensor([[rng.randrange(2) for _ in range(n)] for _ in range(batch)])
    wanted = [reference_tree(parents, 0) for parents in trees]
    predicts = torch.full((batch * n,), -7, dtype=torch.int32)
    accepted = torch.full((batch, most), -1, dtype=torch.int32)
    number = torch.zeros(batch, dtype=torch.int32)
    verify_tree_greedy_cpu(
        predicts, accepted, number, tokens, torch.arange(batch * n).view(batch, n),
        torch.tensor([tree[2] for tree in wanted]), torch.tensor([tree[3] for tree in wanted]), choices,
    )  # fmt: skip
    for i, parents in enumerate(trees):
        path = reference_walk(parents, tokens[i].tolist(), choices[i].tolist(), most)
        assert accepted[i].tolist() == [i * n + node for node in path] + [-1] * (most - len(path))
        assert number[i] == len(path) - 1
        written = {i * n + node: int(choices[i, node]) for node in path}
        for at in range(i * n, (i + 1) * n):
            assert predicts[at] == written.get(at, -7)
