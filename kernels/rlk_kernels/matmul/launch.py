"""The launch of a product as its plan says: one function for each kernel, without decisions."""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels import launching
from rlk_kernels.device import lazy_module
from rlk_kernels.launching import ShapeCache, tensor_map
from rlk_kernels.matmul import kernels
from rlk_kernels.matmul.plan import MatmulPlan

hopper_epilogue = lazy_module("rlk_kernels.matmul.hopper.epilogue")
_hopper_product = lazy_module("rlk_kernels.matmul.hopper.product")


def launch(
    plan: MatmulPlan, cache: ShapeCache, a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool,
    trans_b: bool, out: Tensor, add: bool = False,
) -> None:  # fmt: skip
    """Fill out[M, N] with A @ B (+ bias), or with `add` add the product to it.

    cache: the cache of calls of these shapes. Only the kernels "tma" and "pointer" without
    `tma_store` can add.
    """
    if plan.kernel == "hopper_split":
        hopper_epilogue().split_product(plan, a, b, bias, out)
    elif plan.kernel == "hopper":
        _hopper_product().specialized_product(plan, cache, a, b, bias, out)
    elif plan.kernel == "tma":
        _launch_tma(plan, cache, a, b, bias, trans_a, trans_b, out, add)
    else:
        _launch_pointer(plan, cache, a, b, bias, trans_a, trans_b, out, add)


def _map(x: Tensor, *box: int) -> TensorDescriptor:
    return tensor_map(TensorDescriptor, x.data_ptr(), x.dtype, x.shape, x.stride(), box)


def _launch_tma(
    plan: MatmulPlan, cache: ShapeCache, a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool,
    trans_b: bool, out: Tensor, add: bool,
) -> None:  # fmt: skip
    (m, n), tile = out.shape, plan.tile
    k = a.shape[0] if trans_a else a.shape[1]
    a_desc = _map(a, tile.k, tile.m) if trans_a else _map(a, tile.m, tile.k)
    b_desc = _map(b, tile.n, tile.k) if trans_b else _map(b, tile.k, tile.n)
    b2_desc, c_desc, c2_desc = b, out, out  # tensors where the kernel uses no map
    if tile.tail:
        b2_desc = _map(b, tile.tail, tile.k) if trans_b else _map(b, tile.k, tile.tail)
    if plan.tma_store:
        c_desc = _map(out, tile.m, tile.n // 2 if tile.subtile else tile.n)
        if tile.tail:
            c2_desc = _map(out, tile.m, tile.tail)
    launching.launch(
        cache, kernels._gemm_tma_kernel, (plan.programs, 1, 1),
        (a_desc, b_desc, b2_desc, c_desc, c2_desc, out, bias, m, n, k, plan.last_segment,
         plan.wide, out.stride(0), trans_a, trans_b, bias is not None, plan.tma_store, tile.m,
         tile.n, tile.k, tile.group, tile.subtile, tile.flatten, tile.swap, plan.overlap,
         tile.tail, plan.segment, add),
        {"num_warps": tile.warps, "num_stages": plan.stages, "launch_pdl": plan.overlap > 0},
    )  # fmt: skip


def _launch_pointer(
    plan: MatmulPlan, cache: ShapeCache, a: Tensor, b: Tensor, bias: Tensor | None, trans_a: bool,
    trans_b: bool, out: Tensor, add: bool,
) -> None:  # fmt: skip
    (m, n), tile = out.shape, plan.tile
    k = a.shape[0] if trans_a else a.shape[1]
    a_m, a_k = (a.stride(1), a.stride(0)) if trans_a else (a.stride(0), a.stride(1))
    b_k, b_n = (b.stride(1), b.stride(0)) if trans_b else (b.stride(0), b.stride(1))
    launching.launch(
        cache, kernels._gemm_pointer_kernel, (plan.programs, 1, 1),
        (a, b, out, bias, m, n, k, plan.last_segment, a_m, a_k, b_k, b_n, out.stride(0),
         bias is not None, tile.m, tile.n, tile.k, tile.group, "ieee", plan.segment, add),
        {"num_warps": tile.warps, "num_stages": plan.stages},
    )  # fmt: skip
