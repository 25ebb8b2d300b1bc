"""load_balancing_loss keeps all experts in use; router_z_loss keeps a router's logits small.

    load_balancing_loss = E * sum_e (c_e / T) * P_e    c_e: tokens sent to e,  P_e = mean_t p[t, e]
    router_z_loss       = mean_t (log sum_e exp(logits[t, e]))²

p = softmax(logits). The first equals transformers' `load_balancing_loss_func` of the concatenated
logits of the layers; megatron-core's loss is this one divided by k. Sums over tokens are in the
order of `column_sum`, in float64 on every device, and are rounded to fp32 at the end. Tokens that
`valid` excludes do not count, and a NaN in their logits does not spread.

Gradients (c_e is a constant), over N valid tokens:
    dlogits[t, e] = p[t, e] (f_e - sum_i p[t, i] f_i) / N,  f_e = E c_e / N        load balancing
    dlogits[t, e] = 2 lse[t] p[t, e] / N                                           z
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import refuse_transforms
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.numerics import elementary
from rlk_kernels.numerics.column_sum.operator import column_sum
from rlk_kernels.numerics.lse_tree.portable import block_portable
from rlk_kernels.numerics.rows import tree_sum


def load_balancing_loss_ref(logits: Tensor, ids: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    experts = logits.shape[1]
    sent = torch.nn.functional.one_hot(ids.long(), experts).double().sum(1).mean(0)
    return experts * (sent * logits.double().softmax(-1).mean(0)).sum()


def router_z_loss_ref(logits: Tensor) -> Tensor:
    """The formula in float64, for tests."""
    return logits.double().logsumexp(-1).square().mean()


def _softmax(logits: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(p[T, E], lse[T], N) in float64; zeros for tokens that are not valid."""
    z = logits.double()
    count = torch.full((), z.shape[0], dtype=torch.float64, device=z.device)
    if valid is not None:
        z = torch.where(valid[:, None], z, 0.0)
        count = valid.sum(dtype=torch.float64)
    top, total = block_portable(z)
    p = elementary.exp(z - top[:, None]) / total[:, None]
    lse = top + elementary.log(total)
    if valid is not None:
        p, lse = torch.where(valid[:, None], p, 0.0), torch.where(valid, lse, 0.0)
    return p, lse, count


class _LoadBalancing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, valid):
        record("load_balancing_loss", "torch")
        experts = logits.shape[1]
        p, _, count = _softmax(logits, valid)
        taken = (ids >= 0) & (ids < experts)
        if valid is not None:
            taken = taken & valid[:, None]
        slots = torch.where(taken, ids, experts).long().flatten()
        # whole numbers, which float64 adds exactly in any order
        sent = torch.zeros(experts + 1, dtype=torch.float64, device=p.device)
        sent = sent.index_add(0, slots, torch.ones_like(slots, dtype=torch.float64))[:experts]
        factor = experts * sent / count
        ctx.save_for_backward(p, factor, count)
        ctx.dtype = logits.dtype
        return tree_sum(factor * column_sum(p, "torch") / count)[0].to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        p, factor, count = ctx.saved_tensors
        mean = tree_sum(p * factor)
        return (grad.double() * p * (factor - mean) / count).to(ctx.dtype), None, None


class _RouterZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, valid):
        record("router_z_loss", "torch")
        p, lse, count = _softmax(logits, valid)
        ctx.save_for_backward(p, lse, count)
        ctx.dtype = logits.dtype
        return (column_sum(lse.square()[:, None], "torch")[0] / count).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        p, lse, count = ctx.saved_tensors
        return (grad.double() * 2.0 * lse[:, None] * p / count).to(ctx.dtype), None


def _check(op: str, logits: Tensor, valid: Tensor | None, *others: Tensor) -> None:
    if logits.dim() != 2 or (valid is not None and valid.shape != logits.shape[:1]):
        shape = None if valid is None else tuple(valid.shape)
        raise UnsupportedShape(
            f"{op}: logits {tuple(logits.shape)} and valid {shape}; logits[T, E] and valid[T] are "
            "needed"
        )
    if logits.dtype not in (torch.float32, torch.float64):
        raise UnsupportedDtype(f"{op}: logits are {logits.dtype}; float32 is needed")
    if valid is not None and valid.dtype != torch.bool:
        raise UnsupportedDtype(f"{op}: valid is {valid.dtype}; bool is needed")
    refuse_transforms(op, vmap=False)
    choose(op, "torch", logits, valid, *others)


def load_balancing_loss(logits: Tensor, ids: Tensor, valid: Tensor | None = None) -> Tensor:
    """The loss, in the dtype of logits[T, E], for the experts ids[T, k] of each token, of one layer
    or of several concatenated layers; valid: bool [T], default all. NaN if no token is valid.
    Raises UnsupportedShape, UnsupportedDtype, UnsupportedDevice.
    """
    if ids.dim() != 2 or ids.shape[0] != logits.shape[0] or ids.is_floating_point():
        raise UnsupportedShape(
            f"load_balancing_loss: ids {tuple(ids.shape)} of {ids.dtype} do not fit logits "
            f"{tuple(logits.shape)}; integers [T, k] are needed"
        )
    _check("load_balancing_loss", logits, valid, ids)
    return _LoadBalancing.apply(logits, ids, valid)


def router_z_loss(logits: Tensor, valid: Tensor | None = None) -> Tensor:
    """The loss, in the dtype of logits[T, E]; valid as in `load_balancing_loss`.
    Raises UnsupportedShape, UnsupportedDtype, UnsupportedDevice.
    """
    _check("router_z_loss", logits, valid)
    return _RouterZ.apply(logits, valid)
