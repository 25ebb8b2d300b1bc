"""Memory that is allocated past torch's dispatch, and laid out in one piece."""

from typing import Any

import pytest
import torch
from rlk_kernels import memory, private_api


@pytest.mark.parametrize("shape", [(3, 4), (0,), (2, 0, 5)])
def test_empty_is_torchs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(private_api, "allocate", lambda *args: asked.append(args))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(private_api, "current_device", lambda: 0)
    like = torch.empty(shape, dtype=torch.bfloat16)
    x = memory.empty(like.shape, torch.bfloat16, torch.device("cpu"))
    assert (x.shape, x.stride(), x.dtype) == (like.shape, like.stride(), like.dtype)
    memory.empty(like.shape, torch.bfloat16, torch.device("cuda", 0))
    assert asked == [(tuple(like.shape), like.stride(), torch.bfloat16)]


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is allocated past torch's dispatch, in memory of the CPU."""
    made: list[torch.Tensor] = []

    def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(private_api, "allocate", allocate)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(private_api, "current_device", lambda: 0)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.float64])
def test_several_lie_apart_in_one_piece_of_memory(
    dtype: torch.dtype, gpu_memory: list[torch.Tensor]
) -> None:
    shapes = (3, 5), (0,), (7,), (), (2, 2, 1), (0, 4)
    tensors = memory.empties(shapes, dtype, torch.device("cuda", 0))
    assert [(x.shape, x.stride(), x.dtype) for x in tensors] == [
        (x.shape, x.stride(), x.dtype) for x in (torch.empty(s, dtype=dtype) for s in shapes)
    ]
    (whole,) = gpu_memory
    first = whole.data_ptr()
    assert all((x.data_ptr() - first) % 16 == 0 for x in tensors)
    for i, x in enumerate(tensors):
        x.fill_(i)
    assert all(bool((x == i).all()) for i, x in enumerate(tensors))
    assert whole.numel() * whole.element_size() <= sum(
        x.numel() * x.element_size() + 15 for x in tensors
    )


def test_several_are_changed_in_place_as_any_tensor(gpu_memory: list[torch.Tensor]) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            y, z = memory.empties((x.shape, x.shape), x.dtype, torch.device("cuda", 0))
            return torch.mul(x, 2, out=y), torch.mul(x, 3, out=z)

        @staticmethod
        def backward(ctx: Any, *g: torch.Tensor) -> Any:
            return 2 * g[0] + 3 * g[1]

    x = torch.ones(4, requires_grad=True)
    y, z = Double.apply(x)
    assert not y._is_view()
    y *= 5
    (y + z).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [13.0] * 4
    assert len(gpu_memory) == 1
