"""The product in CUDA C++ compiles for an H200, whatever its tile and its operands."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rlk_kernels import nvrtc
from rlk_kernels.matmul.hopper.product import source
from rlk_kernels.matmul.tile_costs import COSTS

TILES = [tile for tile in COSTS if tile.warp_specialized]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OPERANDS = {
    "bf16": (BF16, BF16, None, True),
    "fp16": (FP16, FP16, None, True),
    "a bias": (BF16, BF16, BF16, True),
    "a bias in fp32": (FP16, FP16, FP32, True),
    "fp32 results": (BF16, FP32, BF16, True),
    "rows that are not aligned": (BF16, BF16, BF16, False),
}


def compile_log(asked) -> tuple:
    """(what was asked, what ptxas said)."""
    tile, operands = asked
    kernel = source(tile, *operands)
    options = (*kernel.options, "--ptxas-options=-v")
    return asked, nvrtc.compile_source(kernel._replace(options=options))[1]


def faults(log: str) -> list[str]:
    """Registers that were spilled, arrays in local memory, wgmma that wait for each other."""
    return re.findall(r"[1-9]\d* bytes (?:stack|spill)|Potential Performance Loss", log)


FEW = ("a bias in fp32",)
"""What `make test-slow` compiles; `make test-slow-all` compiles all."""


@pytest.mark.parametrize(
    "operands",
    [o if o in FEW else pytest.param(o, marks=pytest.mark.whole_matrix) for o in OPERANDS],
)
def test_every_tile_has_the_registers_that_it_needs(operands):
    assert len(TILES) > 30
    with ThreadPoolExecutor(2) as threads:
        said = dict(threads.map(compile_log, [(tile, OPERANDS[operands]) for tile in TILES]))
    assert all("Used " in log for log in said.values())
    assert not {asked: found for asked, log in said.items() if (found := faults(log))}


def test_a_tile_that_is_too_wide_is_noticed():
    """Three groups have registers for 200 columns."""
    wide = next(t for t in TILES if t.groups == 3 and not t.swap)
    asked = wide.__class__(192, 208, 64, 4, 4, warp_specialized=True), OPERANDS["bf16"]
    with pytest.raises(nvrtc.KernelFailed, match="registers"):
        compile_log(asked)
    assert faults("16 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads")
