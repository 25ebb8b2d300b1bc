"""`route` and `route_corrected` in PyTorch."""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.lse_tree.portable import block_portable

LEAST_SUM = 1e-20
"""The number that is added to the sum of the chosen scores, as in engines."""


def _probabilities(logits: Tensor) -> Tensor:
    """The float64 softmax over all experts, by the tree."""
    z = logits.double()
    top, total = block_portable(z)
    return elementary.exp(z - top[:, None]) / total[:, None]


def in_order(x: Tensor) -> Tensor:
    """[T, 1]: the sum of x[T, k], one by one."""
    total = torch.zeros_like(x[:, :1])
    for j in range(x.shape[1]):
        total = total + x[:, j : j + 1]
    return total


def _largest(x: Tensor, k: int) -> Tensor:
    """int64 [T, k]: the columns of the k largest of each row, largest first, ties in order."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def forward(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k])."""
    ids = _largest(logits, k).sort(-1).values
    if not normalize:
        weights = _probabilities(logits).to(logits.dtype).gather(-1, ids)
    else:
        chosen = logits.gather(-1, ids)
        terms = elementary.exp(chosen - chosen.amax(-1, keepdim=True)).to(logits.dtype)
        weights = terms / in_order(terms)
    return weights, ids.int()


def backward(logits: Tensor, weights: Tensor, ids: Tensor, grad: Tensor, normalize: bool) -> Tensor:
    """dlogits[T, E]."""
    ids, g, w = ids.long(), grad.double(), weights.double()
    mean = in_order(w * g)
    out = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    if normalize:
        return out.scatter_(-1, ids, w * (g - mean)).to(logits.dtype)
    out.scatter_(-1, ids, g)
    return (_probabilities(logits) * (out - mean)).to(logits.dtype)


def _inside(c: Tensor, groups: int, top_groups: int) -> Tensor:
    """Whether each expert is in a chosen group, bool [T, E]."""
    by_group = c.unflatten(-1, (groups, -1))
    best = by_group.sort(dim=-1, descending=True, stable=True).values[..., :2]
    chosen = _largest(best[..., 0] + best[..., 1], top_groups)
    taken = torch.zeros(len(c), groups, dtype=torch.bool, device=c.device)
    taken.scatter_(1, chosen, True)
    return taken.repeat_interleave(by_group.shape[-1], dim=1)


def forward_corrected(
    logits: Tensor, correction: Tensor, k: int, normalize: bool, groups: int, top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights[T, k], ids int32 [T, k])."""
    s = elementary.sigmoid(logits.double()).to(logits.dtype)
    c = s + correction
    order = _largest(c, c.shape[1])
    if top_groups < groups:
        inside = _inside(c, groups, top_groups).gather(1, order)
        order = order.gather(1, _largest(inside.int(), c.shape[1]))
    ids = order[:, :k].sort(-1).values
    weights = s.gather(1, ids)
    if normalize:
        weights = weights / (in_order(weights) + LEAST_SUM)
    return weights * scale, ids.int()


def backward_corrected(
    logits: Tensor, ids: Tensor, grad: Tensor, normalize: bool, scale: float
) -> Tensor:
    """dlogits[T, E]."""
    ids, g = ids.long(), grad.double()
    s = elementary.sigmoid(logits.double().gather(1, ids))
    if normalize:
        total = in_order(s) + LEAST_SUM
        g = (g - in_order(g * s) / total) / total
    out = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    return out.scatter_(-1, ids, scale * s * (1.0 - s) * g).to(logits.dtype)
