"""The plan of a product on Triton: all decisions are made here once, and the launch reads them.

A plan depends on shapes, dtypes, whether tensor maps can describe the operands, the facts of the
device, and whether its tiles are trusted (`self_check.py`). Making one does not query the device,
so plans for any GPU can be made, and tested, on any machine.

    kernel          used for
    hopper_split    fp32 sums in segments that fill a GPU of the Hopper generation
    hopper          tiles with separate warps for copies and products, on that generation
    tma             operands A and B that tensor maps can describe
    pointer         everything else
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlk_kernels.device import DeviceFacts
from rlk_kernels.matmul.split import segments
from rlk_kernels.matmul.tiles import (
    FLOAT32,
    INTERPRETED,
    INTERPRETED_LOGITS,
    SAFE,
    SPLIT,
    STATISTICS,
    STORE,
    Tile,
    for_split,
    tile_for,
)


def recorded_implementation(ran: Iterable[str]) -> str:
    """The implementation that a call is recorded as, given those that ran in it."""
    return "triton/hopper" if "triton/hopper" in ran else "triton"


def tma_reads(x: Tensor) -> bool:
    """Whether a tensor map can describe the rows of x."""
    row_bytes = x.stride(0) * x.element_size()
    return (
        x.stride(1) == 1 and x.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and row_bytes > 0
        and x.shape[1] <= x.stride(0)
    )  # fmt: skip


class ProductShape(NamedTuple):
    """What the plan of a product depends on, besides the device."""

    m: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    trans_a: bool
    trans_b: bool
    tma_reads: bool
    """Tensor maps can describe A and B."""
    tma_writes: bool
    """A tensor map can describe the output."""
    dense: bool
    """The output is contiguous."""


def shape_of(
    a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, out: Tensor, facts: DeviceFacts
) -> ProductShape:
    """The shape of out = A @ B. `tma_reads` is false on a device without tensor maps."""
    m, n = out.shape
    return ProductShape(
        m, n, a.shape[0] if trans_a else a.shape[1], a.dtype, out.dtype, trans_a, trans_b,
        facts.tma and tma_reads(a) and tma_reads(b),
        n * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0, out.is_contiguous(),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulPlan:
    """How a product is launched."""

    kernel: Literal["hopper_split", "hopper", "tma", "pointer"]
    tile: Tile
    segment: int
    """Length of a segment of K (`split.py`); 0: accumulation is not split."""
    last_segment: int
    """Where the last segment begins."""
    programs: int
    """How many programs are launched."""
    stages: int
    overlap: int
    """`Tile.overlap`; 0 on a device that cannot overlap launches."""
    tma_store: bool
    wide: int
    """Columns that tiles of full width cover; narrower tiles cover the rest (`Tile.tail`)."""

    @property
    def implementation(self) -> str:
        """The name that `backend.record` records."""
        return "triton/hopper" if self.kernel.startswith("hopper") else "triton"


@functools.lru_cache(maxsize=4096)
def plan_product(shape: ProductShape, facts: DeviceFacts, trusted: bool) -> MatmulPlan:
    """The plan of a product with at least one row and column."""
    m, n, k, dtype, out_dtype, trans_a, trans_b, *_ = shape
    segment, last = segments(k, dtype, out_dtype)
    if segment and trusted and facts.gluon and not trans_a and trans_b and _fills(shape, facts):
        tiles = -(-m // SPLIT.m) * -(-n // SPLIT.n)
        return MatmulPlan(
            kernel="hopper_split", tile=SPLIT, segment=segment, last_segment=last,
            programs=min(tiles, facts.processors), stages=SPLIT.stages, overlap=0,
            tma_store=False, wide=n,
        )  # fmt: skip
    if facts.interpreted:
        return plan_tile(shape, facts, INTERPRETED)
    specialized = _specializes(shape, facts) and shape.tma_reads and not segment
    tile = tile_for(m, n, k, dtype, facts.processors, trusted=trusted, specialized=specialized)
    return plan_tile(shape, facts, tile)


def plan_tile(
    shape: ProductShape, facts: DeviceFacts, tile: Tile, pointers: bool = False
) -> MatmulPlan:
    """The plan with this tile; `pointers`: without tensor maps."""
    m, n, k, dtype, out_dtype, _, _, readable, writable, _ = shape
    segment, last = segments(k, dtype, out_dtype)
    if segment:
        tile = for_split(tile)
    if pointers or not readable or dtype.itemsize != 2 or not k:
        return MatmulPlan(
            kernel="pointer", tile=tile, segment=segment, last_segment=last,
            programs=-(-m // tile.m) * -(-n // tile.n), stages=min(tile.stages, 3), overlap=0,
            tma_store=False, wide=n,
        )  # fmt: skip
    specialized = tile.warp_specialized and _specializes(shape, facts)
    if tile.warp_specialized and not specialized:
        tile = SAFE
    wide = tile.wide_columns(m, n, facts.processors)
    tiles = tile.count(m, wide)
    if tile.tail:
        tiles += -(-m // tile.m) * -(-(n - wide) // tile.tail)
    narrow_out = out_dtype.itemsize == 2
    return MatmulPlan(
        kernel="hopper" if specialized else "tma", tile=tile, segment=segment, last_segment=last,
        programs=min(tiles, facts.processors),
        # an fp32 output tile takes the shared memory of one more stage; the kernel with separate
        # warps for copies and products writes from registers
        stages=tile.stages if specialized or narrow_out else max(2, tile.stages - 1),
        overlap=tile.overlap if facts.overlaps else 0,
        tma_store=writable, wide=wide,
    )  # fmt: skip


def _specializes(shape: ProductShape, facts: DeviceFacts) -> bool:
    """Whether `hopper/product.py` supports the form and the dtypes of a product."""
    linear_form = shape.trans_b and not shape.trans_a
    return facts.cuda and linear_form and shape.out_dtype in (shape.dtype, torch.float32)


def _fills(shape: ProductShape, facts: DeviceFacts) -> bool:
    """Whether a split product has many tiles of 128 x 256 and a dense fp32 output."""
    many = 2 * -(-shape.m // 128) * -(-shape.n // 256) >= facts.processors
    plain = shape.out_dtype == torch.float32 and shape.dense
    return shape.m > 64 and many and plain and shape.tma_reads


Epilogue = Literal["statistics", "exponentials", "gradient", "logits"]
"""What a kernel does with a tile of logits (`epilogue.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpiloguePlan:
    """How the product h[T, K] @ w[V, K]^T with an epilogue is launched, for any T."""

    kernel: Literal["hopper", "tma", "pointer"]
    epilogue: Epilogue
    tile: Tile
    segment: int
    last_segment: int
    permuted: bool
    """The rows of w are read in an order that gives each thread whole leaves."""
    tma_store: bool
    processors: int

    @property
    def node_columns(self) -> int:
        """Columns of a node of "exponentials": those of a tile, or of half a tile."""
        return self.tile.n // 2 if self.kernel == "hopper" else self.tile.n

    @property
    def implementation(self) -> str:
        """The name that `backend.record` records."""
        return "triton/hopper" if self.kernel == "hopper" else "triton"


class LogitsShape(NamedTuple):
    """What the plan of logits depends on, besides the device."""

    tokens: int
    columns: int
    k: int
    dtype: torch.dtype
    logit_dtype: torch.dtype
    tma_reads: bool
    """Tensor maps can describe h and w."""


@functools.lru_cache(maxsize=4096)
def plan_epilogue(
    shape: LogitsShape, epilogue: Epilogue, tma_writes: bool, facts: DeviceFacts, trusted: bool
) -> EpiloguePlan:
    """The plan of one launch; tma_writes: a tensor map can describe the stored tensor, if any."""
    _, v, k, dtype, logit_dtype, readable = shape
    segment, last = segments(k, dtype, logit_dtype)
    reads = facts.tma and readable and dtype.itemsize == 2 and k > 0
    tile = STATISTICS if epilogue == "statistics" else STORE
    if facts.interpreted:
        tile = INTERPRETED_LOGITS
    elif dtype == torch.float32:
        tile = FLOAT32
    elif not trusted or not reads:
        tile = SAFE
    elif segment and not facts.gluon:
        tile = SAFE  # has registers for the high part
    kernel: Literal["hopper", "tma", "pointer"] = "tma" if reads else "pointer"
    if reads and facts.gluon and tile.warp_specialized and tma_writes:
        kernel = "hopper"
    whole_leaves = epilogue != "gradient" and v % 128 == 0 and tile.n % 128 == 0
    return EpiloguePlan(
        kernel=kernel, epilogue=epilogue, tile=tile, segment=segment, last_segment=last,
        permuted=whole_leaves and reads, tma_store=epilogue != "statistics" and tma_writes,
        processors=facts.processors,
    )  # fmt: skip
