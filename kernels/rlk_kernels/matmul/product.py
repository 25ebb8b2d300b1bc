"""The product on Triton: its plan and its launch.

The tile-invariance self-check runs before the first product (and the first one with split
accumulation) on a device.
"""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.device import facts
from rlk_kernels.launching import compiles_only, shape_cache
from rlk_kernels.matmul import plan
from rlk_kernels.matmul.launch import launch
from rlk_kernels.matmul.plan import MatmulPlan
from rlk_kernels.matmul.self_check import compile_check, trusted
from rlk_kernels.matmul.split import segments


def plan_for(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, out: Tensor) -> MatmulPlan:
    """The plan of out[M, N] = A @ B, with at least one row and one column."""
    here = facts(a.device)
    shape = plan.shape_of(a, b, trans_a, trans_b, out, here)
    split = segments(shape.k, shape.dtype, shape.out_dtype)[0] > 0
    return plan.plan_product(shape, here, trusted(a.device, a.dtype, split))


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool, out: Tensor
) -> str:
    """Fill out[M, N] with A @ B (+ bias); returns the implementation that ran."""
    if out.numel() == 0:
        return "triton"
    cache = shape_cache(
        a.shape, a.stride(), b.shape, b.stride(), a.dtype, None if bias is None else bias.dtype,
        trans_a, trans_b, out.dtype, out.stride(), a.device,
        (a.data_ptr() | b.data_ptr()) & 15 == 0, out.data_ptr() & 15 == 0,
    )  # fmt: skip
    planned = cache.plan
    if planned is None:
        planned = plan_for(a, b, trans_a, trans_b, out)
        if not compiles_only():  # its tiles may not have been checked yet
            cache.plan = planned
    launch(planned, cache, a, b, bias, trans_a, trans_b, out)
    return planned.implementation


def compile_ahead(
    weight: Tensor, bias: Tensor | None, rows: Collection[int],
    out_dtype: torch.dtype | None = None, wait: bool = True,
) -> None:  # fmt: skip
    """Compile what `product` will launch for x[M, K] @ weight^T (+ bias), for each M of `rows`, and
    run the self-check. Without `wait`, threads compile both, and the first product runs the
    check."""
    out_dtype = out_dtype or weight.dtype
    n, k = weight.shape
    split = segments(k, weight.dtype, out_dtype)[0] > 0
    if wait:
        trusted(weight.device, weight.dtype, split)
    else:
        compile_check(weight.device, weight.dtype, split)
    with compiled_ahead(weight.device, wait) as ahead:
        most = max(rows, default=0) if ahead else 0
        x, out = weight.new_empty(most, k), weight.new_empty(most, n, dtype=out_dtype)
        for m in rows if ahead else ():
            product(x[:m], weight, bias, False, True, out[:m])


def add_product(total: Tensor, a: Tensor, b: Tensor) -> str:
    """total[M, N] += a[K, M]^T @ b[K, N], in fp32; returns the implementation that ran."""
    if total.numel() == 0 or a.shape[0] == 0:
        return "triton"
    cache = shape_cache(
        "add", a.shape, a.stride(), b.shape, b.stride(), a.dtype, total.dtype, a.device,
        (a.data_ptr() | b.data_ptr()) & 15 == 0, total.data_ptr() & 15 == 0,
    )  # fmt: skip
    planned = cache.plan
    if planned is None:
        planned = replace(plan_for(a, b, True, False, total), tma_store=False)
        cache.plan = planned
    launch(planned, cache, a, b, None, True, False, total, add=True)
    return planned.implementation
