"""The product on Triton: its plan and its launch.

The tile-invariance self-check runs before the first product (and the first one with split
accumulation) on a device.
"""

from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.matmul import plan
from rlk_kernels.matmul.launch import launch
from rlk_kernels.matmul.plan import MatmulPlan
from rlk_kernels.matmul.self_check import trusted
from rlk_kernels.matmul.split import segments


def plan_for(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, out: Tensor) -> MatmulPlan:
    """The plan of out[M, N] = A @ B, at least one row and column."""
    here = facts(a.device)
    shape = plan.shape_of(a, b, trans_a, trans_b, out, here)
    split = segments(shape.k, shape.dtype, shape.out_dtype)[0] > 0
    return plan.plan_product(shape, here, trusted(a.device, a.dtype, split))


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool, trans_b: bool, out: Tensor
) -> str:
    """Fill out[M, N] with A @ B (+ bias); which implementation ran."""
    if out.numel() == 0:
        return "triton"
    planned = plan_for(a, b, trans_a, trans_b, out)
    launch(planned, a, b, bias, trans_a, trans_b, out)
    return planned.implementation
