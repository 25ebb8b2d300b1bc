"""The tile-invariance self-check: every tile in use gives the same fp32 bits on this machine.

`linear` picks its tile by M. That is batch-invariant only as long as a tensor core adds the
products of one output element in the same order for every tile shape, as an H200 with Triton 3.6
does. Another GPU or another Triton may not, so the first bf16 and the first fp16 product on a
device run this check, and the first one with split accumulation (`split.py`) runs it again with
split accumulation. If the check fails, the library warns and uses one tile, `tiles.SAFE`, for
every M. A passed check is noted in Triton's cache for this kind of GPU, these compilers and these
sources. Processes that find the note do not compile some 90 kernels for the check alone.

    tiles of                         are run by
    products                         the kernel that launches them
    `accumulate`                     its kernel: partial accumulators show the sums before rounding
    `accumulate` on Hopper           its kernel, likewise
    statistics, stored epilogues     the product kernel with the same tile, which stores its sums;
                                     on Hopper their own kernel, which stores plain logits instead
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
from rlk_kernels.matmul.accumulate.plan import PartialProduct, lo_accumulator
from rlk_kernels.matmul.launch import launch
from rlk_kernels.matmul.plan import MatmulPlan, plan_tile, shape_of
from rlk_kernels.matmul.split import segments
from rlk_kernels.matmul.tiles import PICK, SAFE, SPLIT, Tile, partial_tiles, product_tiles
from rlk_kernels.private_api import disk_cache
from rlk_kernels.sources import sources_digest


class TilesDiffer(RuntimeWarning):
    """Two tile shapes gave different bits on this device: one tile is used for everything."""


def operands(k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The operands a[129, K] and b[264, K], the same at every call."""
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(129, k, generator=generator).to(device, dtype)
    return a, torch.randn(264, k, generator=generator).to(device, dtype)


def sum_length(split: bool) -> int:
    """K of the check: one segment, or two with split accumulation."""
    return 1000 if split else 760


def tile_bits(
    tile: Tile, dtype: torch.dtype, device: torch.device, *, split=False, pointers=False
) -> Tensor:
    """The fp32 output of a @ b^T with `tile` in the product kernel."""
    a, b = operands(sum_length(split), dtype, device)
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
    """The partial accumulators of `accumulate` before its last call, with `tile`."""
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
    a, b = operands(sum_length(False), dtype, device)
    out = torch.full((129, columns), float("nan"), device=device, dtype=dtype)
    return PartialProduct(
        a=a, b=b[:columns].mT.contiguous(), out=out, lo=lo_accumulator(out, 2), trans_a=False,
        first=True, last=False,
    )  # fmt: skip


def hopper_partial_bits(dtype: torch.dtype, device: torch.device) -> Tensor:
    """`partial_bits` of the first 256 columns, by the kernel for Hopper."""
    from rlk_kernels.matmul.hopper.accumulate import stored_partials, sum_hopper

    x = _partial(dtype, device, accumulate.COLUMNS)
    tiles = accumulate.tiles_of(accumulate.slice_of(x, facts(device)), accumulate.COLUMNS)
    plan = accumulate.AccumulatePlan(
        slices=(accumulate.SlicePlan(kernel="hopper", width=accumulate.COLUMNS),),
        shared=accumulate.SharedLaunch(
            order=(0,), programs=tiles, everyone=tiles, heavy=0, ahead=0
        ),
    )
    sum_hopper(plan, (x,))
    return stored_partials(x)


def hopper_logits_bits(dtype: torch.dtype, device: torch.device, split: bool) -> Tensor:
    """The fp32 output of a @ b^T by the Hopper kernel of statistics and stored epilogues."""
    from rlk_kernels.matmul.hopper.epilogue import split_product

    a, b = operands(sum_length(split), dtype, device)
    out = torch.full((129, 264), float("nan"), device=device, dtype=torch.float32)
    segment, last = segments(sum_length(split), dtype, torch.float32)
    plan = MatmulPlan(
        kernel="hopper_split", tile=SPLIT, segment=segment, last_segment=last, programs=4,
        stages=SPLIT.stages, overlap=0, tma_store=False, wide=264,
    )  # fmt: skip
    split_product(plan, a, b, None, out)
    return out


def _checks(
    dtype: torch.dtype, device: torch.device, split: bool
) -> list[tuple[Tile | str, Callable[[], Tensor]]]:
    """(Tile or name, function) of all that must give the bits of SAFE, or those of its first
    columns."""
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
    """Compile the kernels that the check runs."""
    with compiled_ahead(device, wait) as ahead:
        for dtype in dtypes if ahead else ():
            tile_bits(SAFE, dtype, device, split=split)
            for _, run in _checks(dtype, device, split):
                run()


@functools.cache
def compile_check(device: torch.device, dtype: torch.dtype, split: bool) -> None:
    """Have threads compile the checks that the first product of `dtype` will need."""
    for wanted in (False, True)[: 1 + split] if dtype in HALVES else ():
        if not noted_earlier(device, dtype, wanted):
            compile_ahead(device, (dtype,), wanted, wait=False)


def disagreements(
    device: torch.device, split: bool = False, dtypes: Iterable[torch.dtype] = HALVES
) -> list[tuple[Tile | str, torch.dtype]]:
    """The tiles in use, and the kernels with a tile of their own, whose bits differ from SAFE's."""
    differing = []
    compile_ahead(device, dtypes, split)
    for dtype in dtypes:
        expected = tile_bits(SAFE, dtype, device, split=split)
        for what, run in _checks(dtype, device, split):
            bits = run()
            if not torch.equal(bits, expected[:, : bits.shape[1]]):
                differing.append((what, dtype))
    return differing


def tiles_agree(
    device: torch.device, split: bool = False, dtypes: Iterable[torch.dtype] = HALVES
) -> bool:
    """Whether all tiles agree on `device`. It is checked once in a process, outside CUDA graph
    capture."""
    return all(_checked(device, dtype, split) for dtype in dtypes)


@functools.cache
def _checked(device: torch.device, dtype: torch.dtype, split: bool) -> bool:
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "rlk_kernels checks its tiles at the first product on a device, and that product was "
            "inside a CUDA graph capture; call rlk_kernels.warm_up(device) before capturing"
        )
    if on_gpu and noted_earlier(device, dtype, split):
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
        _write_note(device, dtype, split)
    return not differing


_NOTE = "tiles_agree"


def _notes(device: torch.device, dtype: torch.dtype, split: bool) -> Any:
    """The folder of Triton's cache for notes on this GPU, with these compilers and sources."""
    gpu = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    compilers = triton.__version__, torch.version.cuda, nvrtc.version() if facts(device).cuda else 0
    key = repr((_NOTE, gpu, compilers, str(dtype), split, sources_digest()))
    return disk_cache(hashlib.sha256(key.encode()).hexdigest())


def noted_earlier(device: torch.device, dtype: torch.dtype, split: bool) -> bool:
    """Whether an earlier process noted that all tiles agree on such a GPU."""
    return not interpreting() and _notes(device, dtype, split).get_file(_NOTE) is not None


def _write_note(device: torch.device, dtype: torch.dtype, split: bool) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next process checks again
        _notes(device, dtype, split).put("", _NOTE, binary=False)


def trusted(device: torch.device, dtype: torch.dtype, split: bool = False) -> bool:
    """Whether products of `dtype` may use any tile. fp32 has one tile, the interpreter adds one by
    one, and kernels that are only compiled may be needed after the check."""
    if dtype == torch.float32 or interpreting() or compiles_only():
        return True
    agree = functools.partial(tiles_agree, device, dtypes=(dtype,))
    return agree() and (not split or agree(split=True))
