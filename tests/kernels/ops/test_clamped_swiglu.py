"""`clamped_swiglu` of views: GPT-OSS's gates and ups lie between each other."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand

HOW = {"alpha": 1.702, "limit": 1.5}


def results(gate: torch.Tensor, up: torch.Tensor, backend: str) -> list[torch.Tensor]:
    """y and the gradients of gate and up."""
    leaves = [gate.detach().requires_grad_(), up.detach().requires_grad_()]
    y = rk.clamped_swiglu(*leaves, **HOW, backend=backend)
    return [y, *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view(y.shape))]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(3, 5, 2 * 2100), (1, 2 * 2100), (7, 2)])
def test_views_have_the_bits_of_copies(backend: str, shape: tuple[int, ...]) -> None:
    x = rand(*shape, dtype=torch.float32, device="cpu", seed=3)
    gate, up = x[..., ::2], x[..., 1::2]
    halves = x.chunk(2, -1)
    for pair in ((gate, up), halves, (gate, up.contiguous()), (gate[..., :1].expand_as(up), up)):
        views, copies = (results(*of, backend) for of in (pair, [t.contiguous() for t in pair]))
        for got, want in zip(views, copies, strict=True):
            assert torch.equal(got, want)
