"""norm_add_norm: the RMS norm of a branch, its addition to the stream and the norm of the sum.

    y, s = rms_norm( rms_norm(x, branch_weight), weight, residual=residual )

Layers with a norm before and after each branch compute this between two branches. It has the bits
of the two norms: the norm of the branch is rounded before it is added. It has no gradient; the two
norms have one.

On triton both are one launch if the last product of the norm of the branch is wider than its
result. Otherwise a compiler contracts this product and the addition to a multiply-add, which skips
the rounding between them: in float32, and with cast="hf", whose product of two 16-bit numbers the
compiler computes in 16 bits. Those are two launches.

M = rows (all leading dimensions)   H = the normalised dimension
"""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.backend import choose, record
from rlk_kernels.custom_op import call, custom_op
from rlk_kernels.device import lazy_module
from rlk_kernels.ops.rms_norm.operator import as_rows, check_rms_norm
from rlk_kernels.ops.rms_norm.operator import rms_norm as norm

_on_triton = lazy_module("rlk_kernels.ops.norm_add_norm.kernels")


def _fake(x: Tensor, *rest) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


NO_GRADIENT = "it has no gradient; rms_norm has one"


@custom_op("norm_add_norm", _fake, no_gradient=("norm_add_norm", NO_GRADIENT))
def _norm_add_norm(
    x: Tensor, residual: Tensor, branch_weight: Tensor, weight: Tensor, eps: float, hf: bool,
    one_plus: bool, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y and s of x[M, H] and residual[M, H] with dense rows."""
    record("norm_add_norm", backend)
    if backend == "torch" or hf or x.dtype == torch.float32:
        how: dict[str, Any] = {
            "cast": "hf" if hf else "vllm",
            "one_plus": one_plus,
            "backend": backend,
        }
        return norm(norm(x, branch_weight, eps, **how), weight, eps, residual=residual, **how)
    return _on_triton().forward(x, residual, branch_weight, weight, eps, one_plus)


def norm_add_norm(
    x: Tensor,
    residual: Tensor,
    branch_weight: Tensor,
    weight: Tensor,
    eps: float,
    *,
    cast: str = "hf",
    one_plus: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, s): s = rms_norm(x, branch_weight) + residual, and y = rms_norm(s, weight).

    x[..., H], residual[..., H], branch_weight[H], weight[H]. Dtypes, H, eps, cast and one_plus are
    those of `rms_norm`, and so are the bits. Inputs are not modified. A backward raises
    NotImplementedError. Raises UnsupportedShape, UnsupportedDtype, ValueError.
    """
    for each in (branch_weight, weight):
        check_rms_norm("norm_add_norm", x, each, eps, residual, cast)
    chosen = choose("norm_add_norm", backend, x, residual, branch_weight, weight)
    y, s = call(
        _norm_add_norm, as_rows(x), as_rows(residual), branch_weight.contiguous(),
        weight.contiguous(), float(eps), cast == "hf", one_plus, chosen,
    )  # fmt: skip
    return (y, s) if x.dim() == 2 else (y.view(x.shape), s.view(x.shape))
