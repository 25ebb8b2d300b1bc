"""The Triton kernel of `norm_add_norm`: a row is in one program.

Tiles and warps are those of `rms_norm/kernels.py`, which determine the order of both sums. Each
norm is rounded once, from fp32 (cast="vllm").
"""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.rms_norm.kernels import added, inverse_rms, load_weight, scaled


@triton.jit(do_not_specialize=["M"])
def _norm_add_norm_kernel(
    x_ptr, res_ptr, branch_weight_ptr, weight_ptr, y_ptr, s_ptr, M, stride_x, stride_r, eps,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BH)[None, :]
    mask = (rows < M) & (cols < H)
    x = tl.load(x_ptr + rows * stride_x + cols, mask=mask, other=0.0)
    res = tl.load(res_ptr + rows * stride_r + cols, mask=mask, other=0.0)
    branch_weight = load_weight(branch_weight_ptr, cols, H, ONE_PLUS)
    s = added(scaled(x, inverse_rms(x, eps, H), branch_weight, False), res)
    tl.store(s_ptr + rows * H + cols, s, mask=mask)
    y = scaled(s, inverse_rms(s, eps, H), load_weight(weight_ptr, cols, H, ONE_PLUS), False)
    tl.store(y_ptr + rows * H + cols, y, mask=mask)


def forward(
    x: Tensor, residual: Tensor, branch_weight: Tensor, weight: Tensor, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, s) of x[M, H] and residual[M, H] with dense rows, in 16 bits."""
    shape, dtype, device = x.shape, x.dtype, x.device
    y, s = empty(shape, dtype, device), empty(shape, dtype, device)
    m, h = shape
    if m:
        strides = x.stride()[0], residual.stride()[0]
        cache = shape_cache(
            "norm_add_norm", h, strides, dtype, branch_weight.dtype, weight.dtype, eps, one_plus
        )
        if cache.plan is None:
            cache.plan = _plan(h, strides, eps, one_plus)
        rows, constants, options = cache.plan
        launch(
            cache, _norm_add_norm_kernel, (cdiv(m, rows), 1, 1),
            (x, residual, branch_weight, weight, y, s, m, *constants), options,
        )  # fmt: skip
    return y, s


def _plan(h: int, strides: tuple[int, int], eps: float, one_plus: bool) -> tuple[int, tuple, dict]:
    """What calls of one shape share: (rows of a program, constants, options)."""
    block = power_of_2(h)
    rows = max(1, 1024 // block)
    constants = *strides, eps, h, block, rows, one_plus
    return rows, constants, {"num_warps": min(16, max(2, block // 1024))}
