"""The gated delta rule on the triton backend: launches of its kernels.

N = chunks of all sequences   Hk, Hv = heads   C = CHUNK   D = features of q and k   E = features of
v
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache
from rlk_kernels.memory import empty
from rlk_kernels.ops.delta_rule import backward_kernels, kernels
from rlk_kernels.ops.delta_rule.chunk import CHUNK
from rlk_kernels.ops.delta_rule.decode_kernels import decode_kernel

FEATURES = {"states": 64, "out": 64, "decode": 32}
"""The most features of v of a program of each kernel. No bit depends on them."""
WIDE_FEATURES = 16
"""Those of every kernel for fp32 rows, whose products are not on tensor cores."""
DECODE_PROGRAMS = 4
"""The programs of decode that a processor has at least, where there is work for as many."""
DECODE_REGISTERS = 128
"""The registers of a thread of decode, so that a processor runs several programs."""
WARPS = {"prepare": 4, "below": 4, "states": 4, "out": 4, "decode": 4}
"""The warps of a program of each kernel. No bit depends on them."""
PARTS = {torch.bfloat16: 3, torch.float16: 2, torch.float32: 1}
"""The numbers of a dtype that a factor of u from another block of rows is split into, for products
on tensor cores. Three of bf16 have all digits of fp32; two of fp16 miss 2**-25 of the largest."""

BACKWARD_FEATURES = {"carry": 32, "rows": 64}
"""The most features of a program of the gradient's kernels: `carry` has that many of v; the others
go through all features, that many at a time."""
WIDE_BACKWARD_FEATURES = {"carry": 16, "rows": 32}
"""Those for fp32 rows."""
BACKWARD_OPTIONS = {
    "inverse": {"num_warps": 1},
    "solved": {"num_warps": 4, "num_stages": 2},
    "carry": {"num_warps": 4, "num_stages": 2},
    "pairs": {"num_warps": 4, "num_stages": 2},
    "rows": {"num_warps": 4, "num_stages": 2},
    "norm": {"num_warps": 4},
}
"""Kernel of the gradient -> its warps, and how many turns of its loops are in memory at a time. Two
programs of `carry` fit on a processor, so that S and dS are carried at the same time. With 8 warps,
Triton 3.6's code of another kernel accessed memory outside of the tensors on an H200."""
NORM_ROWS = 16
"""The rows of a program of the norms' gradient."""


class Continued(NamedTuple):
    """What a call continues."""

    cache: tuple[Tensor, Tensor, Tensor, Tensor]
    slots: Tensor
    context: Tensor


class Chunks(NamedTuple):
    """What the kernels leave by chunk."""

    queries: Tensor
    """[N, Hk, C, D], normed; rows that a chunk does not have are zeros, here and in `keys`."""
    keys: Tensor
    """[N, Hk, C, D], normed."""
    sums: Tensor
    """[N, Hv, C]: G; from a sequence's last row on, G of that row."""
    below: Tensor
    """[N, Hv, C, C]: beta_i exp(G_i - G_j) k_i k_j at [j, i], for j < i."""
    starts: Tensor
    """[N, Hv, E, D]: the states at the beginnings of chunks, rounded and transposed."""
    u: Tensor
    """[N, Hv, C, E]."""


def _levels(n: int) -> int:
    return n.bit_length() - 1


def _padded(size: int) -> int:
    """A power of two that a product of tiles takes."""
    return max(16, power_of_2(size))


def _features(name: str, e: int, dtype: torch.dtype) -> int:
    """The features of v of a program, of e features."""
    most = WIDE_FEATURES if dtype == torch.float32 else FEATURES[name]
    return min(most, _padded(e))


def _options(name: str) -> dict:
    """Without fusions but those that kernels name: of a * b + c * d, a compiler fuses either
    product, and one row would have other bits in another kernel."""
    return {"num_warps": WARPS[name], "num_stages": 1, "enable_fp_fusion": False}


def _share(pieces: int, groups: int, device: torch.device) -> int:
    """The pieces of work of a program of decode, of `pieces` of each of `groups`."""
    fewest = DECODE_PROGRAMS * facts(device).processors
    fits = (n for n in range(1, pieces + 1) if pieces % n == 0 and groups * pieces // n >= fewest)
    return max(fits, default=1)


def _factors(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    continued: Continued | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """queries, keys, sums and below of `Chunks`."""
    (hk, d), hv, sequences, cached = q.shape[1:], g.shape[1], cu.numel() - 1, continued is not None
    width, spare = _padded(d), 2 if cached else 1
    n, dtype, device = len(q) // CHUNK + spare * sequences, q.dtype, q.device
    state, kept, updates, decays = continued.cache if continued else (g, k, g, g)
    slots, context = (continued.slots, continued.context) if continued else (cu, cu)
    strides = tuple(x.stride(0) for x in (state, kept, updates, decays))
    own = shape_cache("delta_rule_factors", hk, hv, d, dtype, cached, strides)
    queries, keys = (empty((n, hk, CHUNK, d), dtype, device) for _ in range(2))
    sums = empty((n, hv, CHUNK), torch.float32, device)
    below = empty((n, hv, CHUNK, CHUNK), torch.float32, device)
    launch(
        own, kernels.prepare_kernel, (n, hk, 1),
        (q, k, queries, keys, kept, strides[1], slots, context, cu, len(state), sequences, scale,
         eps, hk, d, width, CHUNK, _levels(width), spare, cached),
        _options("prepare"),
    )  # fmt: skip
    launch(
        own, kernels.below_kernel, (n, hv, 1),
        (keys, g, beta, below, sums, decays, strides[3], slots, context, cu, len(state), sequences,
         hk, hv, d, width, CHUNK, spare, cached),
        _options("below"),
    )  # fmt: skip
    return queries, keys, sums, below


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    continued: Continued | None,
) -> Chunks:  # fmt: skip
    """u and the states of all chunks; of `continued`, the state and u are written."""
    queries, keys, sums, below = _factors(q, k, g, beta, cu, scale, eps, continued)
    (hk, d), (hv, e), sequences = q.shape[1:], v.shape[1:], cu.numel() - 1
    cached, width, features = continued is not None, _padded(d), _features("states", e, q.dtype)
    n, spare, dtype, device = len(keys), 2 if cached else 1, q.dtype, q.device
    state, kept, updates, decays = continued.cache if continued else (g, k, v, g)
    slots, context = (continued.slots, continued.context) if continued else (cu, cu)
    strides = tuple(x.stride(0) for x in (state, kept, updates, decays))
    own = shape_cache("delta_rule", hk, hv, d, e, dtype, cached, strides, features)
    starts, u = empty((n, hv, e, d), dtype, device), empty((n, hv, CHUNK, e), dtype, device)
    launch(
        own, kernels.states_kernel, (sequences * hv * cdiv(e, features), 1, 1),
        (keys, v, beta, below, sums, starts, u, state, updates, strides[0], strides[2], slots,
         context, cu, len(state), hk, hv, d, e, width, features, CHUNK, spare, PARTS[dtype],
         cached),
        _options("states"),
    )  # fmt: skip
    return Chunks(queries, keys, sums, below, starts, u)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    continued: Continued | None,
) -> Tensor:  # fmt: skip
    (hk, d), (hv, e), sequences = q.shape[1:], v.shape[1:], cu.numel() - 1
    out = empty(v.shape, v.dtype, v.device)
    if not len(v) or not sequences:
        return out
    chunks = _chunks(q, k, v, g, beta, cu, scale, eps, continued)
    state, kept, _, decays = continued.cache if continued else (g, k, v, g)
    slots, context = (continued.slots, continued.context) if continued else (cu, cu)
    cached, features = continued is not None, _features("out", e, q.dtype)
    strides = kept.stride(0), decays.stride(0)
    launch(
        shape_cache("delta_rule_out", hk, hv, d, e, q.dtype, cached, strides, features),
        kernels.out_kernel, (len(chunks.u), hv, cdiv(e, features)),
        (chunks.queries, chunks.keys, chunks.sums, chunks.starts, chunks.u, out, kept, decays,
         *strides, slots, context, cu, len(state), sequences, hk, hv, d, e, _padded(d), features,
         CHUNK, 2 if cached else 1, cached),
        _options("out"),
    )  # fmt: skip
    return out


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float
) -> Tensor:
    """out[T, Hv, E] of whole sequences."""
    return _forward(q, k, v, g, beta, cu, scale, eps, None)


def cached(
    cache: tuple[Tensor, Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor, slots: Tensor, context: Tensor, cu: Tensor, scale: float, eps: float,
) -> Tensor:  # fmt: skip
    """out[T, Hv, E] of rows that continue sequences; the cache is written."""
    (t, hk, d), (hv, e), sequences = q.shape, v.shape[1:], cu.numel() - 1
    if not t or t > sequences:
        return _forward(q, k, v, g, beta, cu, scale, eps, Continued(cache, slots, context))
    out, width, features = (
        empty(v.shape, v.dtype, v.device),
        _padded(d),
        _features("decode", e, v.dtype),
    )
    strides = tuple(x.stride(0) for x in cache)
    pieces = cdiv(e, features) * hv // hk
    share = _share(pieces, sequences * hk, q.device)
    launch(
        shape_cache("delta_rule_decode", hk, hv, d, e, q.dtype, strides, features, share),
        decode_kernel,
        (sequences * hk * pieces // share, 1, 1),
        (q, k, v, g, beta, out, *cache, *strides, slots, context, cu, len(cache[0]), scale, eps,
         hk, hv, d, e, width, features, CHUNK, _levels(width), PARTS[q.dtype], share),
        {**_options("decode"), "maxnreg": DECODE_REGISTERS},
    )  # fmt: skip
    return out


def _through_norm(x: Tensor, d: Tensor, cu: Tensor, eps: float, scale: float) -> Tensor:
    """dx[T, Hk, D] of the gradients d[T, Hv, D] of the normed x."""
    (t, heads, size), group = x.shape, d.shape[1] // x.shape[1]
    dx = empty(x.shape, x.dtype, x.device)
    launch(
        shape_cache("delta_rule_norm_backward", heads, size, group, x.dtype),
        backward_kernels.norm_backward_kernel, (cdiv(t * heads, NORM_ROWS), 1, 1),
        (x, d, dx, cu, scale, eps, t * heads, cu.numel() - 1, heads, group, size, NORM_ROWS),
        BACKWARD_OPTIONS["norm"],
    )  # fmt: skip
    return dx


def backward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu: Tensor, scale: float, eps: float,
    do: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta); rows outside every sequence have zeros."""
    (t, hk, d), (hv, e), sequences = q.shape, v.shape[1:], cu.numel() - 1
    # Zeros: rows outside every sequence are not written.
    dv, dg, dbeta = (torch.zeros_like(x) for x in (v, g, beta))
    if not t or not sequences:
        return torch.zeros_like(q), torch.zeros_like(k), dv, dg, dbeta
    if d != _padded(d):
        # Zeros change no gradient. Kernels that masked these features instead gave wrong gradients
        # of 16-bit rows on an H200, with Triton 3.6.
        q, k = (F.pad(x, (0, _padded(d) - d)) for x in (q, k))
        grads = backward(q, k, v, g, beta, cu, scale, eps, do)
        return *(x[..., :d].contiguous() for x in grads[:2]), *grads[2:]
    queries, keys, sums, below = _factors(q, k, g, beta, cu, scale, eps, None)
    n, dtype, device, ep = len(keys), q.dtype, q.device, _padded(e)
    most = WIDE_BACKWARD_FEATURES if dtype == torch.float32 else BACKWARD_FEATURES
    fewer = {name: min(features, ep) for name, features in most.items()}
    some = min(most["rows"], d), fewer["rows"]
    inverse, dqk, dkk = (empty((n, hv, CHUNK, CHUNK), dtype, device) for _ in range(3))
    readers, solved = (empty((n, hv, CHUNK, d), dtype, device) for _ in range(2))
    updates, grads = (empty((n, hv, CHUNK, ep), dtype, device) for _ in range(2))
    starts, ends = (empty((n, hv, d, ep), dtype, device) for _ in range(2))
    inside = empty((n, hv, 2, CHUNK), torch.float32, device)
    dq, dk = (empty((t, hv, d), dtype, device) for _ in range(2))
    own = shape_cache("delta_rule_backward", hk, hv, d, e, dtype, *fewer.values())

    def run(name: str, grid: tuple[int, int, int], *arguments: Tensor | int) -> None:
        kernel = getattr(backward_kernels, f"{name}_kernel")
        launch(own, kernel, grid, arguments, BACKWARD_OPTIONS[name])

    run("inverse", (n, hv, 1), below, inverse, cu, sequences, hv, CHUNK)
    run(
        "solved", (n, hv, 1), queries, keys, v, beta, do, inverse, sums, readers, solved, updates,
        grads, cu, sequences, hk, hv, d, e, ep, *some, CHUNK,
    )  # fmt: skip
    run(
        "carry", (sequences, hv, 2 * ep // fewer["carry"]), queries, keys, beta, do, sums, readers,
        solved, updates, grads, starts, ends, cu, hk, hv, d, e, ep, fewer["carry"], CHUNK,
    )  # fmt: skip
    run(
        "pairs", (n, hv, 1), queries, keys, v, beta, do, sums, updates, grads, dqk, dkk, dv, inside,
        cu, sequences, hk, hv, d, e, ep, *some, CHUNK,
    )  # fmt: skip
    run(
        "rows", (n, hv, 1), queries, keys, beta, do, sums, updates, grads, starts, ends, dqk, dkk,
        inside, dq, dk, dg, dbeta, cu, sequences, hk, hv, d, e, ep, *some, CHUNK,
    )  # fmt: skip
    dq, dk = _through_norm(q, dq, cu, eps, scale), _through_norm(k, dk, cu, eps, 1.0)
    return dq, dk, dv, dg, dbeta
