"""The gated delta rule on the triton backend: launches of `kernels` and `backward_kernels`."""

import torch
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.delta_rule.backward_kernels import backward_kernel, norm_backward_kernel
from rlk_kernels.ops.delta_rule.chunk import CHUNK
from rlk_kernels.ops.delta_rule.kernels import forward_kernel, keep_kernel, norm_kernel

FEATURES = 16
"""The most features of v of one program of the forward. No bit depends on it."""

BACKWARD_FEATURES = 32
"""The most features of v of one program of the gradient, which adds the blocks in their order."""

BACKWARD_WARPS = 4
"""With 8 warps, Triton 3.6's code accesses memory outside of the tensors on an H200."""


def _levels(n: int) -> int:
    return n.bit_length() - 1


def _padded(size: int) -> int:
    """A power of two that a product of tiles takes."""
    return max(16, power_of_2(size))


def _normed(x: Tensor, eps: float, scale: float) -> Tensor:
    (t, heads, d), width = x.shape, _padded(x.shape[2])
    y = empty(x.shape, x.dtype, x.device)
    if t:
        launch(
            shape_cache("delta_rule_norm", d, x.dtype), norm_kernel, (t * heads, 1, 1),
            (x, y, scale, eps, d, width, _levels(width)), {"num_warps": 1},
        )  # fmt: skip
    return y


def _run(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor,
    cache: tuple[Tensor, ...] | None, slots: Tensor, context: Tensor,
    record: tuple[Tensor, ...] | None,
) -> Tensor:  # fmt: skip
    """out of normed q and k."""
    (hk, d), (hv, e) = q.shape[1:], v.shape[1:]
    out = empty(v.shape, v.dtype, v.device)
    sequences = cu.numel() - 1
    if not len(v) or not sequences:
        return out
    width, features = _padded(d), min(FEATURES, _padded(e))
    tensors = cache or (g, k, v, g)
    strides = tuple(x.stride(0) for x in tensors)
    recorded = record or (g, v, g)
    wide = q.dtype == torch.float32
    launch(
        shape_cache(
            "delta_rule", hk, hv, d, e, q.dtype, strides, cache is not None, record is not None
        ),
        forward_kernel, (sequences, hv, cdiv(e, features)),
        (q, k, v, g, beta, out, *tensors, *strides, slots, context, cu, len(tensors[0]), *recorded,
         hk, hv, d, e, width, features, CHUNK, _levels(width), _levels(CHUNK), cache is not None,
         record is not None, "ieee" if wide else "tf32"),
        # With fused additions, a cached fp32 row had other bits than in its whole sequence: of
        # a * b + c * d, the compiler fuses either product. Products of halves are exact in fp32.
        {"num_warps": 8, "enable_fp_fusion": not wide},
    )  # fmt: skip
    if cache is not None:
        _, keys, _, decays = cache
        launch(
            shape_cache("delta_rule_keep", hk, hv, d, q.dtype, keys.stride(0), decays.stride(0)),
            keep_kernel, (sequences, hv, 1),
            (k, g, keys, decays, keys.stride(0), decays.stride(0), slots, context, cu, len(keys),
             hk, hv, d, width, CHUNK),
            {"num_warps": 1},
        )  # fmt: skip
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float
) -> Tensor:
    """out[T, Hv, E] of whole sequences."""
    return _run(_normed(q, eps, scale), _normed(k, eps, 1.0), v, g, beta, cu, None, cu, cu, None)


def cached(
    cache: tuple[Tensor, Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor, slots: Tensor, context: Tensor, cu: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """out[T, Hv, E] of rows that continue sequences; the cache is written."""
    q, k = _normed(q, eps, scale), _normed(k, eps, 1.0)
    return _run(q, k, v, g, beta, cu, cache, slots, context, None)


def _through_norm(x: Tensor, d: Tensor, eps: float, scale: float) -> Tensor:
    """dx[T, Hk, D] of the blocks' gradients d[blocks, T, Hv, D] of the normed x."""
    (t, heads, size), blocks, group = x.shape, len(d), d.shape[2] // x.shape[1]
    width, dx = _padded(size), empty(x.shape, x.dtype, x.device)
    launch(
        shape_cache("delta_rule_norm_backward", size, blocks, group, x.dtype),
        norm_backward_kernel, (t * heads, 1, 1),
        (x, d, dx, scale, eps, t * heads, blocks, group, size, width, _levels(width)),
        {"num_warps": 1},
    )  # fmt: skip
    return dx


def _added(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of blocks, one after another: no bit depends on the number of rows."""
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total.to(dtype)


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta); rows outside every sequence have zeros."""
    (t, hk, d), (hv, e), sequences = q.shape, v.shape[1:], cu.numel() - 1
    if not t or not sequences:
        return tuple(torch.zeros_like(x) for x in (q, k, v, g, beta))
    features = min(BACKWARD_FEATURES, _padded(e))
    blocks, dv = cdiv(e, features), torch.zeros_like(v)
    normed = _normed(q, eps, scale), _normed(k, eps, 1.0)
    starts = empty((t // CHUNK + sequences, hv, d, e), torch.float32, v.device)
    u, sums = empty(v.shape, v.dtype, v.device), empty(g.shape, torch.float32, v.device)
    _run(*normed, v, g, beta, cu, None, cu, cu, (starts, u, sums))
    # Zeros: rows outside every sequence are not written.
    of_heads = [torch.zeros(blocks, t, hv, d, device=v.device) for _ in range(2)]
    of_rows = [torch.zeros(blocks, t, hv, device=v.device) for _ in range(2)]
    launch(
        shape_cache("delta_rule_backward", hk, hv, d, e, q.dtype), backward_kernel,
        (sequences, hv, blocks),
        (*normed, v, beta, do, starts, u, sums, cu, *of_heads, dv, *of_rows, t, hk, hv, d, e,
         _padded(d), features, CHUNK),
        {"num_warps": BACKWARD_WARPS},
    )  # fmt: skip
    dq = _through_norm(q, of_heads[0], eps, scale)
    dk = _through_norm(k, of_heads[1], eps, 1.0)
    dg, dbeta = _added(of_rows[0], g.dtype), _added(of_rows[1], beta.dtype)
    return dq, dk, dv, dg, dbeta
