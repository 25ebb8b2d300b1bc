"""Where the fp8 values and scales of a weight come from: whether they are the quantiser's image of
another weight, bit by bit, and if not, why.

The quantiser is that of `rlk_kernels.block_fp8`; a test holds the two equal. Others compute the
same scales and values in other steps, which give a few other bits; these are images as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from rlk_align.model.block_fp8 import MAX, largest, raised, rounded, spread

FNUZ_MAX = 240.0
"""The largest number of AMD's e4m3fnuz."""
SMALLEST = 1e-12
"""The least largest magnitude of a block."""
_EQUAL = 2.0**-22
"""The relative distance of scales that were computed in other steps."""

Kind = Literal[
    "image", "powers of two", "float32 scales", "masters", "export", "range", "one scale", "order",
    "other",
]  # fmt: skip
"""`image`: of the weight, bit by bit. `powers of two`, `float32 scales`: with scales that
config.json does not state. `masters`: of float32 weights that round to this one. `export`: of this
weight, rounded. `range`: scaled to another largest number. `one scale`: of the whole matrix.
`order`: the scales of other blocks. `other`: of another weight."""


class Stored(NamedTuple):
    """A quantised weight."""

    values: torch.Tensor
    """e4m3 [N, K]."""
    scales: torch.Tensor
    """float32 [ceil(N / R), ceil(K / C)]."""
    block: tuple[int, int]
    powers_of_two: bool = False
    """Whether config.json says that scales are powers of two."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a quantised weight is, beside another weight."""

    kind: Kind
    way: str = ""
    """For an image: how the quantiser computed it."""
    values: int = 0
    """The number of values that differ from the image of that weight."""
    of: int = 0
    scales: int = 0
    """The number of scales that differ."""
    of_scales: int = 0


def quantised(
    weight: torch.Tensor, block: tuple[int, int], powers_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values [N, K] and float32 scales of a weight, as `rlk_kernels.block_fp8.quantise`."""
    return next(_images(weight, block, powers_of_two))[1:]


def origin_of(stored: Stored, weight: torch.Tensor, master: torch.Tensor | None = None) -> Origin:
    """Where a quantised weight comes from, beside `weight` of the same shape, which the other side
    computes with. `master`: the wider weight that it was rounded from, if that is known."""
    images = list(_images(weight, stored.block, stored.powers_of_two))
    for way, values, scales in images:
        if _same(stored, values, scales):
            return Origin("image", way)
    _, values, scales = images[0]
    if _shares_scale(stored, weight, scales):
        return Origin("image", "with the largest scale of projections that an engine fuses")
    counts = {
        "values": int((values.float() != stored.values.float()).sum()),
        "of": values.numel(),
        "scales": int((scales != stored.scales.float()).sum()),
        "of_scales": scales.numel(),
    }
    return Origin(_kind(stored, weight, master, scales), **counts)


def _shares_scale(stored: Stored, weight: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether a weight with one scale was quantised by a larger one, that of a matrix of which it
    is a part; `scales`: those of its own image. AMD's range gives a larger scale as well."""
    mine, w = stored.scales.float(), weight.float()
    if mine.numel() > 1 or not bool(mine > scales) or _close(mine, scales * (MAX / FNUZ_MAX)):
        return False
    images = (rounded(w / mine), rounded(w * mine.reciprocal()))
    return any(torch.equal(x.float(), stored.values.float()) for x in images)


def _kind(
    stored: Stored, weight: torch.Tensor, master: torch.Tensor | None, scales: torch.Tensor
) -> Kind:
    """`scales`: those of the image of `weight`."""
    others = _images(weight, stored.block, not stored.powers_of_two)
    if any(_same(stored, *image) for _, *image in others):
        return "float32 scales" if stored.powers_of_two else "powers of two"
    if master is not None and _is_image(stored, master):
        return "masters"
    if weight.dtype == torch.float32 and _is_image(stored, weight.bfloat16()):
        return "export"
    if weight.dtype != torch.float32 and _fits(stored, weight):
        return "masters"
    mine = stored.scales.float()
    # What follows has values of this weight by the scales that are stored.
    if torch.equal(_values(weight, mine, stored.block).float(), stored.values.float()):
        if _close(mine, scales * (MAX / FNUZ_MAX)):
            return "range"
        if _close(mine, scales.amax().expand_as(scales)):
            return "one scale"
    if not torch.equal(mine, scales) and torch.equal(
        mine.flatten().sort().values, scales.flatten().sort().values
    ):
        return "order"
    # e4m3fnuz has a smaller range, and its values are clamped to it.
    if _close(mine, scales * (MAX / FNUZ_MAX)):
        return "range"
    return "other"


def _is_image(stored: Stored, weight: torch.Tensor) -> bool:
    images = _images(weight, stored.block, stored.powers_of_two)
    return any(_same(stored, *image) for _, *image in images)


def _same(stored: Stored, values: torch.Tensor, scales: torch.Tensor) -> bool:
    return torch.equal(scales, stored.scales.float()) and torch.equal(
        values.float(), stored.values.float()
    )


def _images(
    weight: torch.Tensor, block: tuple[int, int], powers_of_two: bool
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(way, values, scales) of each way of quantising a weight."""
    w = weight.float()
    most = largest(w, block).clamp(min=SMALLEST)
    scales = most / MAX
    if powers_of_two:
        scales = raised(scales)
        yield "", _values(w, scales, block), scales
        return
    yield "", _values(w, scales, block), scales
    factor = MAX / most
    multiplied = rounded(w * spread(factor, w.shape, block))
    yield "w · (448 / max)", multiplied, scales
    yield "w · (448 / max), and 1 / (448 / max) as the scale", multiplied, 1 / factor


def _values(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    return rounded(weight.float() / spread(scales, weight.shape, block))


def _fits(stored: Stored, weight: torch.Tensor) -> bool:
    """Whether wider weights that round to `weight` have these values and scales: each value lies
    between those of the ends of the interval that rounds to its entry."""
    w, mine = weight.float(), stored.scales.float()
    _, exponent = torch.frexp(w.abs().clamp(min=torch.finfo(weight.dtype).tiny))
    half = torch.ldexp(torch.full_like(w, torch.finfo(weight.dtype).eps / 4), exponent)
    low, high = (w - half).abs(), (w + half).abs()
    least = largest(torch.minimum(low, high), stored.block)
    most = largest(torch.maximum(low, high), stored.block)
    if stored.powers_of_two:
        return False
    inside = (mine >= least / MAX * (1 - _EQUAL)) & (mine <= most / MAX * (1 + _EQUAL))
    below = _values(w - half, mine, stored.block).float()
    above = _values(w + half, mine, stored.block).float()
    values = stored.values.float()
    return bool(inside.all()) and bool(((below <= values) & (values <= above)).all())


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= _EQUAL * b).all())


def other_readings(stored: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    """(what was done, float32 [N, K]) of ways in which an engine misreads a quantised weight."""
    scales, shape = stored.scales.float(), stored.values.shape
    if (even := evenly_divided(stored)) is not None:
        rows, columns = stored.block
        yield (
            "its engine divides the rows and the columns evenly by the number of scales, and "
            f"the last blocks of {rows} x {columns} are smaller",
            even,
        )
    values = stored.values.float()
    rounded = spread(scales.bfloat16().float(), shape, stored.block)
    yield "its engine rounds the scales to bfloat16", values * rounded
    yield "its engine reads the values without their scales", values


def evenly_divided(stored: Stored) -> torch.Tensor | None:
    """float32 [N, K]: the weight as code reads it that divides the rows and columns evenly by the
    number of scales, where the last block is smaller than the others; None if all have one size.
    transformers 5.19 does so."""
    even = [-(-n // s) for n, s in zip(stored.values.shape, stored.scales.shape, strict=True)]
    if tuple(even) == stored.block:
        return None
    wide = spread(stored.scales.float(), stored.values.shape, (even[0], even[1]))
    return stored.values.float() * wide
