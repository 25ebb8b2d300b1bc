"""The inputs of a product as an engine rounds them to e4m3: q · s with q = e4m3(x / s).

    s = max(|x| of the group, 1e-10) / 448                  groups of consecutive entries of a row
    s = max(max(|x| of the row) / 448, 1 / (448 · 512))     whole rows
    s = the checkpoint's                                    static

with s in float32, and rounded up to a power of two where the engine says so (vLLM 0.26,
QuantFP8). A quotient beyond ±448 becomes ±448. Some quantisers multiply by 1 / s, and then round a
quotient near the middle of two numbers of e4m3 the other way: such an entry is that middle, with a
variance.
"""

import math

import torch

from rlk_align.model.block_fp8 import MAX, raised, rounded
from rlk_align.probe.referee.weights import NotRefereed
from rlk_align.trace.schema import Grid

LEAST_GROUP = 1e-10
"""The least largest magnitude of a group."""
LEAST_ROW_SCALE = 1 / (MAX * 512)
E4M3_UNIT = 2.0**-4 / math.sqrt(3)
"""The root mean square of the relative error of rounding a number just above a power of two to
e4m3."""
NEAR = 2.0**-22
"""The relative distance by which quotients of different quantisers differ."""


def on_grid(x: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows `[N, K]`, float64, rounded to a grid, and the variance of each entry by the
    arithmetic of different quantisers. Raises NotRefereed."""
    if grid.by_batch:
        raise NotRefereed("the scale of its inputs depends on the other rows of a forward")
    if grid.few_bits:
        raise NotRefereed("its GPU keeps fewer bits of a sum of fp8 products than float32 has")
    if grid.columns and x.shape[1] % grid.columns:
        raise NotRefereed(f"its {x.shape[1]} inputs are no whole groups of {grid.columns}")
    wide = x.float()
    scales = _scales(wide, grid)
    quotient = wide / scales
    ends = [rounded(quotient * (1 + sign * NEAR)).double() for sign in (1, -1)]
    scale = scales.double()
    return (ends[0] + ends[1]) / 2 * scale, ((ends[0] - ends[1]) / 2 * scale).square()


def _scales(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The scale of each entry of float32 rows."""
    if grid.scale is not None:
        return torch.full_like(x, grid.scale)
    groups = x.reshape(len(x), -1, grid.columns or x.shape[1])
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # A tensor, because a GPU divides by a number as it multiplies by its reciprocal.
    most = torch.tensor(MAX, device=x.device)
    if grid.columns:
        scales = largest.clamp(min=LEAST_GROUP) / most
    else:
        scales = (largest / most).clamp(min=LEAST_ROW_SCALE)
    scales = raised(scales) if grid.powers_of_two else scales
    return scales.expand_as(groups).reshape_as(x)
