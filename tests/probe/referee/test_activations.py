"""The inputs of products on a grid of e4m3, against torch's own product of e4m3 and by hand."""

import pytest
import torch

from rlk_align.probe.referee.activations import E4M3_UNIT, on_grid
from rlk_align.probe.referee.weights import NotRefereed
from rlk_align.trace.schema import Grid

E4M3 = torch.float8_e4m3fn
GROUP, TOKEN = Grid(columns=128), Grid(columns=0)


def rows(n: int = 32, width: int = 256) -> torch.Tensor:
    random = torch.Generator().manual_seed(3)
    x = torch.randn(n, width, generator=random) * torch.randn(n, 1, generator=random).exp()
    return x.bfloat16().double()


def by_hand(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """One entry after another."""
    out = torch.zeros_like(x)
    size = grid.columns or x.shape[1]
    for i, row in enumerate(x.float()):
        for start in range(0, len(row), size):
            part = row[start : start + size]
            scale = part.abs().max() / torch.tensor(448.0)
            if grid.powers_of_two:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            q = torch.stack([(v / scale).to(E4M3) for v in part])
            out[i, start : start + size] = q.double() * scale.double()
    return out


@pytest.mark.parametrize("grid", [GROUP, TOKEN, Grid(columns=128, powers_of_two=True)])
def test_each_entry_is_rounded_by_the_scale_of_its_group(grid: Grid) -> None:
    x = rows()
    got, variance = on_grid(x, grid)
    near, wanted = variance > 0, by_hand(x, grid)
    assert torch.equal(got[~near], wanted[~near])
    # A value near the middle of two is that middle, and its variance reaches both.
    assert torch.equal((got - wanted)[near].square().float(), variance[near].float())
    assert 0 < near.double().mean() < 0.2
    error = ((got - x).square().mean() / x.square().mean()).sqrt()
    assert error < E4M3_UNIT


def test_torch_multiplies_by_the_same_rows() -> None:
    x, random = rows(), torch.Generator().manual_seed(4)
    weight = torch.randn(48, x.shape[1], generator=random).to(E4M3)
    got, variance = on_grid(x, TOKEN)
    scale = x.abs().amax(dim=1, keepdim=True).float() / torch.tensor(448.0)
    quantised = (x.float() / scale).to(E4M3)
    ones = torch.ones(1, len(weight))
    out = torch._scaled_mm(quantised, weight.T, scale, ones, out_dtype=torch.bfloat16).double()
    exact = got @ weight.double().T
    unit = (2.0**-9 * exact.abs()).square() + variance @ weight.double().square().T
    assert (((out - exact).square() / unit).mean()).sqrt() < 1.0
    other, _ = on_grid(x, GROUP)
    wrong = other @ weight.double().T
    assert (((out - wrong).square() / unit).mean()).sqrt() > 3.0


def test_a_static_scale_cuts_off_what_is_beyond_its_range() -> None:
    x = torch.tensor([[1.0, 448.0, 1000.0, -1000.0]], dtype=torch.float64)
    assert on_grid(x, Grid(columns=0, scale=1.0))[0].tolist() == [[1.0, 448.0, 448.0, -448.0]]
    assert on_grid(x, Grid(columns=0, scale=4.0))[0].tolist() == [[1.0, 448.0, 1024.0, -1024.0]]


def test_zeros_stay_zeros() -> None:
    for grid in (GROUP, TOKEN):
        got, variance = on_grid(torch.zeros(2, 128, dtype=torch.float64), grid)
        assert not got.any()
        assert not variance.any()


def test_what_cannot_be_known_is_said() -> None:
    with pytest.raises(NotRefereed, match="depends on the other rows of a forward"):
        on_grid(rows(), Grid(columns=0, by_batch=True))
    with pytest.raises(NotRefereed, match="keeps fewer bits of a sum of fp8 products"):
        on_grid(rows(), Grid(columns=0, few_bits=True))
    with pytest.raises(NotRefereed, match="200 inputs are no whole groups of 128"):
        on_grid(rows()[:, :200], GROUP)
