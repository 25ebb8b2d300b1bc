"""position_scale: the factor of a query by its position, as Ministral 3 and Llama 4 have it.

    y[t] = round( 1 + beta * log(1 + floor(positions[t] / context)) )          to fp32

The division is one of integers. There is no reduction, and no gradient.

T = positions (all dimensions)
"""

import torch
from torch import Tensor

from rlk_kernels.backend import choose, two_backends
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.errors import UnsupportedDtype
from rlk_kernels.ops.position_scale import portable


def position_scale_ref(positions: Tensor, beta: float, context: int) -> Tensor:
    """The formula in float64, for tests."""
    return 1.0 + beta * torch.log1p((positions // context).double())


_module = two_backends(portable, lazy_module("rlk_kernels.ops.position_scale.kernels"))


@custom_op(
    "position_scale",
    lambda positions, *rest: positions.new_empty(positions.shape, dtype=torch.float32),
)
def _position_scale(positions: Tensor, beta: float, context: int, backend: str) -> Tensor:
    return _module("position_scale", backend).forward(positions, beta, context)


def position_scale(
    positions: Tensor, *, beta: float, context: int, backend: str | None = None
) -> Tensor:
    """fp32 factors of integer positions >= 0, of the same shape. Raises UnsupportedDtype, and
    ValueError for a context below 1 or a beta below 0."""
    if positions.dtype not in (torch.int32, torch.int64):
        raise UnsupportedDtype(
            f"position_scale: positions are {positions.dtype}; int32 or int64 is needed"
        )
    if context < 1 or not beta >= 0:
        raise ValueError(
            f"position_scale: context={context} must be at least 1, and beta={beta} at least 0"
        )
    chosen = choose(
        "position_scale", backend, positions.new_empty(0, dtype=torch.float32), positions
    )
    return call(_position_scale, positions.contiguous(), float(beta), int(context), chosen)
