"""What an engine makes of a checkpoint's weight in fp8, found again by the digests of its bits."""

from pathlib import Path

import pytest
import torch
from rlk_kernels.block_fp8 import quantise
from safetensors.torch import save_file

from rlk_align.compare.loaded_fp8 import (
    ONE_SCALE,
    ONLINE,
    REQUANTISED,
    STORED,
    Loaded,
    as_loaded,
)
from rlk_align.model.stored import StoredTensor
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.schema import QuantisedProduct

E4M3, MAX, SHAPE = torch.float8_e4m3fn, 448.0, (192, 256)
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def weight() -> torch.Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) / 16).bfloat16()


def found(
    folder: Path,
    stored: torch.Tensor | Pair,
    live: Pair,
    block: tuple[int, int],
    other: StoredTensor | None = None,
) -> Loaded | None:
    """How the live values and scales come from what a file has; `other`: what is fused with it."""
    path = folder / "model.safetensors"
    of = None
    if isinstance(stored, torch.Tensor):
        save_file({"w": stored}, path)
    else:
        save_file({"w": stored[0], "w_scale": stored[1].contiguous()}, path)
        of = StoredTensor(path, tuple(stored[1].shape), "F32", "w_scale")
    sizes = (block[0] or SHAPE[0], block[1] or SHAPE[1])
    tensor = StoredTensor(path, SHAPE, "BF16", "w", scales=of, block=sizes if of else (0, 0))
    product = QuantisedProduct(
        block=block,
        digests=(digest_parameter(live[0]), digest_parameter(live[1])),
        fused=["w", *(["other"] if other is not None else [])],
        grids=[],
        kernel="a kernel",
    )
    return as_loaded(tensor, [tensor, *([other] if other is not None else [])], product)


@pytest.mark.parametrize("block", [(128, 128), (0, 0), (1, 0)])
def test_a_weight_as_it_is_stored(
    tmp_path: Path, weight: torch.Tensor, block: tuple[int, int]
) -> None:
    stored = quantise(weight, (block[0] or 192, block[1] or 256))
    loaded = found(tmp_path, stored, stored, block)
    assert loaded is not None
    assert loaded.way == STORED
    assert loaded.whole.dtype == torch.float32
    moved = stored[0], stored[1] * 1.25
    assert found(tmp_path, stored, moved, block) is None
    values = stored[0].clone()
    values[3, 5] = -values[3, 5].float() + 1
    assert found(tmp_path, stored, (values, stored[1]), block) is None


def test_blocks_that_deepgemm_quantises_again(tmp_path: Path, weight: torch.Tensor) -> None:
    """As `requant_weight_ue8m0_inplace` of vLLM 0.26."""
    values, scales = quantise(weight, (128, 128))
    wide = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    whole = values.float() * wide
    padded = torch.zeros(256, 256)
    padded[:192] = whole
    blocks = padded.view(2, 128, 2, 128)
    most = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    powers = torch.exp2(torch.ceil(torch.log2(most / MAX)))
    again = (blocks * (1.0 / powers)).to(E4M3).view(256, 256)[:192].contiguous()
    loaded = found(tmp_path, (values, scales), (again, powers.view(2, 2)), (128, 128))
    assert loaded is not None
    assert loaded.way == REQUANTISED


def test_fused_weights_that_get_the_largest_scale(tmp_path: Path, weight: torch.Tensor) -> None:
    """As `requantize_with_max_scale` of vLLM 0.26, by way of float16."""
    values, scale = quantise(weight, SHAPE)
    largest = scale * 1.7
    half = values.to(torch.float16) * scale.reshape(())
    again = (half.float() * (1.0 / largest)).clamp(-MAX, MAX).to(E4M3)
    path = tmp_path / "other.safetensors"
    save_file({"o": values, "o_scale": largest}, path)
    of = StoredTensor(path, (1, 1), "F32", "o_scale")
    other = StoredTensor(path, SHAPE, "F8_E4M3", "o", scales=of, block=SHAPE)
    loaded = found(tmp_path, (values, scale), (again, largest), (0, 0), other)
    assert loaded is not None
    assert loaded.way == ONE_SCALE
    # Without another weight of that scale it is no scale of the checkpoint's.
    assert found(tmp_path, (values, scale), (again, largest), (0, 0)) is None


def test_a_scale_that_was_moved_a_little_is_no_way(tmp_path: Path, weight: torch.Tensor) -> None:
    """Its values are still those of the right scale."""
    values, scale = quantise(weight, SHAPE)
    assert found(tmp_path, weight, (values, scale), (0, 0)) is not None
    assert found(tmp_path, weight, (values, scale * 1.0001), (0, 0)) is None
    assert found(tmp_path, (values, scale), (values, scale * 1.0001), (0, 0)) is None


@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize("block", [(128, 128), (0, 0), (1, 0)])
def test_a_weight_that_is_quantised_as_it_is_loaded(
    tmp_path: Path, weight: torch.Tensor, block: tuple[int, int], divided: bool
) -> None:
    sizes = (block[0] or 192, block[1] or 256)
    values, scales = quantise(weight, sizes)
    if not divided:
        wide = scales.repeat_interleave(sizes[0], 0)[:192].repeat_interleave(sizes[1], 1)[:, :256]
        values = (weight.float() * wide.reciprocal()).clamp(-MAX, MAX).to(E4M3)
    loaded = found(tmp_path, weight, (values, scales), block)
    assert loaded is not None
    assert loaded.way == ONLINE
    other = weight.clone()
    other[0, 0] = 1.0
    assert found(tmp_path, other, (values, scales), block) is None
