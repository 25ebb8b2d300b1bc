"""add_lora: rows and adapters that must not see each other, bit for bit.

T = rows   S = adapters   R = rank   K, N = in, out features
"""

from typing import Any

import pytest
import rlk_kernels as rk
import torch

T, S, R, K, N = 70, 3, 8, 100, 90
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Batch:
    """Rows of three adapters, the last of which is switched off, and of none."""

    def __init__(self, dtype: torch.dtype, backend: str) -> None:
        self.base, self.x = drawn(T, N, seed=1, dtype=dtype), drawn(T, K, seed=2, dtype=dtype)
        self.a, self.b = drawn(S, R, K, seed=3) * 0.1, drawn(S, N, R, seed=4)
        self.scales = torch.tensor([2.0, 0.3, 0.0])
        self.slots = torch.arange(T) % 5 - 1
        self.backend = backend

    def run(self, **changed: torch.Tensor) -> torch.Tensor:
        named = {"base": self.base, "x": self.x, "a": self.a, "b": self.b}
        named |= {"scales": self.scales, "slots": self.slots}
        return rk.add_lora(**(named | changed), backend=self.backend)

    def gradients(self, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of base, x, A and B, for an upstream gradient that a row keeps in every batch."""
        names = ("base", "x", "a", "b")
        leaves = {n: changed.get(n, getattr(self, n)).clone().requires_grad_() for n in names}
        y = self.run(**(changed | leaves))
        grads = torch.autograd.grad(y, list(leaves.values()), y.detach())
        return dict(zip(names, grads, strict=True))


@pytest.fixture(params=DTYPES, ids=str)
def batch(request: pytest.FixtureRequest, backend: str) -> Batch:
    return Batch(request.param, backend)


def test_a_row_without_an_adapter_is_that_of_base(batch: Batch) -> None:
    base = torch.full_like(batch.base, -0.0)
    base[5, 3] = float("nan")
    y = batch.run(base=base)
    bits = {2: torch.int16, 4: torch.int32}[base.element_size()]
    without = (batch.slots < 0) | (batch.slots > 1)
    assert 30 < int(without.sum()) < T
    assert torch.equal(y[without].view(bits), base[without].view(bits))
    assert not torch.equal(y[~without].view(bits), base[~without].view(bits))


def test_a_row_has_the_bits_that_it_has_alone_and_with_one_adapter(batch: Batch) -> None:
    y = batch.run()
    for t in (1, 2, 6, 64, 67):
        row, s = slice(t, t + 1), int(batch.slots[t])
        alone = {"base": batch.base[row], "x": batch.x[row], "slots": batch.slots[row]}
        assert torch.equal(batch.run(**alone), y[row])
        if s < 2:
            own = {n: getattr(batch, n)[s : s + 1] for n in ("a", "b", "scales")}
            one = rk.add_lora(alone["x"], alone["base"], **own, backend=batch.backend)
            assert torch.equal(one, y[row])
    order = torch.randperm(T, generator=torch.Generator().manual_seed(5))
    moved = {n: getattr(batch, n)[order] for n in ("base", "x", "slots")}
    assert torch.equal(batch.run(**moved), y[order])


def of_three(t: int, k: int, dtype: torch.dtype) -> dict[str, Any]:
    """Three projections of one x: three adapters of each, of which some are switched off."""
    widths = (40, 24, 9)
    named = {"x": drawn(t, k, seed=6, dtype=dtype), "base": drawn(t, 73, seed=7, dtype=dtype)}
    factors = {"a": drawn(3, S, R, k, seed=8) * 0.1, "b": drawn(S, 73, R, seed=9)}
    scales = torch.tensor([[2.0, 0.3, 0.0], [0.0, 1.0, 0.5], [1.0, 1.0, 1.0]])
    return named | factors | {"scales": scales, "slots": torch.arange(t) % 5 - 1, "widths": widths}


def one_by_one(given: dict[str, Any], backend: str) -> torch.Tensor:
    """The same by the halves of the operator for each projection."""
    widths, x, slots = given["widths"], given["x"], given["slots"]
    parts = zip(
        given["base"].split(widths, 1), given["a"], given["b"].split(widths, 1), given["scales"],
        strict=True,
    )  # fmt: skip
    added = []
    for base, a, b, scales in parts:
        h = rk.lora_shrink(x, a, scales, slots, backend=backend)
        added.append(rk.lora_expand(h, base, b, scales, slots, backend=backend))
    return torch.cat(added, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_projections_of_one_x_have_the_bits_of_each_alone(dtype: torch.dtype, backend: str) -> None:
    """And the segments of a sum, which few rows compute apart, are added in the order of the
    halves, which compute them one after another."""
    given = of_three(20, 1100, dtype)
    y = rk.add_lora(**given, backend=backend)
    assert torch.equal(y, one_by_one(given, backend))
    few = {n: x[:3] if n in ("x", "base", "slots") else x for n, x in given.items()}
    assert torch.equal(rk.add_lora(**few, backend=backend), y[:3])
    exchanged = given | {"a": given["a"][[1, 0, 2]]}
    assert not torch.equal(rk.add_lora(**exchanged, backend=backend), y)


def test_projections_of_one_x_have_the_gradients_of_each_alone(backend: str) -> None:
    given = of_three(9, 70, torch.bfloat16)
    names = ("base", "x", "a", "b")
    leaves = [{n: given[n].clone().requires_grad_() for n in names} for _ in range(2)]
    y = rk.add_lora(**(given | leaves[0]), backend=backend)
    each = one_by_one(given | leaves[1], backend)
    assert torch.equal(y, each)
    grads = (
        torch.autograd.grad(z, list(of.values()), y.detach())
        for z, of in zip((y, each), leaves, strict=True)
    )
    assert all(torch.equal(*pair) and bool(pair[0].any()) for pair in zip(*grads, strict=True))


def test_a_sum_is_of_segments_from_front_to_back() -> None:
    """The order that the operator's file states, of numbers whose sum depends on it."""
    k = 1100
    x, a = drawn(1, k, seed=10), torch.ones(1, 1, k)
    one = torch.ones(1)
    h = rk.lora_shrink(x, a, one, backend="triton")

    def in_order(numbers: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for number in numbers:
            total = total + number
        return total

    parts = torch.stack([in_order(part) for part in x[0].split(512)])
    assert torch.equal(h[0, 0], in_order(parts))
    assert not torch.equal(h[0, 0], in_order(x[0]))
    assert not torch.equal(h[0, 0], in_order(parts.flip(0)))
    y = rk.add_lora(x, torch.zeros(1, 1), a, torch.ones(1, 1, 1), one, backend="triton")
    assert torch.equal(y, h)


def test_many_rows_have_the_bits_of_few(backend: str) -> None:
    """Programs compute one segment of one slot for few rows, and all for many."""
    given = of_three(1100, 20, torch.bfloat16)
    whole = rk.add_lora(**given, backend=backend)
    for start in (0, 300, 1090):
        some = slice(start, start + 300)
        few = {n: x[some] if n in ("x", "base", "slots") else x for n, x in given.items()}
        assert torch.equal(rk.add_lora(**few, backend=backend), whole[some])


def test_nan_stays_with_its_row_and_its_adapter(batch: Batch) -> None:
    y, grads = batch.run(), batch.gradients()
    x, a = batch.x.clone(), batch.a.clone()
    x[2], a[1] = float("nan"), float("inf")  # row 2 is of adapter 1
    of_0 = batch.slots == 0
    assert torch.equal(batch.run(x=x, a=a)[of_0], y[of_0])
    assert not bool(batch.run(x=x, a=a)[batch.slots == 1].isfinite().any())
    spoiled = batch.gradients(x=x, a=a)
    assert torch.equal(spoiled["x"][of_0], grads["x"][of_0])
    assert torch.equal(spoiled["a"][0], grads["a"][0])
    assert torch.equal(spoiled["b"][0], grads["b"][0])
    assert not bool(spoiled["b"][1].isfinite().all())


def test_zeros_behind_a_rank_change_no_bit(batch: Batch) -> None:
    """vLLM pads all adapters to one rank."""
    a = torch.cat([batch.a, torch.zeros(S, 32 - R, K)], 1)
    b = torch.cat([batch.b, torch.zeros(S, N, 32 - R)], 2)
    assert torch.equal(batch.run(a=a, b=b), batch.run())
    wide, narrow = batch.gradients(a=a, b=b), batch.gradients()
    assert torch.equal(wide["x"], narrow["x"])
    assert torch.equal(wide["a"][:, :R], narrow["a"])
    assert torch.equal(wide["b"][..., :R], narrow["b"])


def test_the_factors_are_rounded_to_the_dtype_of_the_rows(batch: Batch) -> None:
    dtype = batch.x.dtype
    assert torch.equal(batch.run(a=batch.a.to(dtype), b=batch.b.to(dtype)), batch.run())
    grads = batch.gradients()
    assert grads["a"].dtype == grads["b"].dtype == torch.float32
    rounded = batch.gradients(a=batch.a.to(dtype), b=batch.b.to(dtype))
    assert torch.equal(rounded["b"], grads["b"].to(dtype))
    assert dtype == torch.float32 or not torch.equal(rounded["b"].float(), grads["b"])


def test_gradients_repeat_and_are_those_of_one_adapter_alone(batch: Batch) -> None:
    grads = batch.gradients()
    again = batch.gradients()
    assert all(torch.equal(grads[n], again[n]) for n in grads)
    assert not bool(grads["a"][2].any())
    for s in (0, 1):
        mine = batch.slots == s
        alone = {"base": batch.base, "x": batch.x, "slots": torch.where(mine, 0, -1)}
        alone |= {n: getattr(batch, n)[s : s + 1] for n in ("a", "b", "scales")}
        own = batch.gradients(**alone)
        assert torch.equal(own["a"][0], grads["a"][s])
        assert torch.equal(own["b"][0], grads["b"][s])
        assert torch.equal(own["x"][mine], grads["x"][mine])
        assert bool(own["b"].any())
    padded = {
        "base": torch.cat([batch.base, torch.zeros(9, N).to(batch.base)]),
        "x": torch.cat([batch.x, torch.zeros(9, K).to(batch.x)]),
        "slots": torch.cat([batch.slots, torch.ones(9).long()]),
    }
    longer = batch.gradients(**padded)
    assert torch.equal(longer["a"], grads["a"])
    assert torch.equal(longer["b"], grads["b"])
    assert torch.equal(longer["x"][:T], grads["x"])


def test_the_order_of_rows_changes_no_gradient_of_the_portable_backend() -> None:
    batch = Batch(torch.bfloat16, "torch")
    order = torch.randperm(T, generator=torch.Generator().manual_seed(6))
    moved = batch.gradients(**{n: getattr(batch, n)[order] for n in ("base", "x", "slots")})
    grads = batch.gradients()
    assert torch.equal(moved["a"], grads["a"])
    assert torch.equal(moved["b"], grads["b"])
    assert torch.equal(moved["x"], grads["x"][order])
