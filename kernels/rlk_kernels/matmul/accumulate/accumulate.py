"""A product whose contracted dimension comes in slices, with the bits of the whole product.

    C[m, n] = round( sum_k A[m, k] B[k, n] )          slices of K, one call each, front to back

Order: that of `matmul/kernels.py`, one fp32 accumulator per element, with K from front to back. A
call starts from the partial accumulator that the call before it left, so neither the cut of K (a
multiple of 64) nor the tile changes a bit. Between calls the accumulator of a 16-bit output is
stored in two halves: hi, the upper 16 bits of each fp32 number, in the output itself, and lo, the
lower 16 bits. That takes two extra bytes an element, not four, and the last call rounds in place.
(On Hopper the same bytes contain fp32 numbers in the order of the registers:
`hopper/accumulate.py`.) An fp32 output is its own accumulator.

A[M, K]: `a`, or `a` transposed (trans_a)   B[K, N]: `b`
"""

from rlk_kernels.device import facts
from rlk_kernels.matmul.accumulate import plan
from rlk_kernels.matmul.accumulate.launch import launch_pointer, launch_tma
from rlk_kernels.matmul.accumulate.plan import PartialProduct
from rlk_kernels.matmul.plan import recorded_implementation
from rlk_kernels.matmul.product import product
from rlk_kernels.matmul.self_check import trusted


def accumulate(*partials: PartialProduct) -> str:
    """Add one slice, or one slice of each of two products, which may share a launch; returns the
    implementation that ran."""
    partials = tuple(x for x in partials if x.out.numel())
    if not partials:
        return "triton"
    device, dtype = partials[0].out.device, partials[0].a.dtype
    here = facts(device)
    slices = tuple(plan.slice_of(x, here) for x in partials)
    planned = plan.plan_accumulate(slices, here, trusted(device, dtype))
    ran = ["triton"]
    if planned.shared:
        from rlk_kernels.matmul.hopper.accumulate import sum_hopper

        sum_hopper(planned, partials)
        ran.append("triton/hopper")
    for x, slice_plan in zip(partials, planned.slices, strict=True):
        if slice_plan.kernel == "product":
            ran.append(product(x.a, x.b, None, x.trans_a, False, x.out))
        elif slice_plan.kernel == "tma":
            launch_tma(slice_plan, x)
        elif slice_plan.kernel == "pointer":
            launch_pointer(slice_plan, x)
    return recorded_implementation(ran)
