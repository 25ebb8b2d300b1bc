"""The formulas of a gated delta net against their definitions, written out in loops of float64."""

import math

import numpy as np
import pytest
import torch

from rlk_align.probe.referee import delta_net
from rlk_align.probe.referee.delta_net import DeltaShape
from rlk_align.probe.referee.rounding import rounding_variance

OF = DeltaShape(key_heads=2, heads=4, key_width=3, width=5)
EPS = 1e-6
ROUNDING = 1e-11


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def agree(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    error = (got - want).abs()
    assert error.numel()
    assert bool((error <= ROUNDING * (1 + want.abs())).all()), float(error.max())


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def by_hand(x: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Every element of the state, one after another."""
    keys, out = OF.key_heads * OF.key_width, torch.zeros(len(x), OF.heads, OF.width).double()
    for h in range(OF.heads):
        group = h // (OF.heads // OF.key_heads)
        state = [[0.0] * OF.width for _ in range(OF.key_width)]
        for t, row in enumerate(x.tolist()):
            q = row[group * OF.key_width : (group + 1) * OF.key_width]
            k = row[keys + group * OF.key_width : keys + (group + 1) * OF.key_width]
            v = row[2 * keys + h * OF.width : 2 * keys + (h + 1) * OF.width]
            q, k = ([e / math.sqrt(sum(y * y for y in z) + EPS) for e in z] for z in (q, k))
            kept, beta = math.exp(float(g[t, h])), 1 / (1 + math.exp(-float(b[t, h])))
            state = [[kept * s for s in line] for line in state]
            for j in range(OF.width):
                u = beta * (v[j] - sum(k[d] * state[d][j] for d in range(OF.key_width)))
                for d in range(OF.key_width):
                    state[d][j] += k[d] * u
                total = sum(q[d] * state[d][j] for d in range(OF.key_width))
                out[t, h, j] = total / math.sqrt(OF.key_width)
    return out.flatten(1)


def operands(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = drawn(1, rows, 2 * OF.key_heads * OF.key_width + OF.heads * OF.width)
    return x, drawn(2, rows, OF.heads), -drawn(3, rows, OF.heads).abs()


@pytest.mark.parametrize("rows", [1, 2, 67])
def test_the_delta_rule(rows: int) -> None:
    x, b, g = operands(rows)
    everywhere = torch.arange(rows)
    out, variance = delta_net.delta_rule(x, b, g, everywhere, OF, EPS, "bfloat16")
    agree(out, by_hand(x, b, g))
    assert bool((variance > 0).all())
    some = everywhere[::3]
    again, of_some = delta_net.delta_rule(x, b, g, some, OF, EPS, "bfloat16")
    agree(again, out[some])
    agree(of_some, variance[some])


def test_a_row_depends_on_no_later_row() -> None:
    x, b, g = operands(9)
    last = torch.tensor([4])
    before, _ = delta_net.delta_rule(x, b, g, last, OF, EPS, "float32")
    x[5:], b[5:], g[5:] = math.nan, math.nan, math.nan
    after, _ = delta_net.delta_rule(x, b, g, last, OF, EPS, "float32")
    agree(after, before)


def test_the_convolution_sees_zeros_before_a_sequence() -> None:
    x, weight = drawn(4, 6, 3), drawn(5, 3, 1, 4)
    want = torch.zeros(6, 3).double()
    for p in range(6):
        for c in range(3):
            taps = range(max(0, 3 - p), 4)
            total = sum(float(weight[c, 0, j]) * float(x[p - 3 + j, c]) for j in taps)
            want[p, c] = silu(total)
    position = torch.tensor([0, 2, 5])
    out, variance = delta_net.short_conv(x, weight, None, position, "bfloat16")
    agree(out, want[position])
    assert bool((variance >= 0).all())


def test_the_decay() -> None:
    a, a_log, bias = drawn(6, 5, 4), drawn(7, 4), drawn(8, 4)
    out, _ = delta_net.decay(a, a_log, bias)
    want = [
        [
            -math.exp(float(a_log[h])) * math.log1p(math.exp(float(a[n, h] + bias[h])))
            for h in range(4)
        ]
        for n in range(5)
    ]
    agree(out, torch.tensor(want, dtype=torch.float64))


def test_the_gated_norm_and_the_gate_of_attention() -> None:
    x, gate, weight = drawn(9, 3, 10), drawn(10, 3, 10), drawn(11, 5)
    out, _ = delta_net.gated_norm(x, gate, weight, EPS, "bfloat16")
    for n in range(3):
        for start in (0, 5):
            mean = sum(float(v) ** 2 for v in x[n, start : start + 5]) / 5
            for j in range(5):
                at = start + j
                want = (
                    float(x[n, at] * weight[j]) / math.sqrt(mean + EPS) * silu(float(gate[n, at]))
                )
                assert math.isclose(float(out[n, at]), want, rel_tol=1e-11)
    # Each head of q stands before its gate.
    both = torch.cat([drawn(12, 3, 2, 5), gate.reshape(3, 2, 5)], dim=2).flatten(1)
    gated, _ = delta_net.output_gate(x, both, 2, "bfloat16")
    agree(gated, x * gate.sigmoid())


def test_a_sigmoid_of_rounded_steps_is_within_its_unit() -> None:
    """Every b in bf16: a row of one head has no other entries to hide among."""
    b = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    b = b[b.isfinite() & (b.abs() <= 40)]
    exact, extra = delta_net.sigmoid(b.double(), "bfloat16")
    rounded = rounding_variance(exact, "bfloat16")

    def largest(got: torch.Tensor, variance: torch.Tensor) -> float:
        return float(((got.double() - exact).abs() / variance.sqrt()).max())

    steps = 1 / (1 + (-b).exp())
    assert steps.dtype == torch.bfloat16
    assert largest(steps, rounded) > 6
    assert largest(steps, rounded + extra) < 4
    assert largest(exact.bfloat16(), rounded + extra) < 1.8
    assert largest((1.05 * b.double()).sigmoid().bfloat16(), rounded + extra) > 20
    far = torch.tensor([[-1e4, 1e4]]).double()
    assert bool(delta_net.sigmoid(far, "bfloat16")[1].isfinite().all())
