"""The launches of slices of a product as their plan says: one function for each kernel."""

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.launching import launch
from rlk_kernels.matmul.accumulate import kernels
from rlk_kernels.matmul.accumulate.plan import PartialProduct, SlicePlan

_TL = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def launch_tma(plan: SlicePlan, x: PartialProduct) -> None:
    """Launch one slice of a 16-bit output, with tensor maps."""
    tile, sums = plan.tile, x.out.view(torch.int16)
    (m, n), k = x.out.shape, x.b.shape[0]
    hi_desc = TensorDescriptor.from_tensor(sums, [tile.m, tile.n])
    lo_desc = hi_desc
    if not (x.first and x.last):
        lo_desc = TensorDescriptor.from_tensor(x.lo, [tile.m, tile.n])
    a_box = [tile.k, tile.m] if x.trans_a else [tile.m, tile.k]
    launch(
        None, kernels._sum_tma_kernel, (plan.programs, 1, 1),
        (TensorDescriptor.from_tensor(x.a, a_box),
         TensorDescriptor.from_tensor(x.b, [tile.k, tile.n]), hi_desc, lo_desc, x.scale, m, n, k,
         x.trans_a, x.first, x.last, _TL[x.out.dtype], x.scale is not None, tile.m, tile.n,
         tile.k, tile.group),
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )  # fmt: skip


def launch_pointer(plan: SlicePlan, x: PartialProduct) -> None:
    """Launch one slice of any output, with pointers."""
    tile, a, wide = plan.tile, x.a, x.out.dtype == torch.float32
    (m, n), k = x.out.shape, x.b.shape[0]
    strides = (a.stride(1), a.stride(0)) if x.trans_a else (a.stride(0), a.stride(1))
    launch(
        None, kernels._sum_pointer_kernel, (plan.programs, 1, 1),
        (a, x.b, x.out if wide else x.out.view(torch.int16), x.lo, x.scale, m, n, k, *strides,
         x.b.stride(0), x.first, x.last, wide, _TL[x.out.dtype], x.scale is not None, tile.m,
         tile.n, tile.k, tile.group),
        {"num_warps": tile.warps, "num_stages": min(tile.stages, 3)},
    )  # fmt: skip
