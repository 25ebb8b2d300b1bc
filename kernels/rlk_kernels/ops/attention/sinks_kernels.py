"""The Triton kernels of `sinks`: a program has ROWS heads of a query."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache

ROWS = 8


@triton.jit
def _more(lse, sink):
    """log( exp(lse) + exp(sink) )."""
    top = tl.maximum(lse, sink)
    return top + tl.log(1.0 + _share(tl.minimum(lse, sink), top))


@triton.jit
def _share(part, whole):
    """exp(part - whole); 0 for a part of -inf, even if the whole is -inf too."""
    return tl.where(part == float("-inf"), 0.0, tl.exp(part - whole))


@triton.jit(do_not_specialize=["T"])
def _add_sinks_kernel(
    out_ptr, lse_ptr, sinks_ptr, T, H, D: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BD)[None, :]
    lse_at = lse_ptr + heads.to(tl.int64) * T + token
    lse = tl.load(lse_at, mask=heads < H, other=0.0)
    more = _more(lse, tl.load(sinks_ptr + heads, mask=heads < H, other=0.0).to(tl.float32))
    at = (token * H + heads)[:, None] * D + dims
    mask = (heads[:, None] < H) & (dims < D)
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # Several warps read the same numbers: each must have them before any is replaced.
    tl.debug_barrier()
    tl.store(lse_at, more, mask=heads < H)
    out = out * _share(lse, more)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _sink_parts_kernel(
    out_ptr, lse_ptr, sinks_ptr, do_ptr, parts_ptr, T, H, D: tl.constexpr, BD: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BD)[None, :]
    lse = tl.load(lse_ptr + heads.to(tl.int64) * T + token, mask=heads < H, other=0.0)
    sink = tl.load(sinks_ptr + heads, mask=heads < H, other=0.0)
    at = (token * H + heads)[:, None] * D + dims
    mask = (heads[:, None] < H) & (dims < D)
    out = tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + at, mask=mask, other=0.0).to(tl.float32)
    # a row outside every sequence has no gradient, and uninitialised out and lse, perhaps NaN
    products = out * do
    total = tl.sum(tl.where((do == 0.0) & (products != products), 0.0, products), 1)
    parts = -_share(sink, lse) * total
    parts = tl.where((total == 0.0) & (parts != parts), 0.0, parts)
    tl.store(parts_ptr + token * H + heads, parts, mask=heads < H)


def _grid(out: Tensor) -> tuple[int, int, int]:
    return out.shape[0], cdiv(out.shape[1], ROWS), 1


def add(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`sinks.add` for a dense out, in place."""
    t, h, d = out.shape
    if t:
        launch(
            shape_cache("sinks", h, d, out.dtype, sinks.dtype), _add_sinks_kernel, _grid(out),
            (out, lse, sinks, t, h, d, power_of_2(d), ROWS), {"num_warps": 4},
        )  # fmt: skip
    return out, lse


def gradient_parts(out: Tensor, lse: Tensor, sinks: Tensor, do: Tensor) -> Tensor:
    """[T, H], whose sums over T are dsink."""
    t, h, d = out.shape
    parts = torch.empty(t, h, dtype=torch.float32, device=out.device)
    if t:
        _sink_parts_kernel[_grid(out)](
            out, lse, sinks, do, parts, t, h, d, power_of_2(d), ROWS, num_warps=4
        )
    return parts
