"""`position_scale` in PyTorch: elementwise, in float64."""

from torch import Tensor

from rlk_kernels.numerics import elementary


def forward(positions: Tensor, beta: float, context: int) -> Tensor:
    """fp32, in the shape of positions."""
    periods = (positions // context).double()
    return (1.0 + beta * elementary.log(1.0 + periods)).float()
