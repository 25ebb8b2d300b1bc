"""The entropy of each row of logits whose columns are divided among ranks, by the tree of
`numerics/lse_tree` in float64 on both backends. The bits are the same for any number of ranks, and
on the torch backend those of `linear_logp`.

    entropy = lse - sum_v p[v] z[v]           dlogits[v] = -g p[v] (log p[v] + entropy)

T = rows   V = vocabulary   R = ranks
"""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.ops.logp.portable import node
from rlk_kernels.parallel.copies import Group
from rlk_kernels.parallel.logp import root_of


def entropy_and_lse(logits: Tensor, group: Group) -> Tensor:
    """(entropy, lse) as float64 [T, 2], from this rank's columns logits[T, V / R]; padding is
    -inf."""
    m, s, u = root_of(logits, group, lambda columns: node(columns, entropy=True)).unbind(-1)
    log_s = elementary.log(s)
    return torch.stack([log_s - u / s, m + log_s], -1)


def entropy_grad(logits: Tensor, rows: Tensor, g: Tensor) -> Tensor:
    """fp32 dlogits[T, V / R] for the gradients g[T]. rows: the result of `entropy_and_lse`."""
    entropy, lse = (x[:, None] for x in rows.unbind(-1))
    log_p = logits.double() - lse
    d = -g.double()[:, None] * elementary.exp(log_p) * (log_p + entropy)
    return torch.where((g == 0)[:, None] | log_p.isneginf(), 0.0, d).float()
