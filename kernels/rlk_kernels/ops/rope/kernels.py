"""The Triton kernel of `rope`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts

HEADS_AT_A_TIME = 32
MANY_TOKENS = 2048
"""From here on a program walks all heads of its token, and computes its angles once."""


@triton.jit(do_not_specialize=["STEPS"])
def _rope_kernel(
    x_ptr, y_ptr, pos_ptr, freq_ptr, stride_t, stride_h, sign, H, STEPS,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, ROUND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, RP)
    angle = tl.load(pos_ptr + token).to(tl.float32) * tl.load(freq_ptr + i, mask=i < R, other=0.0)
    cos = tl.cos(angle).to(ROUND).to(tl.float32)[None, :]
    sin = (tl.sin(angle).to(ROUND).to(tl.float32) * sign)[None, :]
    i = i[None, :]
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + R
    for step in range(STEPS):
        heads = (tl.program_id(1) * STEPS + step) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (heads < H) & (i < R)
        x_at = x_ptr + token * stride_t + heads * stride_h
        y_at = y_ptr + (token * H + heads) * D
        a = tl.load(x_at + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_at + second, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_at + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_at + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
        if TAIL > 0:
            rest = 2 * R + tl.arange(0, TAIL)[None, :]
            mask = (heads < H) & (rest < D)
            tl.store(y_at + rest, tl.load(x_at + rest, mask=mask), mask=mask)


def rotate(
    x: Tensor, positions: Tensor, frequency: Tensor, sign: float, round_to: torch.dtype,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """x[T, H, D], whose last dimension is dense, rotated by sign times its angles."""
    t, h, d = x.shape
    y = torch.empty(t, h, d, dtype=x.dtype, device=x.device)
    r = frequency.numel()
    tail = triton.next_power_of_2(d - 2 * r) if d > 2 * r else 0
    dtypes = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if t and h:
        heads = min(HEADS_AT_A_TIME, triton.next_power_of_2(h)) if t >= MANY_TOKENS else 8
        overlap = facts(x.device).overlaps
        groups = triton.cdiv(h, heads)
        steps = groups if t >= MANY_TOKENS else 1
        _rope_kernel[(t, groups // steps)](
            x, y, positions, frequency, x.stride(0), x.stride(1), sign, h, steps, d, r,
            triton.next_power_of_2(r), tail, heads, interleaved, dtypes[round_to], overlap,
            num_warps=2, launch_pdl=overlap,
        )  # fmt: skip
    return y
