"""The product of `kernels.py` on Hopper with separate warps for copies and products, with the same
order and bits.

It is written in CUDA C++ (`product.cu`): wgmma, and so a tile, may have any multiple of 8 as its
width, where Triton's tiles have powers of two. An output that is not made of whole tiles gets
evenly spaced tiles that overlap. Otherwise a program with fewer rows to copy would run ahead, and
its operands would have left L2 when its neighbours need them (up to a third of the time at long
K). Elements that two programs compute have the same bits. It computes only A @ B^T, for `linear`.
"""

import ctypes
import functools
from importlib import resources

import torch
from torch import Tensor

from rlk_kernels import cuda
from rlk_kernels.cuda import Arguments
from rlk_kernels.launching import ShapeCache
from rlk_kernels.matmul.plan import MatmulPlan
from rlk_kernels.matmul.tile import Tile, evenly
from rlk_kernels.nvrtc import Source

_HALF = {torch.bfloat16: "bf16", torch.float16: "f16"}


@functools.cache
def _text() -> str:
    return resources.files(__package__).joinpath("product.cu").read_text()


def _multiply(width: int, half: str) -> str:
    """The instruction of four warps for acc[64, width] += a[64, 16] @ b[width, 16]^T."""
    count = width // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(acc[{i}])' for i in range(count))
    return (
        f"#define MULTIPLY(acc, a, b) asm volatile("
        f'"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{half}.{half} '
        f'{{{registers}}}, %{count}, %{count + 1}, 1, 1, 1, 0, 0;" '
        f': {sums} : "l"(a), "l"(b))\n'
    )


def source(
    tile: Tile, dtype: torch.dtype, out_dtype: torch.dtype, bias: torch.dtype | None, aligned: bool
) -> Source:
    """The kernel for a tile; aligned: rows of the output begin at multiples of 16 bytes."""
    half = _HALF[dtype]
    macros = {
        "GROUPS": tile.groups,
        "WIDTH": tile.flat,
        "BLOCKS": tile.k // 64,
        "DEPTH": tile.stages,
        "SWAP": int(tile.swap),
        "HALF": f'"{half}"',
        "OUT_FLOAT": int(out_dtype == torch.float32),
        "BIAS": 0 if bias is None else 1 if bias == dtype else 2,
        "ALIGNED": int(aligned),
    }
    options = ("--gpu-architecture=sm_90a", "--std=c++17")
    options += tuple(f"-D{name}={value}" for name, value in macros.items())
    return Source("product", _multiply(tile.flat, half) + _text(), options)


def shared_bytes(tile: Tile) -> int:
    """The bytes of shared memory of a program: buffers from a multiple of 1024 on, and two barriers
    for each."""
    return 1024 + tile.stages * ((64 * tile.groups + tile.flat) * tile.k * 2 + 16)


def specialized_product(
    plan: MatmulPlan, cache: ShapeCache, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """out[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]), with one program for each processor."""
    kernel, threads, shared = cache.get_or_create("kernel", None, _kernel, plan, a, bias, out)
    addresses = a.data_ptr(), b.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    cuda.launch(
        cache, kernel, plan.programs, threads, shared, addresses, _arguments, plan.tile, a, b, bias,
        out,
    )  # fmt: skip


def _kernel(plan: MatmulPlan, a: Tensor, bias: Tensor | None, out: Tensor) -> tuple:
    """What calls of one shape share: (source, threads, bytes of shared memory)."""
    tile, bias_dtype = plan.tile, None if bias is None else bias.dtype
    kernel = source(tile, a.dtype, out.dtype, bias_dtype, plan.tma_store)
    return kernel, 128 * (tile.groups + 1), shared_bytes(tile)


def _arguments(tile: Tile, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> Arguments:
    (m, n), k = out.shape, a.shape[1]
    tall, flat, distances = a, b, (evenly(m, tile.m), evenly(n, tile.n, 16))
    if tile.swap:
        tall, flat, distances = b, a, distances[::-1]
    maps = [cuda.tensor_map(x, rows) for x, rows in ((tall, 64 * tile.groups), (flat, tile.flat))]
    addresses = out.data_ptr(), None if bias is None else bias.data_ptr()
    sizes = tall.shape[0], flat.shape[0], k, out.stride(0), *distances, tile.group
    return Arguments(
        *maps, *map(ctypes.c_void_p, addresses), *map(ctypes.c_int, sizes)
    )  # fmt: skip
