"""The corner-stone: every tile in use gives the same fp32 bits. Checked on the machine at hand.

`linear` picks its tile by M; that is batch-invariant only as long as a tensor core adds the
products of one output element in the same order for every tile shape. It holds on an H200 with
Triton 3.6. Another GPU or another Triton could break it, so the first bf16 or fp16 product on a
device runs this check once (well under a second once compiled), and the first one with fp32 sums in
chains (`chains.py`) again, with chains; where it fails, the library warns and uses one tile,
`tiles.SAFE`, for every M.
"""

import functools
import warnings

import torch
import triton
from torch import Tensor

from rlk_kernels.gemm import gemm_triton
from rlk_kernels.tiles import SAFE, Tile, tiles_in_use


class TilesDiffer(RuntimeWarning):
    """Two tile shapes gave different bits on this device: one tile is used for everything."""


def tile_bits(
    tile: Tile, dtype: torch.dtype, device: torch.device, *, chained=False, pointers=False
) -> Tensor:
    """The fp32 output of one fixed product [129, K] x [K, 264] with `tile`: K of 1 or 2 chains."""
    m, n, k = 129, 264, 1000 if chained else 760
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(m, k, generator=generator).to(device, dtype)
    b = torch.randn(n, k, generator=generator).to(device, dtype)
    out = torch.full((m, n), float("nan"), device=device, dtype=torch.float32)
    return gemm_triton(a, b, None, False, True, out, tile=tile, pointers=pointers)


def disagreements(device: torch.device, chained: bool = False) -> list[tuple[Tile, torch.dtype]]:
    """The tiles in use whose bits differ from SAFE's, per dtype."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        expected = tile_bits(SAFE, dtype, device, chained=chained)
        for tile in tiles_in_use():
            if not torch.equal(tile_bits(tile, dtype, device, chained=chained), expected):
                found.append((tile, dtype))
    return found


@functools.cache
def holds(device: torch.device, chained: bool = False) -> bool:
    """Whether all tiles agree on `device`; checked once a process, outside CUDA graph capture."""
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rlk_kernels checks its tiles at the first product on a device, and that was inside a "
            "CUDA graph capture; call rlk_kernels.warm_up(device) before capturing"
        )
    found = disagreements(device, chained)
    if found:
        name = torch.cuda.get_device_name(device) if on_gpu else device.type
        warnings.warn(
            f"tiles give different bits on {name} with Triton {triton.__version__} "
            f"({len(found)} of them, first {found[0]}); using {SAFE} for every M",
            TilesDiffer,
            stacklevel=2,
        )
    return not found
