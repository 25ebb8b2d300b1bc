"""The kernels' tests on an NVIDIA GPU. Without one they fail: they are asked for by name only."""

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "tests" / "kernels")]


@pytest.fixture(autouse=True)
def a_gpu():
    assert torch.cuda.is_available(), "these tests need an NVIDIA GPU"


@pytest.fixture(autouse=True)
def nan_filled_outputs(monkeypatch):
    """Every torch.empty on the GPU comes back full of NaN: an element left unwritten shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x):
        if x.is_cuda and not x.requires_grad:
            x.fill_(float("nan") if x.is_floating_point() else -1)
        return x

    monkeypatch.setattr("rlk_kernels.private_api.allocate", None)  # past torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))


@pytest.fixture(autouse=True)
def plans_are_made_anew(monkeypatch):
    from planning import uncached  # after the paths above

    uncached(monkeypatch)
