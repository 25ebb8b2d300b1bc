"""The Triton kernel of `rope`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.overlap import begin_overlapped

HEADS_AT_A_TIME = 32
MANY_TOKENS = 2048
"""The number of tokens from which a program rotates all heads of its token and computes the angles
once."""


@triton.jit
def cos_sin(
    pos_ptr, freq_ptr, scaling_ptr, token, R: tl.constexpr, RP: tl.constexpr, SCALED: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """cos and sin[1, RP] of a token's angles, rounded, in fp32."""
    i = tl.arange(0, RP)
    angle = tl.load(pos_ptr + token).to(tl.float32) * tl.load(freq_ptr + i, mask=i < R, other=0.0)
    cos = tl.cos(angle)
    sin = tl.sin(angle)
    if SCALED:
        scaling = tl.load(scaling_ptr)
        cos = cos * scaling
        sin = sin * scaling
    return cos.to(ROUND).to(tl.float32)[None, :], sin.to(ROUND).to(tl.float32)[None, :]


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, token, stride_t, stride_h, H, group, steps, cos, sin, i,
    D: tl.constexpr, R: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate `steps` groups of HEADS heads of a token, from `group` on."""
    first = 2 * i if INTERLEAVED else i
    second = 2 * i + 1 if INTERLEAVED else i + R
    for step in range(steps):
        heads = (group + step) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (heads < H) & (i < R)
        x_at = x_ptr + token * stride_t + heads.to(tl.int64) * stride_h
        y_at = y_ptr + (token * H + heads) * D
        a = tl.load(x_at + first, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_at + second, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_at + first, (a * cos - b * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_at + second, (b * cos + a * sin).to(y_ptr.dtype.element_ty), mask=mask)
        if TAIL > 0:
            rest = 2 * R + tl.arange(0, TAIL)[None, :]
            mask = (heads < H) & (rest < D)
            tl.store(y_at + rest, tl.load(x_at + rest, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["Q_STEPS", "K_STEPS"])
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, pos_ptr, freq_ptr, scaling_ptr, stride_qt, stride_qh,
    stride_kt, stride_kh, sign, HQ, HK, Q_STEPS, K_STEPS, WHOLE: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, TAIL: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr, SCALED: tl.constexpr, ROUND: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """WHOLE: a program for each token. Otherwise one for HEADS heads, first those of q."""
    begin_overlapped(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    cos, sin = cos_sin(pos_ptr, freq_ptr, scaling_ptr, token, R, RP, SCALED, ROUND)
    sin = sin * sign
    i = tl.arange(0, RP)[None, :]
    group = tl.program_id(1)
    if WHOLE or group < Q_STEPS:
        _rotate_heads(
            q_ptr, q_out_ptr, token, stride_qt, stride_qh, HQ, group, Q_STEPS if WHOLE else 1, cos,
            sin, i, D, R, TAIL, HEADS, INTERLEAVED,
        )  # fmt: skip
    if WHOLE or group >= Q_STEPS:
        _rotate_heads(
            k_ptr, k_out_ptr, token, stride_kt, stride_kh, HK, group if WHOLE else group - Q_STEPS,
            K_STEPS if WHOLE else 1, cos, sin, i, D, R, TAIL, HEADS, INTERLEAVED,
        )  # fmt: skip


TRITON_DTYPES = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16
}  # fmt: skip


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, frequency: Tensor, scaling: Tensor | None, sign: float,
    round_to: torch.dtype, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate q[T, Hq, D] and k[T, Hk, D], whose last dimensions are dense, by sign * angle."""
    q_shape, k_shape, dtype, device = q.shape, k.shape, q.dtype, q.device
    q_out, k_out = empty(q_shape, dtype, device), empty(k_shape, k.dtype, device)
    (t, hq, d), hk = q_shape, k_shape[1]
    if t and hq + hk:
        how = frequency.numel(), t >= MANY_TOKENS, sign, round_to, interleaved, scaling is not None
        cache = shape_cache(
            "rope", hq, hk, d, q.stride(), k.stride(), dtype, k.dtype, positions.dtype, device, how
        )
        if cache.plan is None:
            cache.plan = _plan(q, k, *how)
        programs, constants, options = cache.plan
        launch(
            cache, _rope_kernel, (t, programs, 1),
            (q, k, q_out, k_out, positions, frequency, frequency if scaling is None else scaling,
             *constants),
            options,
        )  # fmt: skip
    return q_out, k_out


def _plan(
    q: Tensor, k: Tensor, r: int, whole: bool, sign: float, round_to: torch.dtype,
    interleaved: bool, scaled: bool,
) -> tuple[int, tuple, dict]:  # fmt: skip
    """What calls of one shape share: (programs of a token, constants, options)."""
    (_, hq, d), hk, overlap = q.shape, k.shape[1], facts(q.device).overlaps
    heads = min(HEADS_AT_A_TIME, power_of_2(max(hq, hk))) if whole else 8
    steps = cdiv(hq, heads), cdiv(hk, heads)
    constants = (
        *q.stride()[:2], *k.stride()[:2], sign, hq, hk, *steps, whole, d, r, power_of_2(r),
        power_of_2(d - 2 * r) if d > 2 * r else 0, heads, interleaved, scaled,
        TRITON_DTYPES[round_to], overlap,
    )  # fmt: skip
    options = {"num_warps": 2, "launch_pdl": overlap}
    return 1 if whole else sum(steps), constants, options
