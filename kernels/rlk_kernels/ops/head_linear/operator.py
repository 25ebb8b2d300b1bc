"""head_linear: multiplies the features of each head by the head's own weight.

    y[t, h, n]     = round( sum_k x[t, h, k] weight[h, n, k] )     the bits of `linear` of each head
    y[t, h, N + r] = rest[t, h, r]                                 features that are only copied

Gradients are those of `grouped_linear` in which slot h of a token has expert h.

T = tokens   H = heads   K, N = in, out features   R = features of rest
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.memory import empty
from rlk_kernels.ops.experts import operator as experts
from rlk_kernels.ops.linear import check_weight

_on_triton = lazy_module("rlk_kernels.ops.head_linear.launch")


def head_linear_ref(x: Tensor, weight: Tensor, rest: Tensor | None = None) -> Tensor:
    """The formula in float64, for tests."""
    y = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    return y if rest is None else torch.cat([y, rest.double()], -1)


def groups_of(tokens: int, heads: int, device: torch.device, backend: str) -> experts.ExpertGroups:
    """Slot h of each token has expert h."""
    ids = torch.arange(heads, dtype=torch.int32, device=device).expand(tokens, -1)
    return experts.group_by_expert(ids, heads, backend=backend)


def _width(weight: Tensor, rest: Tensor | None) -> int:
    return weight.shape[1] + (0 if rest is None else rest.shape[2])


def _fake(x, weight, rest, backend):
    return x.new_empty(*x.shape[:2], _width(weight, rest))


def _setup(ctx, inputs, output):
    x, weight, rest, ctx.backend = inputs
    ctx.has_rest = rest is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    t, heads, k = x.shape
    dx = dw = drest = None
    n = weight.shape[1]
    rows = dy[..., :n].reshape(-1, n).contiguous()
    groups = groups_of(t, heads, dy.device, ctx.backend)
    if ctx.needs_input_grad[0]:
        dx = experts.input_grad(rows, weight, *groups[1:], ctx.backend).view(x.shape)
    if ctx.needs_input_grad[1]:
        dw = experts.weight_grad(rows, x.reshape(-1, k).contiguous(), *groups[1:], 1, ctx.backend)
    if ctx.has_rest and ctx.needs_input_grad[2]:
        drest = dy[..., n:]
    return dx, dw, drest, None


@custom_op("head_linear", _fake, setup=_setup, backward=_backward)
def _head_linear(x: Tensor, weight: Tensor, rest: Tensor | None, backend: str) -> Tensor:
    t, heads, _ = x.shape
    if backend == "triton" and _on_triton().can_run(x, weight):
        y = empty((t, heads, _width(weight, rest)), x.dtype, x.device)
        record("head_linear", _on_triton().product(x, weight, rest, y))
        return y
    groups = groups_of(t, heads, x.device, backend)
    y = experts.grouped_linear(x, weight, groups, backend=backend)
    record("head_linear", backend)
    return y if rest is None else torch.cat([y, rest], -1)


def head_linear(
    x: Tensor, weight: Tensor, rest: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """y[T, H, N + R] of x[T, H, K], weight[H, N, K] and rest[T, H, R] (R = 0 without one).

    x, weight, rest: one dtype of bfloat16, float16, float32 (float64 on the torch backend), of any
    strides. Raises UnsupportedShape, UnsupportedDtype, and what `backend.choose` raises.
    """
    if (
        x.dim() != 3
        or weight.dim() != 3
        or (weight.shape[0], weight.shape[2]) != x.shape[1:]
        or (rest is not None and (rest.dim() != 3 or rest.shape[:2] != x.shape[:2]))
    ):
        of_rest = "" if rest is None else f" and rest {tuple(rest.shape)}"
        raise UnsupportedShape(
            f"head_linear: x {tuple(x.shape)}, weight {tuple(weight.shape)}{of_rest}; x[T, H, K], "
            "weight[H, N, K] and rest[T, H, R] are needed"
        )
    check_weight("head_linear", "x", x, weight)
    if rest is not None and rest.dtype != x.dtype:
        raise UnsupportedDtype(f"head_linear: rest is {rest.dtype} and x is {x.dtype}; cast one")
    given = () if rest is None else (rest,)
    return call(_head_linear, x, weight, rest, choose("head_linear", backend, x, weight, *given))
