"""Each formula of the referee against its definition, written out in loops of float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlk_align.probe.referee import formulas

Array = np.ndarray
ROUNDING = 1e-12
SIZES = st.sampled_from([1, 2, 3, 7])
SEEDS = st.integers(0, 2**32)


def drawn(seed: int, *shape: int, scale: float = 3.0) -> Array:
    return np.random.default_rng(seed).normal(size=shape) * scale


def tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(x)


def agree(got: torch.Tensor, want: Array) -> None:
    assert got.dtype == torch.float64
    assert got.shape == want.shape
    error = np.abs(got.numpy() - want)
    assert error.size
    assert (error <= ROUNDING * (1 + np.abs(want))).all(), error.max()


def norm_by_hand(x: Array, weight: Array, eps: float) -> Array:
    out, width = np.zeros_like(x), len(weight)
    for n in range(x.shape[0]):
        for start in range(0, x.shape[1], width):
            group = [float(v) for v in x[n, start : start + width]]
            mean = math.fsum(v * v for v in group) / width
            for j in range(width):
                out[n, start + j] = group[j] / math.sqrt(mean + eps) * weight[j]
    return out


@settings(max_examples=30)
@given(SEEDS, SIZES, st.sampled_from([1, 2, 5]), st.sampled_from([1, 63, 64]))
def test_rms_norm(seed: int, rows: int, groups: int, width: int) -> None:
    x, weight = drawn(seed, rows, groups * width), drawn(seed + 1, width)
    for eps in (1e-6, 1e-3, 0.0):
        agree(formulas.rms_norm(tensor(x), tensor(weight), eps), norm_by_hand(x, weight, eps))
    zero = formulas.rms_norm(tensor(0 * x), tensor(weight), 1e-6)
    assert (zero == 0).all()


@settings(max_examples=30)
@given(SEEDS, SIZES, st.sampled_from([2, 63, 64]), st.booleans())
def test_layer_norm(seed: int, rows: int, width: int, biased: bool) -> None:
    shapes = [(rows, width), (width,), (width,)]
    x, weight, bias = (drawn(seed + i, *s) for i, s in enumerate(shapes))
    want, scaled = np.zeros_like(x), np.zeros_like(x)
    for n in range(rows):
        row = [float(v) for v in x[n]]
        mean = math.fsum(row) / width
        root = math.sqrt(math.fsum((v - mean) ** 2 for v in row) / width + 1e-3)
        for j in range(width):
            want[n, j] = (row[j] - mean) / root * weight[j] + (bias[j] if biased else 0.0)
            scaled[n, j] = row[j] / root
    given_bias = tensor(bias) if biased else None
    both = formulas.layer_norm(tensor(x), tensor(weight), given_bias, 1e-3)
    for got, exact in zip(both, (want, scaled), strict=True):
        agree(got, exact)


@settings(max_examples=30)
@given(SEEDS, SIZES, SIZES, st.sampled_from([1, 63, 65]), st.booleans())
def test_linear(seed: int, rows: int, features: int, width: int, biased: bool) -> None:
    shapes = [(rows, width), (features, width), (features,)]
    x, weight, bias = (drawn(seed + i, *s) for i, s in enumerate(shapes))
    want = np.zeros((rows, features))
    for n in range(rows):
        for f in range(features):
            terms = [float(x[n, k]) * float(weight[f, k]) for k in range(width)]
            want[n, f] = math.fsum([*terms, float(bias[f])] if biased else terms)
    agree(formulas.linear(tensor(x), tensor(weight), tensor(bias) if biased else None), want)


def rotated_by_hand(x: Array, angle: Array, heads: int, scaling: float) -> Array:
    """Rotates each pair as a complex number."""
    out, pairs = x.copy(), angle.shape[1]
    width = x.shape[1] // heads
    for n in range(x.shape[0]):
        for h in range(heads):
            for j in range(pairs):
                low, high = h * width + j, h * width + j + pairs
                turned = complex(x[n, low], x[n, high]) * complex(
                    math.cos(angle[n, j]), math.sin(angle[n, j])
                )
                out[n, low], out[n, high] = turned.real * scaling, turned.imag * scaling
    return out


@settings(max_examples=40)
@given(SEEDS, SIZES, SIZES, SIZES, st.sampled_from([0, 1, 6]), st.sampled_from([1.0, 1.25]))
def test_rope_in_halves_with_a_part_that_stays(
    seed: int, rows: int, heads: int, pairs: int, stays: int, scaling: float
) -> None:
    x = drawn(seed, rows, heads * (2 * pairs + stays))
    angle = drawn(seed + 1, rows, pairs, scale=1000.0)
    out, slope = formulas.rotate(tensor(x), tensor(angle), heads, scaling)
    agree(out, rotated_by_hand(x, angle, heads, scaling))
    step = 1e-5
    ahead, behind = (rotated_by_hand(x, angle + s, heads, scaling) for s in (step, -step))
    assert np.abs((ahead - behind) / (2 * step) - slope.numpy()).max() < 1e-6


def attended_by_hand(
    q: Array,
    k: Array,
    v: Array,
    position: Array,
    heads: tuple[int, int],
    window: int | None,
    sinks: Array | None = None,
) -> Array:
    count, groups = heads
    width = q.shape[1] // count
    out = np.zeros_like(q)
    for n, p in enumerate(position.tolist()):
        for h in range(count):
            g = h * groups // count
            first = 0 if window is None else max(0, p - window + 1)
            scores = [
                math.fsum(q[n, h * width + d] * k[j, g * width + d] for d in range(width))
                / math.sqrt(width)
                for j in range(first, p + 1)
            ]
            more = [] if sinks is None else [sinks[h]]
            weights = [math.exp(s - max(scores + more)) for s in scores + more]
            total = math.fsum(weights)
            for d in range(width):
                keys = enumerate(weights[: len(scores)])
                terms = (w * v[first + i, g * width + d] for i, w in keys)
                out[n, h * width + d] = math.fsum(terms) / total
    return out


@settings(max_examples=40)
@given(
    SEEDS,
    st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3), (3, 3)]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([1, 2, 9]),
    st.sampled_from([None, 1, 2, 5, 100]),
    st.booleans(),
)
def test_attention(
    seed: int, heads: tuple[int, int], width: int, length: int, window: int | None, sunk: bool
) -> None:
    rng = np.random.default_rng(seed)
    position = np.sort(rng.choice(length, rng.integers(1, length + 1), replace=False))
    q = drawn(seed, len(position), heads[0] * width)
    k, v = (drawn(seed + i, length, heads[1] * width) for i in (1, 2))
    sinks = drawn(seed + 3, heads[0]) if sunk else None
    got = formulas.attention(
        *(tensor(q), tensor(k), tensor(v), tensor(position), heads, window, ROUNDINGS),
        sinks=None if sinks is None else tensor(sinks),
    ).out
    agree(got, attended_by_hand(q, k, v, position, heads, window, sinks))


ROUNDINGS = formulas.AttentionRoundings(
    score=2.0**-14, exponent=0.0, probability=2.0**-16, float32_sums=False
)


@pytest.mark.parametrize(("sharp", "sunk"), [(0.3, False), (3.0, False), (0.3, True)])
def test_what_rounding_leaves_of_attention(sharp: float, sunk: bool) -> None:
    """The stated variance is that of many random errors of scores and probabilities."""
    torch.manual_seed(0)
    heads, length, width, times = 2, 9, 8, 4000
    q, k, v = (torch.randn(length, heads * width).double() for _ in range(3))
    q = q * sharp * width**0.5
    sinks = torch.tensor([0.5, 2.0]).double() if sunk else None
    said = formulas.attention(
        q, k, v, torch.arange(length), (heads, heads), None, ROUNDINGS, sinks=sinks
    )
    x, y, z = (t.reshape(length, heads, width).transpose(0, 1) for t in (q, k, v))
    scores = x @ y.mT / width**0.5
    off = [torch.randn(times, *scores.shape).double() for _ in range(2)]
    moved = scores * (1 + ROUNDINGS.score**0.5 * off[0])
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    moved = moved.masked_fill(later, -torch.inf)
    if sinks is not None:
        of_head = sinks[:, None, None].expand(*moved.shape[:-1], 1)
        moved = torch.cat([moved, of_head], dim=-1)
    p = moved.softmax(dim=-1)[..., :length]
    got = p * (1 + ROUNDINGS.probability**0.5 * off[1]) @ z
    error = got.transpose(1, 2).reshape(times, length, -1) - said.out
    assert torch.allclose(error.square().mean(dim=0), said.variance, rtol=0.15, atol=1e-12)
    along = (error * said.out).reshape(times, length, heads, width).sum(dim=-1)
    assert torch.allclose(along.square().mean(dim=0), said.shared, rtol=0.15, atol=1e-12)


def test_peaked_attention_is_one_value() -> None:
    q, k = np.full((1, 4), 1e3), np.eye(4)[:3] * 1e3
    k[1] *= 2
    v = drawn(1, 3, 4)
    got = formulas.attention(
        tensor(q), tensor(k), tensor(v), torch.tensor([2]), (1, 1), None, ROUNDINGS
    ).out
    agree(got, v[1:2])


def gelu(x: float) -> float:
    return x / 2 * (1 + math.erf(x / math.sqrt(2)))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Any] = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def test_gated_activations_and_their_derivatives() -> None:
    gate, up = (tensor(drawn(seed, 60, scale=6)).requires_grad_() for seed in (4, 5))
    for got, exact in (
        (formulas.swiglu(gate, up), torch.nn.functional.silu(gate) * up),
        (
            formulas.clamped_swiglu(gate, up, 1.702, 7.0),
            gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1),
        ),
    ):
        slopes = torch.autograd.grad(exact.sum(), (gate, up))
        agree(got.out.detach(), exact.detach().numpy())
        for slope, expected in zip((got.by_gate, got.by_up), slopes, strict=True):
            agree(slope.detach(), expected.numpy())
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    # Each step's relative error moves the output as the product of its factors does.
    g, u = gate.detach().clamp(max=7), up.detach().clamp(-7, 7) + 1
    sigmoid = torch.sigmoid(1.702 * g)
    (_, by_angle), *rest = got.steps
    agree(by_angle.detach(), (g * u * sigmoid * (1 - sigmoid)).numpy())
    for value, slope in rest:
        agree((value * slope).detach(), got.out.detach().numpy())


@pytest.mark.parametrize("name", formulas.ACTIVATIONS)
def test_activations(name: str) -> None:
    x = np.concatenate([drawn(3, 40, scale=5), [0.0, -0.0, 30.0, -30.0]])
    agree(formulas.ACTIVATIONS[name](tensor(x)), np.array([ACTIVATIONS[name](v) for v in x]))


@settings(max_examples=30)
@given(
    SEEDS,
    SIZES,
    st.sampled_from([1, 2, 257]),
    st.sampled_from([1.0, 0.7, 2.0]),
    st.sampled_from([0.0, 1e4, -1e4]),
)
def test_log_prob(seed: int, rows: int, vocab: int, temperature: float, offset: float) -> None:
    logits = drawn(seed, rows, vocab, scale=30.0) + offset
    target = np.random.default_rng(seed).integers(0, vocab, rows)
    want = np.zeros((rows, 1))
    for n in range(rows):
        scaled = [float(z) / temperature for z in logits[n]]
        total = math.fsum(math.exp(z - max(scaled)) for z in scaled)
        want[n] = scaled[target[n]] - max(scaled) - math.log(total)
    got = formulas.log_prob(tensor(logits), torch.from_numpy(target), temperature)
    assert np.abs(got.numpy() - want).max() < 1e-10
    assert (got <= 1e-10).all()
