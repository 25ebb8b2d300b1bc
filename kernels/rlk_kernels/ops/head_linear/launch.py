"""`head_linear` on Triton: what its kernel can read, and the launch.

T = tokens   H = heads   K, N = in, out features   R = features of rest
"""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk_kernels.device import facts
from rlk_kernels.launching import cdiv, launch, power_of_2, shape_cache, tensor_map
from rlk_kernels.matmul.self_check import trusted
from rlk_kernels.matmul.tile import Tile
from rlk_kernels.matmul.tiles import SAFE
from rlk_kernels.ops.experts.launch import tile_for
from rlk_kernels.ops.head_linear import kernels


def can_run(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel can read x[T, H, K] and weight[H, N, K]: on a GPU with TMA, 16-bit numbers
    whose rows begin at multiples of 16 bytes, in sums of whole steps, which read no other head."""
    t, heads, k = x.shape
    return (
        facts(x.device).tma
        and x.dtype.itemsize == 2
        and min(t, heads, k, weight.shape[1]) > 0
        and k % SAFE.k == 0
        and x.stride(2) == 1
        and x.stride(1) >= k
        and x.stride(0) >= (heads - 1) * x.stride(1) + k
        and _rows(weight) is not None
        and all(s % 8 == 0 for s in (*x.stride()[:2], *weight.stride()) if s != 1)
        and (x.data_ptr() | weight.data_ptr()) % 16 == 0
    )


def _rows(weight: Tensor) -> tuple[int, int] | None:
    """(stride of a row, rows from a head to the next) of the matrix that has all heads' weights one
    below the other, [N, K] or [K, N] each; None if there is no such matrix."""
    outer, inner = weight.stride(), 1 if weight.stride(2) == 1 else 2
    stride, columns = outer[inner], weight.shape[3 - inner]
    if outer[3 - inner] != 1 or stride < columns or outer[0] % stride:
        return None
    step = outer[0] // stride
    return (stride, step) if step >= weight.shape[inner] else None


def product(x: Tensor, weight: Tensor, rest: Tensor | None, y: Tensor) -> str:
    """Fill y[T, H, N + R], which is contiguous, for what `can_run`; returns the implementation."""
    (t, heads, k), n = x.shape, weight.shape[1]
    if rest is not None and rest.stride(2) != 1:
        rest = rest.contiguous()
    width = y.shape[2] - n
    of_rest = (0, 0) if rest is None else rest.stride()[:2]
    cache = shape_cache(
        "head_linear", x.shape, x.stride(), weight.shape, weight.stride(), width, of_rest, x.dtype,
        x.device,
    )  # fmt: skip
    here, sound = facts(x.device), trusted(x.device, x.dtype)
    tile = tile_for(t * heads, heads, x.dtype, here, sound)
    if k % tile.k:
        tile = SAFE
    transposed = weight.stride(2) == 1
    below = _rows(weight)
    assert below is not None  # `can_run`
    launch(
        cache, kernels._head_kernel,
        (cdiv(t, tile.m) * (cdiv(n, tile.n) + (width > 0)), heads, 1),
        (*_maps(x, weight, below, tile, transposed), y, rest, t, n, k, x.stride(1), below[1],
         y.stride(0), y.stride(1), *of_rest, transposed, width, power_of_2(width) if width else 0,
         tile.m, tile.n, tile.k, here.overlaps),
        {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": here.overlaps},
    )  # fmt: skip
    return "triton"


def _maps(
    x: Tensor, weight: Tensor, below: tuple[int, int], tile: Tile, transposed: bool
) -> list[TensorDescriptor]:
    """Tensor maps of x as [T, features of all heads], and of all heads' weights as one matrix."""
    (t, heads, k), n, (row, step) = x.shape, weight.shape[1], below
    rows, columns, box = (n, k, (tile.n, tile.k)) if transposed else (k, n, (tile.k, tile.n))
    return [
        _map(x, (t, (heads - 1) * x.stride(1) + k), x.stride(0), (tile.m, tile.k)),
        _map(weight, ((heads - 1) * step + rows, columns), row, box),
    ]


def _map(x: Tensor, shape: tuple[int, int], row: int, box: tuple[int, int]) -> TensorDescriptor:
    """The tensor map of a matrix in the memory of x, with strides (row, 1)."""
    return tensor_map(TensorDescriptor, x.data_ptr(), x.dtype, shape, (row, 1), box)
