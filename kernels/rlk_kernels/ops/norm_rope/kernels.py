"""The Triton kernel of `norm_rope`: a program norms and rotates some heads of a token.

The mean of squares uses the same tile and as many warps as in `rms_norm/kernels.py`, which
determine the order of its sum. The halves of a head are read again for the rotation.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.overlap import begin_overlapped
from rlk_kernels.ops.rms_norm.kernels import inverse_rms, load_weight, scaled
from rlk_kernels.ops.rope.kernels import TRITON_DTYPES, cos_sin


@triton.jit
def _norm_rotate(
    x_ptr, weight_ptr, y_ptr, token, group, stride_t, H, eps, cos, sin, D: tl.constexpr,
    BD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr, INTERLEAVED: tl.constexpr, HF: tl.constexpr, ONE_PLUS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    heads = group * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BD)[None, :]
    x_at = x_ptr + tl.multiple_of(token * stride_t, WIDE) + heads * D
    y_at = y_ptr + (token * H + heads) * D
    x = tl.load(x_at + cols, mask=(heads < H) & (cols < D), other=0.0)
    r = inverse_rms(x, eps, D)
    i = tl.arange(0, RP)[None, :]
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + R
    mask = (heads < H) & (i < R)
    of_first = load_weight(weight_ptr, first, 2 * R, ONE_PLUS)
    of_second = load_weight(weight_ptr, second, 2 * R, ONE_PLUS)
    a = scaled(tl.load(x_at + first, mask=mask, other=0.0), r, of_first, HF)
    b = scaled(tl.load(x_at + second, mask=mask, other=0.0), r, of_second, HF)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    tl.store(y_at + first, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(y_at + second, (b * cos + a * sin).to(dtype), mask=mask)
    if TAIL > 0:
        rest = 2 * R + tl.arange(0, TAIL)[None, :]
        mask = (heads < H) & (rest < D)
        x = tl.load(x_at + rest, mask=mask, other=0.0)
        weight = load_weight(weight_ptr, rest, D, ONE_PLUS)
        tl.store(y_at + rest, scaled(x, r, weight, HF), mask=mask)


@triton.jit(do_not_specialize=["Q_STEPS"])
def _norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, pos_ptr, freq_ptr,
    scaling_ptr, stride_qt, stride_kt, HQ, HK, Q_STEPS, eps,
    D: tl.constexpr, BD: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr, HF: tl.constexpr,
    ONE_PLUS: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ROWS heads of a token, those of k after those of q."""
    begin_overlapped(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos_sin(pos_ptr, freq_ptr, scaling_ptr, token, R, RP, SCALED, ROUND)
    group = tl.program_id(1)
    if group < Q_STEPS:
        _norm_rotate(
            q_ptr, q_weight_ptr, q_out_ptr, token, group, stride_qt, HQ, eps, cos, sin,
            D, BD, R, RP, TAIL, ROWS, WIDE, INTERLEAVED, HF, ONE_PLUS,
        )  # fmt: skip
    else:
        _norm_rotate(
            k_ptr, k_weight_ptr, k_out_ptr, token, group - Q_STEPS, stride_kt, HK, eps,
            cos, sin, D, BD, R, RP, TAIL, ROWS, WIDE, INTERLEAVED, HF, ONE_PLUS,
        )  # fmt: skip


def _is_aligned(x: Tensor, wide: int) -> bool:
    """Whether loads of x can be as wide as the head size allows. The width of loads determines the
    layout of the tile, and so the order of its sum."""
    of_token, of_head, of_feature = x.stride()
    dense = of_feature == 1 and of_head == x.shape[2]
    return dense and of_token % wide == 0 and x.data_ptr() % 16 == 0


def norm_rotate(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, positions: Tensor, frequency: Tensor,
    scaling: Tensor | None, eps: float, hf: bool, one_plus: bool, round_to: torch.dtype,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Norm and rotate q[T, Hq, D] and k[T, Hk, D]."""
    q_shape, k_shape, dtype, device = q.shape, k.shape, q.dtype, q.device
    q_out, k_out = empty(q_shape, dtype, device), empty(k_shape, dtype, device)
    (t, hq, d), hk = q_shape, k_shape[1]
    if t and hq + hk:
        how = frequency.numel(), eps, hf, one_plus, round_to, interleaved, scaling is not None
        cache = shape_cache(
            "norm_rope", hq, hk, d, q.stride(), k.stride(), q.data_ptr() & 15 == 0,
            k.data_ptr() & 15 == 0, dtype, q_weight.dtype, positions.dtype, device, how,
        )  # fmt: skip
        if cache.plan is None:
            cache.plan = _plan(q, k, *how)
        copies_q, copies_k, programs, constants, options = cache.plan
        if copies_q:
            q = q.clone(memory_format=torch.contiguous_format)
        if copies_k:
            k = k.clone(memory_format=torch.contiguous_format)
        launch(
            cache, _norm_rope_kernel, (t, programs, 1),
            (q, k, q_weight, k_weight, q_out, k_out, positions, frequency,
             frequency if scaling is None else scaling, *constants),
            options,
        )  # fmt: skip
    return q_out, k_out


def _plan(
    q: Tensor, k: Tensor, r: int, eps: float, hf: bool, one_plus: bool, round_to: torch.dtype,
    interleaved: bool, scaled: bool,
) -> tuple[bool, bool, int, tuple, dict]:  # fmt: skip
    """What calls of one shape share: (whether q is copied, whether k is, programs of a token,
    constants, options)."""
    (_, hq, d), hk, overlap = q.shape, k.shape[1], facts(q.device).overlaps
    block, wide = power_of_2(d), math.gcd(d, 16)
    copies = [not _is_aligned(x, wide) for x in (q, k)]
    strides = [
        x.shape[1] * d if copied else x.stride(0) for x, copied in zip((q, k), copies, strict=True)
    ]
    rows = max(1, 1024 // block)
    steps = cdiv(hq, rows), cdiv(hk, rows)
    constants = (
        *strides, hq, hk, steps[0], eps, d, block, r, power_of_2(r),
        power_of_2(d - 2 * r) if d > 2 * r else 0, rows, wide, interleaved, hf, one_plus, scaled,
        TRITON_DTYPES[round_to], overlap,
    )  # fmt: skip
    options = {"num_warps": min(16, max(2, block // 1024)), "launch_pdl": overlap}
    return copies[0], copies[1], sum(steps), constants, options
