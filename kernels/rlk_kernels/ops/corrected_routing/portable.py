"""`route_corrected` in PyTorch."""

import torch
from torch import Tensor

from rlk_kernels.numerics.elementary import sigmoid
from rlk_kernels.ops.routing.portable import in_order

LEAST_SUM = 1e-20
"""What is added to the sum of the chosen scores, as engines do."""


def _first(x: Tensor, k: int) -> Tensor:
    """int64 [T, k]: the places of the k largest of each row, the largest first, ties by place."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _inside(c: Tensor, groups: int, top_groups: int) -> Tensor:
    """Whether each expert is in a chosen group, bool [T, E]."""
    by_group = c.unflatten(-1, (groups, -1))
    best = by_group.sort(dim=-1, descending=True, stable=True).values[..., :2]
    chosen = _first(best[..., 0] + best[..., 1], top_groups)
    taken = torch.zeros(len(c), groups, dtype=torch.bool, device=c.device)
    taken.scatter_(1, chosen, True)
    return taken.repeat_interleave(by_group.shape[-1], dim=1)


def forward(
    logits: Tensor, correction: Tensor, k: int, normalize: bool, groups: int, top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights[T, k], ids int32 [T, k])."""
    s = sigmoid(logits.double()).to(logits.dtype)
    c = s + correction
    order = _first(c, c.shape[1])
    if top_groups < groups:
        inside = _inside(c, groups, top_groups).gather(1, order)
        order = order.gather(1, _first(inside.int(), c.shape[1]))
    ids = order[:, :k].sort(-1).values
    weights = s.gather(1, ids)
    if normalize:
        weights = weights / (in_order(weights) + LEAST_SUM)
    return weights * scale, ids.int()


def backward(logits: Tensor, ids: Tensor, grad: Tensor, normalize: bool, scale: float) -> Tensor:
    """dlogits[T, E]."""
    ids, g = ids.long(), grad.double()
    s = sigmoid(logits.double().gather(1, ids))
    if normalize:
        total = in_order(s) + LEAST_SUM
        g = (g - in_order(g * s) / total) / total
    out = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    return out.scatter_(-1, ids, scale * s * (1.0 - s) * g).to(logits.dtype)
