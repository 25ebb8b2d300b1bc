"""A plan that calls of one shape share launches what a plan of the call's own would launch."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from rlk_kernels.launching import ShapeCache, shape_cache

pytest.importorskip("triton")
from rlk_kernels.ops.kv_cache import kernels as kv_cache
from rlk_kernels.ops.norm_add_norm import kernels as norm_add_norm
from rlk_kernels.ops.norm_rope import kernels as norm_rope
from rlk_kernels.ops.rms_norm import kernels as rms_norm
from rlk_kernels.ops.rope import kernels as rope

HALF, FULL = torch.bfloat16, torch.float32
POSITIONS, SLOTS = torch.arange(3), torch.arange(3)


def rows(m: int = 3, h: int = 64, wide: int = 0) -> torch.Tensor:
    """x[m, h] of rows that are `wide` elements longer."""
    return torch.zeros(m, h + wide, dtype=HALF)[:, :h]


def heads(count: int, t: int = 3, dim: int = 32, wide: int = 0, first: int = 0) -> torch.Tensor:
    """x[t, count, dim] of tokens that are `wide` elements longer, from element `first` on."""
    row = count * dim
    return torch.zeros(t, row + wide, dtype=HALF)[:, first : first + row].view(t, count, dim)


def cache(page: int = 4, heads: int = 2, blocks: int = 5, wide: int = 0) -> torch.Tensor:
    return torch.zeros(blocks, page, heads, 32 + wide, dtype=HALF)[..., :32]


NORM = {"eps": 1e-6, "one_plus": False}
OTHER_NORMS: list[dict[str, Any]] = [{"eps": 1e-5}, {"one_plus": True}]
HEADS = {
    "q": heads(4), "k": heads(2), "positions": POSITIONS, "frequency": torch.zeros(16),
    "scaling": None, "round_to": FULL, "interleaved": False,
}  # fmt: skip
OTHER_HEADS: list[dict[str, Any]] = [
    {"q": heads(6)}, {"k": heads(1)}, {"q": heads(4, wide=64)}, {"k": heads(2, wide=64)},
    {"q": heads(4, dim=16), "k": heads(2, dim=16), "frequency": torch.zeros(8)},
    {"frequency": torch.zeros(8)}, {"scaling": torch.zeros(1)}, {"round_to": HALF},
    {"interleaved": True},
    {"q": heads(4, 2500), "k": heads(2, 2500), "positions": torch.arange(2500)},
]  # fmt: skip
GAINS = {"q_weight": torch.zeros(32), "k_weight": torch.zeros(32)}
CASES: dict[str, tuple[ModuleType, Any, dict[str, Any], list[dict[str, Any]]]] = {
    "rms_norm": (
        rms_norm, rms_norm.forward,
        {"x": rows(), "residual": None, "weight": torch.zeros(64), "hf": False, **NORM},
        [
            {"x": rows(40)}, {"x": rows(h=128)}, {"x": rows(wide=64)}, {"residual": rows()},
            {"residual": rows(wide=64)}, {"x": heads(4, dim=64, wide=64)}, {"hf": True},
            *OTHER_NORMS,
        ],
    ),
    "norm_add_norm": (
        norm_add_norm, norm_add_norm.forward,
        {"x": rows(), "residual": rows(), "branch_weight": torch.zeros(64),
         "weight": torch.zeros(64), **NORM},
        [
            {"x": rows(40), "residual": rows(40)}, {"x": rows(h=128), "residual": rows(h=128)},
            {"x": rows(wide=64)}, {"residual": rows(wide=64)}, *OTHER_NORMS,
        ],
    ),
    "norm_rope": (
        norm_rope, norm_rope.norm_rotate, {**HEADS, **GAINS, "hf": False, **NORM},
        [
            *OTHER_HEADS, {"q": heads(4, wide=64, first=3)}, {"k": heads(2, wide=64, first=3)},
            {"q": heads(4, wide=3)}, {"hf": True}, *OTHER_NORMS,
        ],
    ),
    "rope": (rope, rope.rotate, {**HEADS, "sign": 1.0}, [*OTHER_HEADS, {"sign": -1.0}]),
    "write_kv_cache": (
        kv_cache, kv_cache.write,
        {"k": heads(2), "v": heads(2), "k_cache": cache(), "v_cache": cache(), "slots": SLOTS},
        [
            {"k": heads(2, wide=64)}, {"v": heads(2, wide=64)}, {"k_cache": cache(wide=32)},
            {"v_cache": cache(wide=32)}, {"k_cache": cache(8), "v_cache": cache(8)},
            {"k_cache": cache(blocks=6), "v_cache": cache(blocks=6)},
            {"k": heads(2, 9), "v": heads(2, 9), "slots": torch.arange(9)},
        ],
    ),
}  # fmt: skip
"""Operator -> its module, its function, arguments, and what other calls have in their place."""


def described(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


class Launches:
    """Takes the place of `launching.launch`."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(
        self, _: ShapeCache, kernel: Any, grid: tuple, arguments: tuple, options: dict
    ) -> None:
        self.made.append((kernel, grid, *map(described, arguments), options))


def launches(operator: str, alone: bool, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the calls of an operator launch, each with plans of its own or after the others."""
    module, run, usual, others = CASES[operator]
    launch = Launches()
    monkeypatch.setattr(module, "launch", launch)
    for each in ({}, *others, {}):
        if alone:
            shape_cache.cache_clear()
        run(**{**usual, **each})
    return launch.made


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    shape_cache.cache_clear()
    yield
    shape_cache.cache_clear()


@pytest.mark.parametrize("operator", CASES)
def test_a_shared_plan_launches_what_the_call_s_own_would(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = launches(operator, True, monkeypatch)
    assert len(expected) == len(CASES[operator][3]) + 2
    assert launches(operator, False, monkeypatch) == expected


@pytest.mark.parametrize("operator", CASES)
def test_a_plan_of_another_shape_is_noticed(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = launches(operator, True, monkeypatch)
    one = ShapeCache()
    monkeypatch.setattr(CASES[operator][0], "shape_cache", lambda *_: one)
    assert launches(operator, False, monkeypatch) != expected
