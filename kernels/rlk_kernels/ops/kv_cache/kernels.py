"""The Triton kernel of `write_kv_cache`: a program copies BLOCK features of a token."""

import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.ops.overlap import begin_overlapped

BLOCK = 1024


@triton.jit
def _copy(
    x_ptr, cache_ptr, token, slot, feature, stride_t, stride_h, stride_p, stride_s, stride_ch,
    HD, P, D: tl.constexpr,
):  # fmt: skip
    head = (feature // D).to(tl.int64)
    x = tl.load(x_ptr + token * stride_t + head * stride_h + feature % D, mask=feature < HD)
    at = slot // P * stride_p + slot % P * stride_s + head * stride_ch + feature % D
    tl.store(cache_ptr + at, x, mask=feature < HD)


@triton.jit
def _write_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_t, k_h, v_t, v_h, kc_p, kc_s, kc_h, vc_p,
    vc_s, vc_h, HD, P, SLOTS, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin_overlapped(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < SLOTS):
        feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        _copy(k_ptr, k_cache_ptr, token, slot, feature, k_t, k_h, kc_p, kc_s, kc_h, HD, P, D)
        _copy(v_ptr, v_cache_ptr, token, slot, feature, v_t, v_h, vc_p, vc_s, vc_h, HD, P, D)


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write k and v[T, Hk, D], whose last dimensions are dense, to slots[T]."""
    t, heads, dim = k.shape
    if t == 0 or heads * dim == 0:
        return
    cache = shape_cache(
        "kv_cache", heads, dim, k_cache.shape, k.stride(), v.stride(), k_cache.stride(),
        v_cache.stride(), k.dtype, slots.dtype, k.device,
    )  # fmt: skip
    if cache.plan is None:
        cache.plan = _plan(k_cache, v_cache, k, v)
    columns, constants, options = cache.plan
    launch(
        cache, _write_kernel, (t, columns, 1), (k, v, k_cache, v_cache, slots, *constants), options
    )


def _plan(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor) -> tuple[int, tuple, dict]:
    """What calls of one shape share: (programs of a token, constants, options)."""
    (_, heads, dim), (blocks, page) = k.shape, k_cache.shape[:2]
    features, overlap = heads * dim, facts(k.device).overlaps
    block = min(BLOCK, power_of_2(features))
    constants = (
        *k.stride()[:2], *v.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3], features,
        page, blocks * page, dim, block, overlap,
    )  # fmt: skip
    return cdiv(features, block), constants, {"num_warps": 4, "launch_pdl": overlap}
