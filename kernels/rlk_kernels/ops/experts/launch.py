"""The products of `grouped_linear` and `grouped_swiglu` on Triton: tiles and launches. The number
of rows of an expert is only on the device, and nothing here reads it."""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.device import DeviceFacts, facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache, tensor_map
from rlk_kernels.matmul.self_check import trusted
from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tiles import FLOAT32, INTERPRETED, SAFE
from rlk_kernels.ops.experts import kernels
from rlk_kernels.ops.experts.grouping import group

__all__ = ["bias_grad", "group", "product", "weight_grad"]

# (mean rows of an expert up to which a tile is used, the tile)
BY_ROWS = (
    (12, Tile(16, 128, 128, 4, 4)),
    (40, Tile(64, 256, 64, 8, 4)),
    (96, Tile(128, 128, 64, 8, 3)),
)
MANY_ROWS = Tile(128, 256, 64, 8, 4)
WEIGHT_GRAD = Tile(128, 128, 64, 8, 3)
"""m and n: of the gradient; k: rows of a step."""


def tile_for(rows: int, experts: int, dtype: torch.dtype, here: DeviceFacts, sound: bool) -> Tile:
    """The tile for `rows` rows of all experts; it changes the time and never the bits."""
    if here.interpreted:
        return INTERPRETED
    if dtype == torch.float32:
        return FLOAT32
    if not sound:
        return SAFE
    mean = rows / experts
    return next((tile for most, tile in BY_ROWS if mean <= most), MANY_ROWS)


def few_for(tile: Tile, sound: bool) -> int:
    """The rows of a tile half as high, for the last rows of an expert, which fill half of a high
    tile in the mean; 0: `tile` is used for all rows."""
    return tile.m // 2 if sound and (tile.m >= 128 or tile == INTERPRETED) else 0


def product(
    x: Tensor, b: Tensor, order: Tensor, offsets: Tensor, each: int, out: Tensor, act: bool = False,
    bias: Tensor | None = None,
) -> str:  # fmt: skip
    """Fill out[S, N] with x[S / each, K] @ b[e] (+ bias[e]) of b[E, K, N] and bias[E, N], or with
    `act` with the swiglu of the halves of the product, b[E, K, 2 N] transposed; returns the
    implementation that ran."""
    (rows, n), (experts, k, _) = out.shape, b.shape
    if not out.numel():
        return "triton"
    cache = shape_cache(
        "grouped", x.shape, b.shape, b.stride(), rows, each, act, bias is None, x.dtype, x.device,
        (x.data_ptr() | b.data_ptr() | out.data_ptr()) & 15 == 0,
    )  # fmt: skip
    here = facts(x.device)
    sound = trusted(x.device, x.dtype)
    tile = tile_for(rows, experts, x.dtype, here, sound)
    columns = tile.n // 2 if act else tile.n
    transposed = act or b.stride(1) == 1
    reads = here.tma and x.dtype.itemsize == 2 and _describable(b, transposed, tile)
    described = b
    if reads:
        width = b.shape[1] if transposed else b.shape[2]
        box = (columns, tile.k) if transposed else (tile.k, columns)
        shape = (b.numel() // width, width)
        described = tensor_map(TensorDescriptor, b.data_ptr(), b.dtype, shape, (width, 1), box)
    # each expert, and the dropped rows, may end with a part of a tile
    row_tiles = min(cdiv(rows, tile.m) + experts, rows)
    few = few_for(tile, sound)
    launch(
        cache, kernels._grouped_kernel, (row_tiles * cdiv(n, columns), 1, 1),
        (x, b, described, out, bias, order, offsets, rows, n, k, experts, each, row_tiles,
         *b.stride(), transposed, reads, act, bias is not None, tile.m, columns, tile.k, few,
         tile.group, power_of_2(experts + 1), k % tile.k == 0, "ieee", here.overlaps),
        {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": here.overlaps},
    )  # fmt: skip
    return "triton"


def _describable(b: Tensor, transposed: bool, tile: Tile) -> bool:
    """Whether one tensor map can describe all weights, one below the other. If the sum runs over
    the rows of a weight, a tile must not contain rows of the next one: 0 times infinity is NaN."""
    weight = b.mT if transposed else b
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0
    rows_end = transposed or weight.shape[1] % tile.k == 0
    return aligned and rows_end and weight.shape[2] * weight.element_size() % 16 == 0


def weight_grad(
    dy: Tensor, x: Tensor, order: Tensor, offsets: Tensor, each: int, out: Tensor
) -> str:
    """Fill out[E, N, K] with the gradient of the weights; returns the implementation that ran."""
    experts, n, k = out.shape
    if not out.numel():
        return "triton"
    cache = shape_cache(
        "grouped_weight", dy.shape, x.shape, out.shape, each, dy.dtype, dy.device,
        (x.data_ptr() | dy.data_ptr() | out.data_ptr()) & 15 == 0,
    )  # fmt: skip
    here = facts(x.device)
    trusted(x.device, x.dtype)
    tile = WEIGHT_GRAD
    if here.interpreted:
        tile = INTERPRETED
    elif x.dtype == torch.float32:
        tile = FLOAT32
    launch(
        cache, kernels._grouped_weight_kernel, (cdiv(n, tile.m) * cdiv(k, tile.n), experts, 1),
        (dy, x, out, order, offsets, n, k, each, tile.m, tile.n, tile.k, "ieee"),
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )  # fmt: skip
    return "triton"


BIAS_ROWS, BIAS_COLUMNS = 128, 32
"""Rows that are added in one step, and columns of a program."""


def bias_grad(dy: Tensor, order: Tensor, offsets: Tensor, out: Tensor) -> str:
    """Fill out[E, N] with the gradient of the biases; returns the implementation that ran."""
    experts, n = out.shape
    if out.numel():
        launch(
            shape_cache("grouped_bias", out.shape, dy.dtype, dy.device),
            kernels._grouped_bias_kernel, (cdiv(n, BIAS_COLUMNS), experts, 1),
            (dy, out, order, offsets, n, BIAS_COLUMNS, BIAS_ROWS), {"num_warps": 4},
        )  # fmt: skip
    return "triton"
