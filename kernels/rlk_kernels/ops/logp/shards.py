"""The steps of `logp` for rows whose columns are in several shards: the nodes of whole subtrees of
`numerics/lse_tree`, merges of nodes, and the log-prob from the root.

A node has two numbers a row: (m, s) in float64 on the torch backend, (n, s) in fp32 on Triton.
"""

import torch
from torch import Tensor

from rlk_kernels.backend import record
from rlk_kernels.device import lazy_module
from rlk_kernels.numerics.lse_tree.portable import merge_portable
from rlk_kernels.ops.logp import portable

_on_triton = lazy_module("rlk_kernels.ops.logp.kernels")


def node_of(logits: Tensor, backend: str) -> Tensor:
    """The node [T, 2] of logits[T, V], all columns of one subtree."""
    record("logp", backend)
    if backend == "torch":
        return portable.node(logits)
    nodes = _on_triton().nodes(logits)
    while nodes.shape[1] > 1:
        nodes = merge_pair(nodes[:, 0::2], nodes[:, 1::2])
    return nodes[:, 0]


def merge_pair(left: Tensor, right: Tensor) -> Tensor:
    """The node [..., 2] above two neighbours, or [..., 3] of (m, s, u), for the entropy."""
    if left.dtype == torch.float64:
        pair = torch.stack([left, right], -1)
        return torch.stack(merge_portable(pair.unbind(-2)), -1)
    n = torch.maximum(left[..., 0], right[..., 0])
    s = left[..., 1] * _pow2(left[..., 0] - n) + right[..., 1] * _pow2(right[..., 0] - n)
    return torch.stack([n, s], -1)


def _pow2(k: Tensor) -> Tensor:
    """2**k for integers k <= 0 in fp32; 0 for k <= -127."""
    return ((k.clamp(min=-127.0) + 127.0).to(torch.int32) << 23).view(torch.float32)


def logp_of_nodes(z: Tensor, target: Tensor, root: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """(logp[T], the root for `logp_grad` [T, 2]) from the targets' logits z[T] and root[T, 2]."""
    of = portable if backend == "torch" else _on_triton()
    return of.logp_of_root(z, target, root)
