"""The tile-invariance self-check: every tile in use gives the same fp32 bits on this machine.

`linear` picks its tile by M; that is batch-invariant only as long as a tensor core adds the
products of one output element in the same order for every tile shape. It holds on an H200 with
Triton 3.6. Another GPU or another Triton could break it, so the first bf16 and the first fp16
product on a device run this check, and the first one with split accumulation (`split.py`) again,
with that; where it fails, the library warns and uses one tile, `tiles.SAFE`, for every M. That it
held is noted in Triton's cache, for this kind of GPU, these compilers and these sources: processes
that read it there do not compile some 90 kernels for the check alone.

    tiles of                         are run by
    products                         the kernel that launches them
    `accumulate`                     its kernel: partial accumulators show the sums before rounding
    `accumulate` on Hopper           its kernel, likewise
    statistics, stored epilogues     the product kernel with the same tile, for its sums show; on
                                     Hopper their own kernel, which writes plain logits instead
    the logits of given ids          the pointer kernel of the product, with the same tile
"""

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
from torch import Tensor

from rlk_kernels import nvrtc
from rlk_kernels.ahead import compiled_ahead
from rlk_kernels.device import facts, interpreting
from rlk_kernels.launching import ShapeCache, compiles_only
from rlk_kernels.matmul.accumulate import plan as accumulate
from rlk_kernels.matmul.accumulate.launch import launch_pointer, launch_tma
from rlk_kernels.matmul.accumulate.partial import PartialProduct, lo_accumulator
from rlk_kernels.matmul.launch import launch
from rlk_kernels.matmul.plan import MatmulPlan, plan_tile, shape_of
from rlk_kernels.matmul.split import segments
from rlk_kernels.matmul.tiles import PICK, SAFE, SPLIT, Tile, partial_tiles, product_tiles
from rlk_kernels.private_api import disk_cache
from rlk_kernels.sources import sources_digest


class TilesDiffer(RuntimeWarning):
    """Two tile shapes gave different bits on this device: one tile is used for everything."""


def operands(k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """a[129, K] and b[264, K], always the same."""
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(129, k, generator=generator).to(device, dtype)
    return a, torch.randn(264, k, generator=generator).to(device, dtype)


def depth(split: bool) -> int:
    """K of one segment, or of two."""
    return 1000 if split else 760


def tile_bits(
    tile: Tile, dtype: torch.dtype, device: torch.device, *, split=False, pointers=False
) -> Tensor:
    """The fp32 output of a @ b^T with `tile` in the product kernel."""
    a, b = operands(depth(split), dtype, device)
    out = torch.full((129, 264), float("nan"), device=device, dtype=torch.float32)
    return run_tile(a, b, None, out, tile, pointers)


def run_tile(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, tile: Tile, pointers: bool = False
) -> Tensor:
    """Fill out = a @ b^T (+ bias) with `tile` and return it; `pointers`: without tensor maps."""
    here = facts(a.device)
    plan = plan_tile(shape_of(a, b, False, True, out, here), here, tile, pointers)
    launch(plan, ShapeCache(), a, b, bias, False, True, out)
    return out


def partial_bits(tile: Tile, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The partial accumulators of `accumulate` after all of K but a last call, with `tile`."""
    x, here = _partial(dtype, device), facts(device)
    m, n = x.out.shape
    tiles = -(-m // tile.m) * -(-n // tile.n)
    if here.tma:
        programs = min(tiles, here.processors)
        launch_tma(accumulate.SlicePlan(kernel="tma", tile=tile, programs=programs), x)
    else:
        launch_pointer(accumulate.SlicePlan(kernel="pointer", tile=tile, programs=tiles), x)
    hi, lo = (half.view(torch.int16).to(torch.int32) for half in (x.out, x.lo))
    return ((hi << 16) | (lo & 0xFFFF)).view(torch.float32)


def _partial(dtype: torch.dtype, device: torch.device, columns: int = 264) -> PartialProduct:
    a, b = operands(depth(False), dtype, device)
    out = torch.full((129, columns), float("nan"), device=device, dtype=dtype)
    return PartialProduct(
        a=a, b=b[:columns].mT.contiguous(), out=out, lo=lo_accumulator(out, 2), trans_a=False,
        first=True, last=False,
    )  # fmt: skip


def hopper_partial_bits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`partial_bits` of the first 256 columns by the kernel for Hopper."""
    from rlk_kernels.matmul.hopper.accumulate import loaded_partials, sum_hopper

    x = _partial(dtype, device, accumulate.COLUMNS)
    tiles = accumulate.tiles_of(accumulate.slice_of(x, facts(device)), accumulate.COLUMNS)
    plan = accumulate.AccumulatePlan(
        slices=(accumulate.SlicePlan(kernel="hopper", width=accumulate.COLUMNS),),
        shared=accumulate.SharedLaunch(
            order=(0,), programs=tiles, everyone=tiles, heavy=0, ahead=0
        ),
    )
    sum_hopper(plan, (x,))
    return loaded_partials(x)


def hopper_logits_bits(dtype: torch.dtype, device: torch.device, split: bool) -> Tensor:
    """The fp32 output of a @ b^T by the Hopper kernel of statistics and stored epilogues."""
    from rlk_kernels.matmul.hopper.epilogue import split_product

    a, b = operands(depth(split), dtype, device)
    out = torch.full((129, 264), float("nan"), device=device, dtype=torch.float32)
    segment, last = segments(depth(split), dtype, torch.float32)
    plan = MatmulPlan(
        kernel="hopper_split", tile=SPLIT, segment=segment, last_segment=last, programs=4,
        stages=SPLIT.stages, overlap=0, tma_store=False, wide=264,
    )  # fmt: skip
    split_product(plan, a, b, None, out)
    return out


def _checks(
    dtype: torch.dtype, device: torch.device, split: bool
) -> list[tuple[Tile | str, Callable[[], Tensor]]]:
    """What must have the bits of SAFE, by tile or name; some have its first columns alone."""
    bits = functools.partial(tile_bits, dtype=dtype, device=device, split=split)
    checks: list[tuple[Tile | str, Callable[[], Tensor]]]
    checks = [(tile, functools.partial(bits, tile)) for tile in product_tiles(facts(device).cuda)]
    checks.append((PICK, functools.partial(bits, PICK, pointers=True)))
    if not split:  # `accumulate` never splits
        checks += [(x, functools.partial(partial_bits, x, dtype, device)) for x in partial_tiles()]
    if facts(device).gluon:
        logits = functools.partial(hopper_logits_bits, dtype, device, split)
        checks.append(("hopper/epilogue.py", logits))
        if not split:
            partials = functools.partial(hopper_partial_bits, dtype, device)
            checks.append(("hopper/accumulate.py", partials))
    return checks


HALVES = (torch.bfloat16, torch.float16)


def compile_ahead(
    device: torch.device, dtypes: Iterable[torch.dtype], split: bool, wait: bool = True
) -> None:
    """Compile what the check runs."""
    with compiled_ahead(device, wait) as ahead:
        for dtype in dtypes if ahead else ():
            tile_bits(SAFE, dtype, device, split=split)
            for _, run in _checks(dtype, device, split):
                run()


@functools.cache
def compile_check(device: torch.device, dtype: torch.dtype, split: bool) -> None:
    """Have threads compile what the checks run that the first product of `dtype` will ask for."""
    for wanted in (False, True)[: 1 + split] if dtype in HALVES else ():
        if not held_before(device, dtype, wanted):
            compile_ahead(device, (dtype,), wanted, wait=False)


def disagreements(
    device: torch.device, split: bool = False, dtypes: Iterable[torch.dtype] = HALVES
) -> list[tuple[Tile | str, torch.dtype]]:
    """The tiles in use, and kernels with their own tile, whose bits differ from SAFE's."""
    differing = []
    compile_ahead(device, dtypes, split)
    for dtype in dtypes:
        expected = tile_bits(SAFE, dtype, device, split=split)
        for what, run in _checks(dtype, device, split):
            bits = run()
            if not torch.equal(bits, expected[:, : bits.shape[1]]):
                differing.append((what, dtype))
    return differing


def holds(
    device: torch.device, split: bool = False, dtypes: Iterable[torch.dtype] = HALVES
) -> bool:
    """Whether all tiles agree on `device`; checked once a process, outside CUDA graph capture."""
    return all(_checked(device, dtype, split) for dtype in dtypes)


@functools.cache
def _checked(device: torch.device, dtype: torch.dtype, split: bool) -> bool:
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rlk_kernels checks its tiles at the first product on a device, which was inside a "
            "CUDA graph capture; call rlk_kernels.warm_up(device) before capturing"
        )
    if on_gpu and held_before(device, dtype, split):
        return True
    differing = disagreements(device, split, (dtype,))
    if differing:
        name = torch.cuda.get_device_name(device) if on_gpu else device.type
        warnings.warn(
            f"tiles give different bits on {name} with Triton {triton.__version__} "
            f"({len(differing)} of them, first {differing[0]}); using {SAFE} for every M",
            TilesDiffer,
            stacklevel=2,
        )
    elif on_gpu:
        _note(device, dtype, split)
    return not differing


_NOTE = "tiles_agree"


def _notes(device: torch.device, dtype: torch.dtype, split: bool) -> Any:
    """Triton's folder for what was found with all that could change it."""
    gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    compilers = triton.__version__, torch.version.cuda, nvrtc.version() if facts(device).cuda else 0
    key = repr((_NOTE, gpu, compilers, str(dtype), split, sources_digest()))
    return disk_cache(hashlib.sha256(key.encode()).hexdigest())


def held_before(device: torch.device, dtype: torch.dtype, split: bool) -> bool:
    """Whether an earlier process noted that all tiles agree on such a GPU."""
    return not interpreting() and _notes(device, dtype, split).get_file(_NOTE) is not None


def _note(device: torch.device, dtype: torch.dtype, split: bool) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next process checks again
        _notes(device, dtype, split).put("", _NOTE, binary=False)


def trusted(device: torch.device, dtype: torch.dtype, split: bool = False) -> bool:
    """Whether products of `dtype` may take any tile: fp32 has one, and the interpreter adds one by
    one. What is only compiled may be wanted by products that come after the check."""
    if dtype == torch.float32 or interpreting() or compiles_only():
        return True
    return holds(device, False, (dtype,)) and (not split or holds(device, True, (dtype,)))
