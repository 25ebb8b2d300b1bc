"""The Triton kernels of `delta_gates`: a program has BLOCK elements, row after row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.numerics.column_sum.operator import column_sum

BLOCK = 512


@triton.jit
def _softplus(x):
    y = tl.exp(-tl.abs(x))
    # 1 + y would drop the digits of a small y.
    small = y * (1.0 - y * (0.5 - y * (0.3333333333333333 - y * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(y < 0.01, small, tl.log(1.0 + y))


@triton.jit(do_not_specialize=["M"])
def _forward_kernel(
    a_ptr, b_ptr, a_log_ptr, dt_ptr, g_ptr, beta_ptr, M, H: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < M
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + at % H).to(tl.float32))
    x = a + tl.load(dt_ptr + at % H).to(tl.float32)
    tl.store(g_ptr + at, 0.0 - rate * _softplus(x), mask=mask)
    beta = 1.0 / (1.0 + tl.exp(-b))
    tl.store(beta_ptr + at, beta.to(beta_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _backward_kernel(
    a_ptr, b_ptr, a_log_ptr, dt_ptr, dg_ptr, dbeta_ptr, da_ptr, db_ptr, wide_da_ptr, rows_ptr, M,
    H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < M
    a = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + at, mask=mask, other=0.0).to(tl.float32)
    dg = tl.load(dg_ptr + at, mask=mask, other=0.0)
    dbeta = tl.load(dbeta_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + at % H).to(tl.float32))
    x = a + tl.load(dt_ptr + at % H).to(tl.float32)
    da = 0.0 - dg * rate / (1.0 + tl.exp(-x))
    s = 1.0 / (1.0 + tl.exp(-b))
    tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=mask)
    tl.store(wide_da_ptr + at, da, mask=mask)
    tl.store(db_ptr + at, (dbeta * s * (1.0 - s)).to(db_ptr.dtype.element_ty), mask=mask)
    tl.store(rows_ptr + at, dg * (0.0 - rate * _softplus(x)), mask=mask)


def _cache(name: str, a: Tensor, a_log: Tensor, dt_bias: Tensor):
    return shape_cache(name, a.shape[1], a.dtype, a_log.dtype, dt_bias.dtype)


def forward(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """(g, beta)."""
    g, beta = empty(a.shape, torch.float32, a.device), empty(b.shape, b.dtype, b.device)
    if m := a.numel():
        launch(
            _cache("delta_gates", a, a_log, dt_bias), _forward_kernel, (cdiv(m, BLOCK), 1, 1),
            (a, b, a_log, dt_bias, g, beta, m, a.shape[1], BLOCK), {"num_warps": 4},
        )  # fmt: skip
    return g, beta


def backward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, dg: Tensor, dbeta: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(da, db, da_log and ddt_bias in fp32)."""
    da, db = (empty(a.shape, a.dtype, a.device) for _ in range(2))
    wide, rows = (empty(a.shape, torch.float32, a.device) for _ in range(2))
    if m := a.numel():
        launch(
            _cache("delta_gates_backward", a, a_log, dt_bias), _backward_kernel,
            (cdiv(m, BLOCK), 1, 1),
            (a, b, a_log, dt_bias, dg, dbeta, da, db, wide, rows, m, a.shape[1], BLOCK),
            {"num_warps": 4},
        )  # fmt: skip
    return da, db, column_sum(rows, "triton"), column_sum(wide, "triton")
