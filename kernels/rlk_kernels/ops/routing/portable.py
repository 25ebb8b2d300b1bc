"""`route` in PyTorch."""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.lse_tree.portable import block_portable


def _probabilities(logits: Tensor) -> Tensor:
    """float64 softmax over all experts, by the tree."""
    z = logits.double()
    top, total = block_portable(z)
    return elementary.exp(z - top[:, None]) / total[:, None]


def in_order(x: Tensor) -> Tensor:
    """[T, 1]: x[T, k] added up one by one."""
    total = torch.zeros_like(x[:, :1])
    for j in range(x.shape[1]):
        total = total + x[:, j : j + 1]
    return total


def forward(logits: Tensor, k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """(weights[T, k], ids int32 [T, k])."""
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
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
