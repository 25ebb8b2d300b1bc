"""Tensor maps that are cached for the next call."""

from types import SimpleNamespace

import pytest
import torch
from rlk_kernels.launching import ShapeCache

epilogue = pytest.importorskip("rlk_kernels.matmul.hopper.epilogue")


def test_a_map_has_the_rows_of_its_own_call(monkeypatch):
    """A chunk of rows may begin where a longer one did in another call."""
    launched = []
    monkeypatch.setattr(epilogue, "launch", lambda *launch: launched.append(launch[3][0]))
    monkeypatch.setattr(epilogue, "_constants", lambda *_: (1, (), ()))
    plan = SimpleNamespace(tile=SimpleNamespace(n=256, k=64), permuted=False, epilogue="statistics")
    hidden, weight = (torch.empty(n, 64, dtype=torch.bfloat16) for n in (300, 512))
    cache = ShapeCache()
    for last in (200, 300, 200):
        epilogue.hopper_tiles(plan, hidden[100:last], weight, *[None] * 7, (), (), cache)
    assert [x.shape[0] for x in launched] == [100, 200, 100]
    assert launched[0] is launched[2]
