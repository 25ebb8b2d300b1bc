"""Weights in blocks of fp8, by the quantiser that trainers and rollout engines share."""

import numpy as np
import pytest
import torch
from rlk_kernels.block_fp8 import dequantise, fake_quantise, quantise
from rlk_kernels.errors import UnsupportedDtype, UnsupportedShape

from rlk_align.model import block_fp8
from rlk_align.weights import quantiser

SIZES = [(1, 1), (64, 128), (65, 129), (257, 63), (192, 512)]
BLOCKS = [(64, 64), (128, 128), (1, 128)]


def weight(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    w = torch.randn(rows, columns, generator=generator) * 0.05
    w[0, 0] = 0.0
    return w.to(dtype)


def e4m3(x: np.ndarray) -> np.ndarray:
    """float64 rounded to e4m3, ties to even: steps of 2^(e - 3), and of 2^-9 below 2^-6."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 2.0**-20))), -6.0)
    step = 2.0 ** (exponent - 3)
    return np.clip(np.rint(x / step) * step, -448.0, 448.0)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_each_block_is_quantised_by_its_largest_entry(
    size: tuple[int, int], block: tuple[int, int]
) -> None:
    w = weight(*size)
    values, scales = quantise(w, block)
    exact, found = w.double().numpy(), values.double().numpy()
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            largest = np.float32(max(np.abs(exact[at]).max(), 1e-12))
            scale = largest / np.float32(448.0)
            assert scales[i, j].item() == scale
            divided = (exact[at].astype(np.float32) / scale).astype(np.float64)
            assert (found[at] == e4m3(divided)).all()
    assert values.shape == w.shape


@pytest.mark.parametrize("size", SIZES)
def test_a_block_does_not_depend_on_the_others(size: tuple[int, int]) -> None:
    w = weight(*size)
    values, scales = quantise(w, (64, 64))
    for i in range(scales.shape[0]):
        alone, scale = quantise(w[i * 64 : (i + 1) * 64], (64, 64))
        assert torch.equal(alone.float(), values[i * 64 : (i + 1) * 64].float())
        assert torch.equal(scale, scales[i : i + 1])


def test_scales_that_are_powers_of_two_are_rounded_up() -> None:
    w = weight(130, 130)
    _, usual = quantise(w, (64, 64))
    values, scales = quantise(w, (64, 64), powers_of_two=True)
    assert (torch.frexp(scales).mantissa == 0.5).all()
    assert ((usual <= scales) & (scales < 2 * usual)).all()
    assert (values.float().abs() <= 448).all()
    exact = torch.full((64, 64), 448.0 * 2**-7)
    assert quantise(exact, (64, 64), powers_of_two=True)[1].item() == 2**-7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_dequantised_weight_is_each_product_rounded_once(dtype: torch.dtype) -> None:
    values, scales = quantise(weight(65, 129), (64, 64))
    found = dequantise(values, scales, dtype, (64, 64))
    wide = np.kron(scales.numpy(), np.ones((64, 64), dtype=np.float32))[:65, :129]
    product = values.float().numpy() * wide
    assert found.dtype == dtype
    assert torch.equal(found, torch.from_numpy(product).to(dtype))


def test_the_gradient_of_a_fake_quantised_weight_is_that_of_its_result() -> None:
    w = weight(65, 129, torch.float32).requires_grad_()
    x, upstream = torch.randn(3, 129), torch.randn(3, 65)
    fake = fake_quantise(w, (64, 64))
    assert torch.equal(fake, dequantise(*quantise(w, (64, 64)), torch.float32, (64, 64)))
    assert not torch.equal(fake, w)
    (x @ fake.T).backward(upstream)
    same = fake.detach().clone().requires_grad_()
    (x @ same.T).backward(upstream)
    assert torch.equal(w.grad, same.grad)


def test_nan_stays_nan() -> None:
    w = weight(64, 64)
    w[3, 5] = float("nan")
    assert fake_quantise(w, (64, 64)).isnan().any()


def test_what_is_not_a_weight_in_blocks_is_refused() -> None:
    values, scales = quantise(weight(65, 129), (64, 64))
    with pytest.raises(UnsupportedShape, match=r"which has \[2, 3\]"):
        dequantise(values, scales[:1], block=(64, 64))
    with pytest.raises(UnsupportedDtype, match="not e4m3"):
        dequantise(weight(65, 129), scales, block=(64, 64))
    with pytest.raises(UnsupportedShape, match="a matrix"):
        quantise(torch.ones(3))
    with pytest.raises(UnsupportedShape, match="blocks of one entry"):
        quantise(weight(4, 4), (0, 64))
    with pytest.raises(UnsupportedDtype, match="not quantised"):
        quantise(torch.ones(4, 4, dtype=torch.int8))


@pytest.mark.parametrize("powers_of_two", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_tool_and_the_kernels_have_one_quantiser(
    size: tuple[int, int], powers_of_two: bool
) -> None:
    w = weight(*size)
    values, scales = quantise(w, (64, 64), powers_of_two)
    of_tool = quantiser.quantised(w, (64, 64), powers_of_two)
    assert torch.equal(of_tool[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(of_tool[1], scales)
    wide = block_fp8.dequantise(values, scales, (64, 64))
    assert torch.equal(wide, dequantise(values, scales, torch.float32, (64, 64)))
