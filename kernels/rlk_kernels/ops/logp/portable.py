"""`logp` in PyTorch: the tree of `lse_tree` in float64."""

import torch
from torch import Tensor

from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.dtypes import wide_dtype
from rlk_kernels.numerics.lse_tree.portable import block_portable
from rlk_kernels.numerics.rows import by_rows
from rlk_kernels.ops.linear_logp.options import LogitOptions
from rlk_kernels.ops.linear_logp.portable import final_logits, softcap_slope


def _forward(logits, target, ids, top_k, spec):
    wide = wide_dtype(logits.dtype)
    z = final_logits(logits, spec)
    m, s = block_portable(z)
    log_s = elementary.log(s)

    def of(ids):
        z_ids = z.gather(-1, ids.long().clamp(min=0))
        return _logp(z_ids, ids, m[:, None], log_s[:, None]).to(wide)

    top = target.new_empty(z.shape[0], 0, dtype=torch.int64)
    id_logp = of(top if ids is None else ids)
    if top_k:
        _, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        top = order[:, :top_k].contiguous()
    return of(target[:, None]).squeeze(-1), torch.stack([m, log_s], 1), id_logp, of(top), top


def _logp(z, ids, m, log_s):
    return torch.where(ids < 0, 0.0, (z - m) - log_s)


def node(logits: Tensor, entropy: bool = False) -> Tensor:
    """(m, s)[T, 2], or (m, s, u)[T, 3], of logits[T, V], all columns of one subtree."""
    return torch.stack(by_rows(lambda z: block_portable(z.double(), entropy), logits), -1)


def logp_of_root(z: Tensor, target: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """logp[T] and (m, log s)[T, 2] from the targets' logits z[T] and (m, s)[T, 2]."""
    m, s = root.unbind(-1)
    log_s = elementary.log(s)
    wide = wide_dtype(z.dtype)
    return _logp(z.double(), target, m, log_s).to(wide), torch.stack([m, log_s], 1)


def _backward(logits, target, root, g, spec):
    wide = wide_dtype(logits.dtype)
    z = final_logits(logits, spec)
    m, log_s = root.split(1, 1)
    p = elementary.exp((z - m) - log_s)
    # a target after the last column belongs to another rank
    at = target.long().clamp(0, p.shape[1])[:, None]
    one = p.new_zeros(p.shape[0], p.shape[1] + 1).scatter_(1, at, 1.0)[:, :-1]
    slope = spec.scale / spec.temperature if wide == torch.float64 else spec.slope
    dx = (g.double() * slope)[:, None] * (one - p) * softcap_slope(z, spec)
    no_gradient = (target < 0)[:, None] | ((g == 0)[:, None] & dx.isnan())
    return torch.where(no_gradient, 0.0, dx).to(wide).to(logits.dtype)


def forward(
    logits: Tensor, target: Tensor, token_ids: Tensor | None, top_k: int, spec: LogitOptions
) -> tuple[Tensor, ...]:
    """(logp[T], (m, log s)[T, 2], logp of token_ids[T, J], logp of the top_k, their ids); m is the
    maximum of a row, log s is natural, and the last three are empty if they are not requested."""
    v = logits.shape[1]
    for ids in (target, token_ids):
        if ids is not None and ids.numel() and int(ids.max()) >= v:
            raise IndexError(f"logp: a target of {int(ids.max())} is not below V = {v}")
    return by_rows(
        lambda x, targets, ids: _forward(x, targets, ids, top_k, spec), logits, target, token_ids
    )


def backward(logits: Tensor, target: Tensor, root: Tensor, g: Tensor, spec: LogitOptions) -> Tensor:
    """dlogits[T, V]."""
    return by_rows(
        lambda x, targets, root, g: _backward(x, targets, root, g, spec), logits, target, root, g
    )
