"""The digests of parameters by the kernel for GPUs, here in Triton's interpreter: they equal those
of torch's arithmetic, and every planted fault changes them."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math
from collections.abc import Callable

import pytest
import torch

from rlk_align.trace import digest
from rlk_align.trace.digest import digest_parameters

SHAPES = [(12, 7), (5,), (9, 1030), (1,), (2, 3, 4), (12, 7), (1, 12, 7)]


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    def digests(named: list[tuple[str, torch.Tensor]]) -> dict[str, str]:
        with monkeypatch.context() as patch:
            patch.setattr(digest, "_has_kernel", lambda _device, dtype: dtype != torch.float64)
            return digest_parameters(named)

    return digests


def parameters(dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    return [(f"{i}", torch.randn(s, generator=made).to(dtype)) for i, s in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_kernels_digests_are_those_of_torch(by_kernel: Callable, dtype: torch.dtype) -> None:
    named = parameters(dtype)
    named[0][1][1, 2], named[0][1][2, 2], named[2][1][3, 1029] = -0.0, math.inf, -math.inf
    transposed = named[0][1].T
    unaligned = torch.randn(1 + 12 * 16).to(dtype)[1:].view(12, 16)
    named += [("transposed", transposed), ("unaligned", unaligned)]
    assert list(by_kernel(named).items()) == list(digest_parameters(named).items())
    assert by_kernel([]) == {}


def test_a_nan_keeps_its_bits(by_kernel: Callable) -> None:
    weight = torch.ones(4, 4, dtype=torch.bfloat16)
    weight[2, 1] = math.nan
    named = [("weight", weight)]
    assert by_kernel(named) == digest_parameters(named)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_bit_and_each_place_counts(by_kernel: Callable, dtype: torch.dtype) -> None:
    """A flipped bit, two swapped elements or two swapped rows, within a pair of elements and across
    the blocks that a program reads. All digests differ; those of other parameters stay."""
    named = [("a", torch.ones(3, 600, dtype=dtype)), *parameters(dtype)[2:3]]
    other = torch.randn(3, 600, generator=torch.Generator().manual_seed(1)).to(dtype)
    named.append(("b", other))
    right = by_kernel(named)
    bits = other.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    seen = {right["b"]}
    for bit in range(8 * other.element_size() - 1):
        for place in ((0, 0), (1, 511), (2, 512), (2, 599)):
            bits[place] ^= 1 << bit
            found = by_kernel([("b", other)])["b"]
            bits[place] ^= 1 << bit
            assert found not in seen, (bit, place)
            seen.add(found)
    for one, two in (*(((0, 0), (0, 1)), ((1, 1), (1, 2)), ((0, 5), (0, 517)), ((0, 3), (2, 3))),):
        swapped = other.clone()
        swapped[one], swapped[two] = other[two], other[one]
        found = by_kernel([named[0], named[1], ("b", swapped)])
        assert found.pop("b") not in seen, (one, two)
        assert found.items() <= right.items()
    assert by_kernel([("b", other[[1, 0, 2]])])["b"] not in seen
    assert by_kernel(named) == right
