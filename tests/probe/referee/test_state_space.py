"""The formulas of a state-space model against their definitions, written out in loops of float64,
and the variance of its steps against a derivative."""

import math

import numpy as np
import pytest
import torch

from rlk_align.probe.referee import state_space
from rlk_align.probe.referee.delta_net import DeltaShape, short_conv
from rlk_align.probe.referee.rounding import rounding_variance

OF = DeltaShape(key_heads=2, heads=4, key_width=3, width=5)
SKIP = torch.tensor([0.5, -1.0, 2.0, 0.0]).double()
ROUNDING = 1e-11


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def agree(got: torch.Tensor, want: torch.Tensor, rounding: float = ROUNDING) -> None:
    assert got.shape == want.shape
    error = (got - want).abs()
    assert error.numel()
    assert bool((error <= rounding * (1 + want.abs())).all()), float(error.max())


def operands(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, B and C side by side; dt; dt · A."""
    x = drawn(1, rows, 2 * OF.key_heads * OF.key_width + OF.heads * OF.width)
    dt = drawn(2, rows, OF.heads).abs()
    return x, dt, -drawn(3, 1, OF.heads).abs() * dt


def by_hand(x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """Every element of the state, one after another."""
    inner, keys = OF.heads * OF.width, OF.key_heads * OF.key_width
    out = torch.zeros(len(x), OF.heads, OF.width).double()
    for h in range(OF.heads):
        group = h // (OF.heads // OF.key_heads) * OF.key_width
        state = [[0.0] * OF.key_width for _ in range(OF.width)]
        for t, row in enumerate(x.tolist()):
            for v in range(OF.width):
                value, total = row[h * OF.width + v], 0.0
                for d in range(OF.key_width):
                    b, c = row[inner + group + d], row[inner + keys + group + d]
                    state[v][d] = math.exp(float(decay[t, h])) * state[v][d]
                    state[v][d] += float(dt[t, h]) * value * b
                    total += state[v][d] * c
                out[t, h, v] = total + float(SKIP[h]) * value
    return out.flatten(1)


@pytest.mark.parametrize("rows", [1, 2, 67])
def test_the_scan_is_its_definition(rows: int) -> None:
    x, dt, decay = operands(rows)
    every = torch.arange(rows)
    out, variance = state_space.scan(x, dt, decay, SKIP, every, OF, "bfloat16")
    agree(out, by_hand(x, dt, decay))
    assert variance.shape == out.shape
    assert bool((variance > 0).all())
    some = torch.tensor(sorted({0, rows // 2, rows - 1}))
    got = state_space.scan(x, dt, decay, SKIP, some, OF, "bfloat16")
    for part, whole in zip(got, (out, variance), strict=True):
        agree(part, whole[some])


def test_a_step_that_is_rounded_changes_rows_by_its_derivative() -> None:
    """The variance of steps is that of small independent errors of ln dt."""
    x, dt, decay = operands(12)
    every, small = torch.arange(12), 1e-6
    inner, keys = OF.heads * OF.width, OF.key_heads * OF.key_width
    values, b, c = x.split([inner, keys, keys], dim=1)
    each = OF.heads // OF.key_heads
    b, c = (y.reshape(12, OF.key_heads, -1).repeat_interleave(each, dim=1) for y in (b, c))
    values = values.reshape(12, OF.heads, OF.width)
    got = state_space._of_steps(values, b, c, dt, decay, every)
    want = torch.zeros_like(got)
    for r in range(12):
        factor = torch.ones(12, 1).double()
        factor[r] = 1 + small
        changed, usual = (
            state_space.scan(x, dt * f, decay * f, SKIP, every, OF, "bfloat16")[0]
            for f in (factor, torch.ones_like(factor))
        )
        want += ((changed - usual) / small).square().reshape_as(want)
    agree(got, want, 1e-4)


def test_the_step_and_its_decay_are_their_definitions() -> None:
    x, bias, a_log = drawn(4, 7, 3), drawn(5, 3), drawn(6, 3)
    dt, variance = state_space.time_step(x, bias, "bfloat16")
    agree(dt, (1 + (x + bias).exp()).log())
    slope = 1 / (1 + (-(x + bias)).exp())
    agree(variance, slope**2 * rounding_variance(x + bias, "bfloat16"))
    out, within = state_space.step_decay(dt, a_log)
    agree(out, -(a_log.exp()) * dt)
    assert 0 < float(within.max()) < float(out.abs().max()) * 1e-6


@pytest.mark.parametrize("groups", [1, 2])
def test_the_norm_follows_the_gate(groups: int) -> None:
    x, gate, weight, eps = drawn(7, 3, 8), drawn(8, 3, 8), drawn(9, 8), 1e-5
    out, variance = state_space.gated_then_normed(x, gate, weight, groups, eps, "bfloat16")
    for n in range(3):
        y = [
            float(a) * float(g) / (1 + math.exp(-float(g)))
            for a, g in zip(x[n], gate[n], strict=True)
        ]
        width = 8 // groups
        for i in range(8):
            part = y[i // width * width : (i // width + 1) * width]
            mean = sum(e * e for e in part) / width
            want = y[i] / math.sqrt(mean + eps) * float(weight[i])
            assert math.isclose(float(out[n, i]), want, rel_tol=1e-9)
    assert bool((variance > 0).all())


def test_a_gate_without_a_norm() -> None:
    x, gate = drawn(13, 3, 8), drawn(14, 3, 8)
    out, variance = state_space.silu_gate(x, gate, "bfloat16")
    want = [
        [float(a) * float(g) / (1 + math.exp(-float(g))) for a, g in zip(*rows, strict=True)]
        for rows in zip(x, gate, strict=True)
    ]
    agree(out, torch.tensor(want, dtype=torch.float64))
    # An engine may round the gate before the product.
    rounded = torch.nn.functional.silu(gate).bfloat16().double()
    error = (x * rounded - out).square().mean()
    assert 0.3 * variance.mean() < error < 3 * variance.mean()


def test_a_convolution_adds_its_bias() -> None:
    x, weight, bias = drawn(10, 5, 3), drawn(11, 3, 1, 4), drawn(12, 3)
    plain, _ = short_conv(x, weight, None, torch.arange(5), "bfloat16")
    with_bias, _ = short_conv(x, weight, bias, torch.arange(5), "bfloat16")
    total = plain.clone()
    for t in range(5):
        for channel in range(3):
            rows = [(t - 3 + j, j) for j in range(4) if t - 3 + j >= 0]
            y = sum(float(x[r, channel] * weight[channel, 0, j]) for r, j in rows)
            y += float(bias[channel])
            total[t, channel] = y / (1 + math.exp(-y))
    agree(with_bias, total)
