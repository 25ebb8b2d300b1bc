"""Logits and requests for the tests of `sample`, the comparison with float64, and chi-square.

T = rows   V = vocabulary
"""

import math

import rlk_kernels as rk
import torch
from rlk_kernels.ops.sample.operator import sample_ref
from torch import Tensor


def rows(t: int, v: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits with ties (16-bit numbers), holes at -inf, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(t, v, generator=generator) * torch.rand(t, 1, generator=generator) * 6
    x = x.to(torch.bfloat16).to(dtype)
    x[torch.rand(t, v, generator=generator) < 0.05] = -math.inf
    zero = torch.rand(t, v, generator=generator) < 0.1
    x[zero] = torch.where(torch.rand(t, v, generator=generator) < 0.5, 0.0, -0.0).to(dtype)[zero]
    x[:, 0] = 1.0  # a row has a token
    return x


def of_requests(t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (t,), generator=generator)
    return keys, torch.randint(0, 100_000, (t,), generator=generator)


def same(a: rk.Sampled, b: rk.Sampled) -> bool:
    return len(a.ids) > 0 and all(
        torch.equal(x.view(torch.int32) if x.dtype == torch.float32 else x,
                    y.view(torch.int32) if y.dtype == torch.float32 else y)
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def picked(result: rk.Sampled, index) -> rk.Sampled:
    return rk.Sampled(*(x[index] if len(x) else x for x in result))


def bound(x: Tensor, settings: dict, sign: int) -> tuple[int, Tensor]:
    """(the size of the kept set in float64 with limits moved by a rounding, its probabilities)."""
    p = settings["top_p"]
    moved = {**settings, "min_p": settings["min_p"] * (1 - sign * 1e-5)}
    moved["top_p"] = p if p >= 1 else min(1 - 1e-9, p + sign * 2e-6)
    probabilities = sample_ref(x, **moved)
    return int((probabilities > 0).sum()), probabilities


def check_random_rows(count: int, v: int, seed: int, backend: str, device: str = "cpu") -> None:
    """Compares each of `count` rows, with settings of its own, with float64."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator)

    x, where = rows(count, v, seed), of_requests(count, seed)
    settings = {
        "temperature": torch.where(uniform() < 0.1, 0.0, uniform() * 2 + 0.05),
        "top_k": torch.where(uniform() < 0.5, 0, (uniform() * v * 1.2).int()),
        "top_p": torch.where(uniform() < 0.5, 1.0, uniform()),
        "min_p": torch.where(uniform() < 0.5, 0.0, uniform() ** 4),
    }
    there = {name: y.to(device) for name, y in settings.items()}
    result = rk.sample(
        x.to(device), *(y.to(device) for y in where), **there, raw_logprobs=True, backend=backend
    )
    got = rk.Sampled(*(y.cpu() for y in result))
    kept = rk.kept_tokens(x.to(device), **there, backend=backend).cpu()
    for i in range(count):
        here = {name: float(y[i]) for name, y in settings.items()}
        here["top_k"] = int(settings["top_k"][i])
        fewest, most = (bound(x[i], here, sign)[0] for sign in (-1, 1))
        size, id = int(got.kept[i]), int(got.ids[i])
        assert fewest <= size <= most, (here, fewest, size, most)
        order = torch.sort(x[i] + 0.0, descending=True, stable=True).indices
        expected = torch.zeros(v, dtype=torch.bool)
        expected[order[:size]] = True
        assert torch.equal(kept[i], expected), here
        assert bool(kept[i, id])
        z = x[i].double() / (here["temperature"] or 1.0)
        inside = torch.log_softmax(z.masked_fill(~kept[i], -math.inf), 0)[id]
        share = torch.softmax(z, 0)[kept[i]].sum() if here["temperature"] else 1.0
        raw = torch.log_softmax(x[i].double(), 0)[id]
        for value, truth in (
            (got.logprobs[i], inside), (got.mass[i], share), (got.raw_logprobs[i], raw)
        ):  # fmt: skip
            assert abs(float(value) - float(truth)) <= 1e-5 + 1e-5 * abs(float(truth)), here


def improbable(observed: Tensor, expected: Tensor) -> bool:
    """Whether a chi-square as large as this one has a probability below 1e-6."""
    assert bool((observed[expected == 0] == 0).all())
    observed, expected = observed[expected > 0].double(), expected[expected > 0]
    square = float(((observed - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson and Hilferty: the cube root of chi-square over its freedom is nearly normal.
    spread = 2 / (9 * freedom)
    return ((square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) > 4.753
