"""linear: y = x @ weight^T + bias.

    y[..., n] = round( sum_k x[..., k] * weight[n, k]  + bias[n] )        fp32, then out_dtype

Reduction order: `matmul/kernels.py`, K from front to back in one fp32 accumulator, in the segments
of `matmul/split.py` for 16-bit operands with an fp32 y (triton), or error-free (torch). A row of y
depends only on that row of x, on weight and on bias.

Gradients, each one product with fp32 accumulation, rounded once to the input's dtype:
    dx[..., k] = sum_n dy[..., n] weight[n, k]     n from front to back: a row depends on its row
    dweight[n, k] = sum_m dy[m, n] x[m, k]         m from front to back, no atomics
    dbias[n] = sum_m dy[m, n]                      the fixed order of `column_sum`
    main_grad[n, k] = main_grad[n, k] + fp32(sum_m dy[m, n] x[m, k])    with main_grad, in the
        backward: the sum alone, in the segments of `matmul/split.py`, then one fp32 addition
dy is rounded to x's dtype first. dweight and dbias are sums over rows: they depend on the order of
the rows, but not on trailing rows of zeros, and they repeat. On the torch backend dweight does not
depend on the order of the rows either.

M = rows of x (all leading dimensions)   K = in features   N = out features
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import SECOND, call, custom_op, on_device_of
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape
from rlk_kernels.matmul import portable
from rlk_kernels.memory import empty
from rlk_kernels.numerics.column_sum.operator import column_sum


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The formula in float64, for tests."""
    y = x.double() @ weight.double().mT
    return y if bias is None else y + bias.double()


_on_triton = lazy_module("rlk_kernels.matmul.product")


def _shape(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool) -> tuple[int, int]:
    return a.shape[1] if trans_a else a.shape[0], b.shape[0] if trans_b else b.shape[1]


def _fake(a, b, bias, trans_a, trans_b, out_dtype, backend):
    return a.new_empty(_shape(a, b, trans_a, trans_b), dtype=out_dtype)


def input_grad(dy: Tensor, weight: Tensor, backend: str) -> Tensor:
    """dx[M, K] of dy[M, N] and weight[N, K], in dy's dtype."""
    return call(_gemm, dy.contiguous(), weight, None, False, False, None, backend)


def weight_grad(dy: Tensor, x: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """dweight[N, K] of dy[M, N] and x[M, K]."""
    return call(_gemm, dy.contiguous(), x, None, True, False, dtype, backend)


def bias_grad(dy: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """dbias[N] of dy[M, N]."""
    return column_sum(dy.contiguous(), backend).to(dtype)


def _input_and_bias_grads(ctx, dy: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dbias), each None where autograd does not need it."""
    dx = input_grad(dy, weight, ctx.backend) if ctx.needs_input_grad[0] else None
    needs_bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
    return dx, bias_grad(dy, ctx.bias_dtype, ctx.backend) if needs_bias else None


def _setup(ctx, inputs, output):
    a, b, bias, trans_a, trans_b, _, backend = inputs
    ctx.linear_form = trans_b and not trans_a
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.backend = backend


def _backward(ctx, dy):
    if not ctx.linear_form:
        raise NotImplementedError(f"linear: {SECOND}")
    x, weight = ctx.saved_tensors
    dy = dy.to(x.dtype).contiguous()
    dx, db = _input_and_bias_grads(ctx, dy, weight)
    dw = weight_grad(dy, x, weight.dtype, ctx.backend) if ctx.needs_input_grad[1] else None
    return dx, dw, db, None, None, None, None


@custom_op("gemm", _fake, setup=_setup, backward=_backward)
def _gemm(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool,
    out_dtype: torch.dtype | None, backend: str,
) -> Tensor:  # fmt: skip
    """out_dtype: None for that of a, because torch's dispatch takes longer to pass a dtype."""
    dtype = out_dtype or a.dtype
    if backend == "torch":
        record("linear", "torch")
        return portable.product(a, b, bias, trans_a, trans_b, dtype)
    out = empty(_shape(a, b, trans_a, trans_b), dtype, a.device)
    record("linear", _on_triton().product(a, b, bias, trans_a, trans_b, out))
    return out


@custom_op("linear_into", lambda *arguments: None, writes=("out",))
def _linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> None:
    if backend == "torch":
        record("linear", "torch")
        out.copy_(portable.product(x, weight, bias, False, True, out.dtype))
        return
    record("linear", _on_triton().product(x, weight, bias, False, True, out))


@custom_op("add_weight_grad", lambda *arguments: None, writes=("main_grad",))
def _add_weight_grad(main_grad: Tensor, dy: Tensor, x: Tensor, backend: str) -> None:
    if backend == "torch":
        record("linear", "torch")
        main_grad += portable.product(dy, x, None, True, False, torch.float32)
        return
    record("linear", _on_triton().add_product(main_grad, dy, x))


class _WithMainGrad(torch.autograd.Function):
    """linear whose backward adds the weight's gradient to `main_grad` and returns none."""

    @staticmethod
    def forward(ctx, x, weight, bias, main_grad, out_dtype, backend):
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad  # not saved: other backwards may add to it before this one
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.backend = backend
        return _gemm(x, weight, bias, False, True, out_dtype, backend)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dy = dy.to(x.dtype).contiguous()
        dx, db = _input_and_bias_grads(ctx, dy, weight)
        if ctx.needs_input_grad[1]:
            _add_weight_grad(ctx.main_grad, dy, x, ctx.backend)
        return dx, None, db, None, None, None


def _check_main_grad(main_grad: Tensor, weight: Tensor, out: Tensor | None) -> None:
    """Raise if the weight's gradient cannot be added to `main_grad`."""
    if main_grad.shape != weight.shape or not main_grad.is_contiguous():
        raise UnsupportedShape(
            f"linear: main_grad {tuple(main_grad.shape)} with strides {main_grad.stride()} must be "
            f"contiguous and have the shape of weight {tuple(weight.shape)}"
        )
    if main_grad.dtype != torch.float32 or weight.dtype == torch.float64:
        raise UnsupportedDtype(
            f"linear: main_grad is {main_grad.dtype} and weight is {weight.dtype}; main_grad must "
            "be float32, and the weight must have 16 or 32 bits"
        )
    if out is not None:
        raise ValueError("linear: out has no gradient; give main_grad or out, not both")


def _check_out(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
) -> None:
    """Raise if the result cannot be written to `out`."""
    shape = (*x.shape[:-1], weight.shape[0])
    if out.shape != shape or not out.is_contiguous():
        raise UnsupportedShape(
            f"linear: out {tuple(out.shape)} with strides {out.stride()} must be contiguous {shape}"
        )
    if not out.is_floating_point() or dtype not in (None, out.dtype):
        raise UnsupportedDtype(
            f"linear: out is {out.dtype} and out_dtype is {dtype}; one floating dtype is needed"
        )
    inputs = (x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        raise ValueError("linear: a result in `out` has no gradient; use torch.no_grad()")


def check_weight(op: str, name: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Raise UnsupportedShape or UnsupportedDtype if weight or bias do not fit x, the argument
    `name` of the operator `op`."""
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UnsupportedShape(
            f"{op}: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise UnsupportedDtype(f"{op}: {name} is {x.dtype} and weight is {weight.dtype}; cast one")
    if bias is not None and bias.dtype not in (x.dtype, torch.float32):
        raise UnsupportedDtype(f"{op}: bias is {bias.dtype}; {x.dtype} or float32 is needed")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    main_grad: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y[..., N] = x[..., K] @ weight[N, K]^T (+ bias[N]); a row's bits do not depend on its batch.

    x, weight, bias: one dtype of bfloat16, float16, float32 (float64 on the torch backend, for
    gradcheck; bias may also be float32). out_dtype defaults to the dtype of x; the sum is rounded
    to it once, from fp32. Any M >= 0, N, K, strides and alignment are supported. With out[..., N]
    (contiguous, in the dtype of y) the result is written to `out`, which is returned and has no
    gradient. With main_grad[N, K] (float32, contiguous; Megatron's `weight.main_grad`) each
    backward adds the weight's gradient to it, not rounded to the weight's dtype, and does not
    change weight.grad. Raises UnsupportedShape, UnsupportedDtype, ValueError if `out` would need a
    gradient, and what `backend.choose` raises.
    """
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedShape(
            f"linear: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)}; "
            "x[..., K] and weight[N, K] are needed"
        )
    check_weight("linear", "x", x, weight, bias)
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise UnsupportedDtype(f"linear: out_dtype is {out_dtype}; a floating dtype is needed")
    chosen = choose("linear", backend, x, weight, bias, out, main_grad)
    if main_grad is not None:
        _check_main_grad(main_grad, weight, out)
    if out is not None:
        _check_out(out, x, weight, bias, out_dtype)
    bias = None if bias is None else bias.contiguous()
    rows = x
    if x.dim() != 2:
        rows = x.reshape(-1 if x.shape[-1] else x.shape[:-1].numel(), x.shape[-1])
    if out is not None:
        call(_linear_into, out.view(rows.shape[0], weight.shape[0]), rows, weight, bias, chosen)
        return out
    if main_grad is not None and torch.is_grad_enabled():
        with on_device_of(x):
            y = _WithMainGrad.apply(rows, weight, bias, main_grad, out_dtype, chosen)
    else:
        y = call(_gemm, rows, weight, bias, False, True, out_dtype, chosen)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], weight.shape[0])
