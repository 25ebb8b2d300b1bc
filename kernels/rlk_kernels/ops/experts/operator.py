"""grouped_linear multiplies each row of a token by the weight of one of the token's experts.
grouped_swiglu also applies `swiglu` to the halves of the result, in one kernel.

    y[t, j, n] = round( sum_k x[t(, j), k] * weight[ids[t, j], n, k]  + bias[ids[t, j], n] )
    a[t, j, i] = swiglu(y[t, j, i], y[t, j, I + i])                the bits of `swiglu`; no bias

Sums are fp32, rounded once to x's dtype. Row (t, j) has the bits of `linear` of that row and that
expert's weight and bias, on the same backend. The
order of its sum is that of `matmul/kernels.py`, and depends on neither the other tokens, nor their
number for each expert, nor experts without tokens. Rows keep the order of their tokens;
`group_by_expert` lists each expert's rows by token on the device, without the host.

A slot with an id outside of 0 .. E - 1 is dropped: its row is zero, even if its token has NaN, and
it has no gradient.

Gradients, each product with fp32 accumulation, rounded once:
    dx[t, j, k] = sum_n dy[t, j, n] weight[ids[t, j], n, k]     the bits of `linear`'s
    dx[t, k]    = round( sum_j fp32(dx[t, j, k]) )              of an x[T, K]: in ascending j
    dweight[e, n, k] = sum_(t, j) of e dy[t, j, n] x[t(, j), k]     by token, from front to back
    dbias[e, n] = sum_(t, j) of e dy[t, j, n]     by token, in an order of the expert's rows alone

T = tokens   k = experts of a token   E = experts   S = T * k rows   K, N = in, out features
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import CustomOpDef

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import SECOND, call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.memory import empty
from rlk_kernels.ops.combine.operator import sum_slots
from rlk_kernels.ops.experts import portable
from rlk_kernels.ops.linear import check_weight
from rlk_kernels.ops.swiglu import portable as swiglu_portable

_on_triton = lazy_module("rlk_kernels.ops.experts.launch")


def grouped_linear_ref(
    x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y[T, k, N] by the formula in float64, for tests."""
    rows = x.double() if x.dim() == 3 else x.double()[:, None].expand(-1, ids.shape[1], -1)
    y = rows.new_zeros(*ids.shape, weight.shape[1])
    for e in range(weight.shape[0]):
        y[ids == e] = rows[ids == e] @ weight[e].double().mT
        if bias is not None:
            y[ids == e] += bias[e].double()
    return y


class ExpertGroups(NamedTuple):
    """The rows of each expert, made by `group_by_expert` and shared by the products of a layer."""

    ids: Tensor
    """int32 [T, k]."""
    order: Tensor
    """int32 [S]: the rows t * k + j, by expert, then by token, with dropped rows last."""
    offsets: Tensor
    """int32 [E + 1]: the begin of each expert's rows, and of the dropped rows, in `order`."""

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1


@custom_op(
    "group_by_expert",
    lambda ids, experts, backend: (ids.new_empty(ids.numel()), ids.new_empty(experts + 1)),
)
def _group(ids: Tensor, experts: int, backend: str) -> tuple[Tensor, Tensor]:
    record("group_by_expert", backend)
    return (portable if backend == "torch" else _on_triton()).group(ids, experts)


@custom_op(
    "grouped_input_grad",
    lambda dy, weight, order, *rest: dy.new_empty(order.shape[0], weight.shape[2]),
    no_gradient=("grouped_linear", SECOND),
)
def input_grad(dy: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """dx[S, K] of dy[S, N]."""
    if backend == "torch":
        record("grouped_linear", "torch")
        return portable.input_grad(dy, weight, order, offsets)
    out = empty((order.shape[0], weight.shape[2]), dy.dtype, dy.device)
    record("grouped_linear", _on_triton().product(dy, weight, order, offsets, 1, out))
    return out


@custom_op(
    "grouped_weight_grad",
    lambda dy, x, _, offsets, *rest: dy.new_empty(len(offsets) - 1, dy.shape[1], x.shape[1]),
    no_gradient=("grouped_linear", SECOND),
)
def weight_grad(
    dy: Tensor, x: Tensor, order: Tensor, offsets: Tensor, each: int, backend: str
) -> Tensor:
    """dweight[E, N, K] of dy[S, N] and x[S / each, K]."""
    if backend == "torch":
        record("grouped_linear", "torch")
        return portable.weight_grad(dy, x, order, offsets, each)
    out = empty((offsets.shape[0] - 1, dy.shape[1], x.shape[1]), dy.dtype, dy.device)
    record("grouped_linear", _on_triton().weight_grad(dy, x, order, offsets, each, out))
    return out


@custom_op(
    "grouped_bias_grad",
    lambda dy, _, offsets, *rest: dy.new_empty(len(offsets) - 1, dy.shape[1]),
    no_gradient=("grouped_linear", SECOND),
)
def _bias_grad(dy: Tensor, order: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """dbias[E, N] of dy[S, N]."""
    if backend == "torch":
        record("grouped_linear", "torch")
        return portable.bias_grad(dy, order, offsets)
    out = empty((offsets.shape[0] - 1, dy.shape[1]), dy.dtype, dy.device)
    record("grouped_linear", _on_triton().bias_grad(dy, order, offsets, out))
    return out


def _setup(ctx, inputs, output):
    x, weight, bias, order, offsets, ctx.each, ctx.backend = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, order, offsets)


def _backward(ctx, dy):
    x, weight, order, offsets = ctx.saved_tensors
    dy = dy.contiguous()
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = input_grad(dy, weight, order, offsets, ctx.backend)
        if ctx.each != 1:
            dx = sum_slots(dx.view(x.shape[0], ctx.each, x.shape[1]), ctx.backend)
    if ctx.needs_input_grad[1]:
        dw = weight_grad(dy, x, order, offsets, ctx.each, ctx.backend)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = _bias_grad(dy, order, offsets, ctx.backend).to(ctx.bias_dtype)
    return dx, dw, db, None, None, None, None


@custom_op(
    "grouped_linear",
    lambda x, weight, bias, order, *rest: x.new_empty(order.shape[0], weight.shape[1]),
    setup=_setup,
    backward=_backward,
)
def _grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, offsets: Tensor, each: int,
    backend: str,
) -> Tensor:  # fmt: skip
    """y[S, N] of x[S / each, K]; row s is the product of row s // each of x."""
    if backend == "torch":
        record("grouped_linear", "torch")
        return portable.forward(x, weight, order, offsets, each, bias)
    out = empty((order.shape[0], weight.shape[1]), x.dtype, x.device)
    ran = _on_triton().product(x, weight.mT, order, offsets, each, out, bias=bias)
    record("grouped_linear", ran)
    return out


@custom_op(
    "grouped_swiglu",
    lambda x, weight, order, *rest: x.new_empty(order.shape[0], weight.shape[1] // 2),
    no_gradient=("grouped_swiglu", "grouped_linear and swiglu have them"),
)
def _grouped_swiglu(
    x: Tensor, weight: Tensor, order: Tensor, offsets: Tensor, each: int, backend: str
) -> Tensor:
    """a[S, I] of x[S / each, K] and weight[E, 2 I, K]."""
    if backend == "torch":
        record("grouped_swiglu", "torch")
        both = portable.forward(x, weight, order, offsets, each)
        return swiglu_portable.forward(*both.chunk(2, -1))
    out = empty((order.shape[0], weight.shape[1] // 2), x.dtype, x.device)
    ran = _on_triton().product(x, weight.mT, order, offsets, each, out, act=True)
    record("grouped_swiglu", ran)
    return out


def group_by_expert(ids: Tensor, experts: int, *, backend: str | None = None) -> ExpertGroups:
    """The rows of each of `experts` experts for ids int32 [T, k]; the host reads no ids.

    Raises UnsupportedShape, UnsupportedDtype, and what `backend.choose` raises.
    """
    if ids.dim() != 2 or experts < 1:
        raise UnsupportedShape(
            f"group_by_expert: ids {tuple(ids.shape)} and {experts} experts; ids[T, k] and at "
            "least one expert are needed"
        )
    if ids.dtype != torch.int32:
        raise UnsupportedDtype(f"group_by_expert: ids are {ids.dtype}; int32 is needed")
    ids = ids.contiguous()
    chosen = choose("group_by_expert", backend, ids.new_empty(0, dtype=torch.float32))
    return ExpertGroups(ids, *call(_group, ids, experts, chosen))


def grouped_linear(
    x: Tensor, weight: Tensor, groups: ExpertGroups, bias: Tensor | None = None, *,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """y[T, k, N] of weight[E, N, K], bias[E, N] and x[T, K], shared by all experts of a token, or
    x[T, k, K].

    x, weight, bias: one dtype of bfloat16, float16, float32 (float64 on the torch backend). A
    weight may have any strides. Raises UnsupportedShape, UnsupportedDtype, and what
    `backend.choose` raises.
    """
    if bias is not None:
        if bias.shape != weight.shape[:2]:
            raise UnsupportedShape(
                f"grouped_linear: bias {tuple(bias.shape)} does not fit weight "
                f"{tuple(weight.shape)}; bias[E, N] is needed"
            )
        if bias.dtype != x.dtype:
            raise UnsupportedDtype(
                f"grouped_linear: bias is {bias.dtype} and x is {x.dtype}; cast one"
            )
        bias = bias.contiguous()
    return _by_expert(_grouped, "grouped_linear", x, weight, groups, backend, (bias,))


def grouped_swiglu(
    x: Tensor, weight: Tensor, groups: ExpertGroups, *, backend: str | None = None
) -> Tensor:
    """a[T, k, I] of x[T, K] or x[T, k, K] and weight[E, 2 I, K], gate before up: the bits of
    `swiglu` of the halves of `grouped_linear`, without storing them. No gradient.

    Raises UnsupportedShape, UnsupportedDtype, and what `backend.choose` raises.
    """
    if weight.dim() == 3 and weight.shape[1] % 2:
        raise UnsupportedShape(
            f"grouped_swiglu: weight {tuple(weight.shape)} cannot be halved; weight[E, 2 I, K] is "
            "needed"
        )
    return _by_expert(_grouped_swiglu, "grouped_swiglu", x, weight, groups, backend)


def _by_expert(
    op: CustomOpDef, name: str, x: Tensor, weight: Tensor, groups: ExpertGroups,
    backend: str | None, bias: tuple[Tensor | None, ...] = (),
) -> Tensor:  # fmt: skip
    t, k = groups.ids.shape
    if (
        weight.dim() != 3
        or weight.shape[0] != groups.experts
        or x.shape not in ((t, weight.shape[2]), (t, k, weight.shape[2]))
    ):
        raise UnsupportedShape(
            f"{name}: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit ids "
            f"[{t}, {k}] of {groups.experts} experts; x[T, K] or x[T, k, K] and weight[E, N, K] "
            "are needed"
        )
    check_weight(name, "x", x, weight)
    chosen = choose(name, backend, x, weight, groups.order, *bias)
    each = k if x.dim() == 2 else 1
    rows = x.reshape(-1 if weight.shape[2] else x.shape[:-1].numel(), weight.shape[2])
    y = call(op, rows.contiguous(), weight, *bias, groups.order, groups.offsets, each, chosen)
    return y.view(t, k, y.shape[1])
