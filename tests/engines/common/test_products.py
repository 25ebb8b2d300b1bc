"""Weights that are read through live products: healthy ones, stale copies, emptied parameters."""

import pytest
import torch
from torch.nn.functional import linear

from rlk_align.engines.common.layout import even
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.products import COLUMNS, weights_in_use
from rlk_align.engines.common.weights import Parameter

ROWS, WIDTH = 10, 2 * COLUMNS + 3


class Head(torch.nn.Module):
    """A product that computes with `copy`, and a parameter beside it."""

    def __init__(self, weight: torch.Tensor, copy: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.copy, self.input_size = copy, WIDTH

    def apply(self, _module: object, x: torch.Tensor, bias: object) -> torch.Tensor:
        assert bias is None
        return linear(x.to(self.copy.dtype), self.copy)


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    made[0, :3] = torch.tensor([-0.0, 1e-30, 1e30])
    return made


def read(head: Head) -> LiveParameter:
    model = torch.nn.ModuleDict({"lm_head": head})
    plan = [Parameter("lm_head.weight", even("lm_head", ROWS, 1), 0)]
    (found,) = weights_in_use(plan, model, lambda _: (head, "apply"), lambda x: [x])
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_copy_that_fits_is_the_parameter(dtype: torch.dtype) -> None:
    w = weight(dtype).nan_to_num(posinf=1.0)
    for copy in (w, w.clone(), w.float()):
        found = read(Head(w, copy))
        assert (found.derived, found.held) == ("", None)
        assert torch.equal(found.value, w)


@pytest.mark.parametrize("column", [0, COLUMNS, WIDTH - 1])
def test_one_stale_entry_is_seen(column: int) -> None:
    stale = weight()
    stale[7, column] *= 1 + 2**-7
    found = read(Head(weight(), stale))
    assert found.derived == "lm_head"
    assert found.held is not None
    assert torch.equal(found.held, weight())
    assert torch.equal(found.value, stale)
    assert found.value.dtype == torch.bfloat16


def test_bits_that_the_parameter_cannot_have_are_kept() -> None:
    finer = weight().float()
    finer[3, 5] *= 1 + 2**-20
    found = read(Head(weight(), finer))
    assert found.derived == "lm_head"
    assert torch.equal(found.value, finer)


def test_an_emptied_parameter_is_read_from_its_product() -> None:
    found = read(Head(torch.empty(0, dtype=torch.bfloat16), weight()))
    assert (found.derived, found.held) == ("lm_head", None)
    assert torch.equal(found.value, weight())
