"""logp with its logits divided among ranks: the log-prob of one token for each row, from shards of
the vocabulary, with the bits of one rank.

The sum over the vocabulary follows the tree of `numerics/lse_tree`. A shard of a multiple of LEAF
columns consists of a few whole subtrees. A rank computes their nodes, which are a few numbers for
each row, and sends them; every rank merges all nodes as one rank would. The logit of the target is
copied from the rank that has it. Gradient: that of `logp`, for this rank's columns.

T = rows   V = vocabulary   R = ranks   J = nodes of a rank, padded to the largest number
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose
from rlk_kernels.custom_op import on_device_of
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.numerics.lse_tree.tree import LEAF
from rlk_kernels.ops.logp.operator import logp, logp_grad
from rlk_kernels.ops.logp.shards import logp_of_nodes, merge_pair, node_of
from rlk_kernels.parallel.copies import Group, gather, rank_of, size_of
from rlk_kernels.parallel.embedding import local_ids


@dataclass(frozen=True)
class Subtree:
    """A node of the tree with its subtree."""

    level: int
    index: int
    """The node's index in its level."""

    @property
    def columns(self) -> tuple[int, int]:
        """The node's first column, and the first one after it."""
        size = LEAF << self.level
        return self.index * size, (self.index + 1) * size

    @property
    def parent(self) -> "Subtree":
        return Subtree(self.level + 1, self.index // 2)


def subtrees(first: int, last: int) -> Iterator[Subtree]:
    """Yields the largest whole subtrees of the columns `first` to `last`, from left to right. Both
    are multiples of LEAF, or `last` is the end of the vocabulary."""
    at, end = first // LEAF, -(-last // LEAF)
    while at < end:
        level = (at & -at).bit_length() - 1 if at else (end - at).bit_length() - 1
        while at + (1 << level) > end:
            level -= 1
        yield Subtree(level, at >> level)
        at += 1 << level


def merge(trees: list[Subtree], nodes: list[Tensor]) -> Tensor:
    """The root of adjacent subtrees from column 0 on, whose nodes are merged in the order of the
    tree over all columns."""
    done: list[tuple[Subtree, Tensor]] = []
    for tree, node in zip(trees, nodes, strict=True):
        while done and done[-1][0].parent == tree.parent and done[-1][0].level == tree.level:
            node, tree = merge_pair(done.pop()[1], node), tree.parent
        done.append((tree, node))
    # At the right end neighbours are missing, which are neutral.
    root = done.pop()[1]
    while done:
        root = merge_pair(done.pop()[1], root)
    return root


def logp_and_root(
    logits: Tensor, target: Tensor, group: Group, backend: str
) -> tuple[Tensor, Tensor]:
    """(logp[T], the root[T, 2] for `logp_grad`), from this rank's columns logits[T, V / R]."""
    size = logits.shape[1]
    local, _ = local_ids(target, rank_of(group), size)
    picked = gather(logits.gather(1, local.long()[:, None]), group)  # [R, T, 1]
    owner = (target.clamp(min=0) // size).long()[None, :, None]
    root = root_of(logits, group, lambda columns: node_of(columns, backend))
    return logp_of_nodes(picked.gather(0, owner).view(-1), target, root, backend)


def root_of(logits: Tensor, group: Group, node: Callable[[Tensor], Tensor]) -> Tensor:
    """The root over the columns of all ranks. node: computes the node of a subtree's columns."""
    size, rank = logits.shape[1], rank_of(group)
    trees = [list(subtrees(r * size, (r + 1) * size)) for r in range(size_of(group))]
    columns = [(a - rank * size, b - rank * size) for a, b in (t.columns for t in trees[rank])]
    own = [node(logits[:, a:b]) for a, b in columns]
    padding = [torch.zeros_like(own[0])] * (max(map(len, trees)) - len(own))
    everyone = gather(torch.stack(own + padding), group)  # [R, J, T, 2 or 3]
    every = [tree for some in trees for tree in some]
    return merge(every, [everyone[r, j] for r, some in enumerate(trees) for j in range(len(some))])


def local_target(target: Tensor, rank: int, size: int) -> Tensor:
    """The target's column in a rank's shard, for `logp_grad`: `size` if another rank has the
    target, negative if it is ignored."""
    local, here = local_ids(target, rank, size)
    return torch.where(target < 0, target, torch.where(here, local, size))


class _Logp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group, backend: str) -> Tensor:
        logp, root = logp_and_root(logits, target, group, backend)
        own = local_target(target, rank_of(group), logits.shape[1])
        ctx.save_for_backward(logits, own, root)
        ctx.backend = backend
        return logp

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        logits, target, root = ctx.saved_tensors
        with on_device_of(logits):
            return logp_grad(logits, target, root, g, ctx.backend), None, None, None


def check_shard(name: str, columns: int, group: Group) -> None:
    """Raises UnsupportedShape if a rank's shard cuts a leaf of the tree."""
    if columns % LEAF and size_of(group) > 1:
        raise UnsupportedShape(
            f"{name}: a vocabulary shard of {columns} columns; a multiple of {LEAF} is needed"
        )


def logp_parallel(
    logits: Tensor, target: Tensor, group: Group, *, backend: str | None = None
) -> Tensor:
    """log softmax(logits)[t, target[t]] as [T], for this rank's columns logits[T, V / R]; padding
    of the vocabulary is -inf. target[T] is an id of the whole vocabulary; a negative one is
    ignored. Call this on all ranks of the group with the same targets; None is one rank.

    Raises UnsupportedShape if a shard is not a multiple of LEAF columns, because it would cut a
    leaf of the tree."""
    if size_of(group) == 1:
        return logp(logits, target, backend=backend)
    check_shard("logp", logits.shape[1], group)
    return _Logp.apply(logits, target, group, choose("logp", backend, logits, target))
