"""How the slices of `accumulate` are launched. The plan decides once, and the launch only reads it.

Where two products share a launch on Hopper, programs with fewer tiles of the one take more tiles of
the other, so that all end together. Where the first has partial sums, half of the programs begin
with the second, so that loads and stores of partial sums run beside products without any. Tiles of
the second may be half as wide.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlk_kernels.device import DeviceFacts
from rlk_kernels.matmul.plan import tma_reads
from rlk_kernels.matmul.tiles import FLOAT32, INTERPRETED, SAFE, Tile, partial_tile_for

ROWS, COLUMNS, STEP = 128, 256, 64
"""A tile of the kernel for Hopper: its rows, its columns (a tile may have half of them), its step
of K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialProduct:
    """One slice of K of a product: out[M, N], contiguous, continues where the slice before it
    stopped."""

    a: Tensor
    b: Tensor
    out: Tensor
    lo: Tensor
    """`lo_accumulator` of out."""
    trans_a: bool
    first: bool
    last: bool
    scale: Tensor | None = None
    """[M], only with the last slice: a factor of each row's sums, applied before they are
    rounded."""
    rows: int = 0
    """Rows of the tensor that contains the rows of out, where another slice may divide them
    differently; 0: M."""


def lo_accumulator(out: Tensor, calls: int) -> Tensor:
    """The lower halves of out's accumulators; empty where one call makes the whole sum."""
    shape = out.shape if calls > 1 and out.dtype != torch.float32 else (0,)
    return torch.empty(shape, dtype=torch.int16, device=out.device)


class Slice(NamedTuple):
    """What the plan of a partial product depends on, besides the device."""

    m: int
    n: int
    k: int
    rows: int
    """`PartialProduct.rows`."""
    dtype: torch.dtype
    out_dtype: torch.dtype
    trans_a: bool
    first: bool
    last: bool
    scaled: bool
    tma_reads: bool
    """Tensor maps can describe A, B and the output."""

    @property
    def whole(self) -> bool:
        """Whether this is the only slice, with no partial sums to load or store."""
        return self.first and self.last


def slice_of(x: PartialProduct, facts: DeviceFacts) -> Slice:
    """The slice of x. `tma_reads` is false on a device without tensor maps."""
    readable = facts.tma and all(tma_reads(y) for y in (x.a, x.b, x.out))
    m, n = x.out.shape
    return Slice(
        m, n, x.b.shape[0], x.rows, x.a.dtype, x.out.dtype, x.trans_a, x.first, x.last,
        x.scale is not None, readable,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """How one slice is launched."""

    kernel: Literal["hopper", "tma", "pointer", "product"]
    """"product": the plain product of `product.py`, for a slice with all of K."""
    tile: Tile = SAFE
    width: int = 0
    """Columns of a tile of the kernel for Hopper."""
    programs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLaunch:
    """Which program of the kernel for Hopper computes which tiles (`hopper/accumulate.py`)."""

    order: tuple[int, ...]
    """The indices of its slices, the smallest K first."""
    programs: int
    everyone: int
    """Tiles of the first product that all programs share."""
    heavy: int
    """The first `heavy` programs have one tile more of the second product. The other programs take
    the rest of the first."""
    ahead: int
    """Programs that begin with the second product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulatePlan:
    """How the slices of a call are launched."""

    slices: tuple[SlicePlan, ...]
    shared: SharedLaunch | None
    """How the slices of the kernel for Hopper share a launch; None without such slices."""


@functools.lru_cache(maxsize=4096)
def plan_accumulate(slices: tuple[Slice, ...], facts: DeviceFacts, trusted: bool) -> AccumulatePlan:
    """The plan of one slice, or of one slice of each of two products, none of them empty."""
    widths = hopper_widths(slices, facts, trusted)
    plans = tuple(
        SlicePlan(kernel="hopper", width=width) if width else _plan_slice(x, facts, trusted)
        for x, width in zip(slices, widths, strict=True)
    )
    return AccumulatePlan(
        slices=plans, shared=_share(slices, widths, facts.processors) if any(widths) else None
    )


def hopper_widths(slices: tuple[Slice, ...], facts: DeviceFacts, trusted: bool) -> tuple[int, ...]:
    """The width of each slice's tiles in the kernel for Hopper; 0: `kernels.py` runs the slice."""
    able = [facts.gluon and trusted and _fits_hopper(x) for x in slices]
    widths = [
        COLUMNS if can and _is_large(x, facts.processors) else 0
        for x, can in zip(slices, able, strict=True)
    ]
    if any(widths) and all(able) and not all(widths):
        few = widths.index(0)
        widths[few] = width_beside(slices[few], slices[1 - few], facts.processors)
    return tuple(widths)


def _fits_hopper(x: Slice) -> bool:
    half = x.dtype.itemsize == 2 and x.out_dtype.itemsize == 2
    return half and x.n % COLUMNS == 0 and x.tma_reads


def _is_large(x: Slice, processors: int) -> bool:
    """Whether tiles of the whole output keep a GPU busy. The answer is the same for all slices of
    a product, whatever their K and rows, because the two kernels store partial sums differently."""
    return partial_tile_for(x.rows or x.m, x.n, 4096, processors, True).n == COLUMNS


def _plan_slice(x: Slice, facts: DeviceFacts, trusted: bool) -> SlicePlan:
    if x.whole and not x.scaled:
        return SlicePlan(kernel="product")
    if facts.tma and x.tma_reads and x.dtype.itemsize == 2 and x.out_dtype != torch.float32:
        tile = partial_tile_for(x.m, x.n, x.k, facts.processors, trusted)
        tiles = -(-x.m // tile.m) * -(-x.n // tile.n)
        return SlicePlan(kernel="tma", tile=tile, programs=min(tiles, facts.processors))
    tile = FLOAT32 if x.dtype == torch.float32 else SAFE
    tile = INTERPRETED if facts.interpreted else tile
    return SlicePlan(kernel="pointer", tile=tile, programs=-(-x.m // tile.m) * -(-x.n // tile.n))


def tiles_of(x: Slice, width: int) -> int:
    """Tiles of the output, `width` columns wide."""
    return -(-x.m // ROWS) * -(-x.n // width)


def cost(x: Slice, width: int) -> int:
    """The time of a tile of this width in relative units: its products, and four steps."""
    return (-(-x.k // STEP) + 4) * width


def width_beside(x: Slice, other: Slice, processors: int) -> int:
    """The width of x's tiles in a launch shared with `other`; 0: a separate launch is better.

    A tile of x must not last longer than the whole launch. Only whole sums, of the larger K, can
    have tiles half as wide.
    """
    if not x.whole or x.k < other.k:
        return 0
    beside = tiles_of(other, COLUMNS) * cost(other, COLUMNS)
    for width in (COLUMNS, COLUMNS // 2):
        tiles, each = tiles_of(x, width), cost(x, width)
        if -(-tiles // processors) * each * processors <= beside + tiles * each:
            return width
    return 0


def share_tiles(
    tiles: int, each: int, other: int, other_each: int, programs: int
) -> tuple[int, int]:
    """(everyone, heavy) of a `SharedLaunch`, from each product's tiles and their cost."""
    heavy = other % programs
    light = programs - heavy
    rest = min(other_each // each, tiles // light) * light if heavy else 0
    return tiles - rest, heavy


def _share(slices: tuple[Slice, ...], widths: tuple[int, ...], processors: int) -> SharedLaunch:
    order = tuple(sorted((i for i, width in enumerate(widths) if width), key=lambda i: slices[i].k))
    counts = [tiles_of(slices[i], widths[i]) for i in order]
    programs = min(sum(counts), processors)
    everyone, heavy, ahead = counts[0], 0, 0
    if len(order) == 2:
        costs = [cost(slices[i], widths[i]) for i in order]
        everyone, heavy = share_tiles(counts[0], costs[0], counts[1], costs[1], programs)
        # with tiles half as wide, reading operands twice costs more than storing sums
        wide = widths[order[1]] == COLUMNS
        ahead = programs // 2 if wide and not slices[order[0]].whole else 0
    return SharedLaunch(order=order, programs=programs, everyone=everyone, heavy=heavy, ahead=ahead)
