"""The operators of a gated delta net: float64 budgets, gradients, and rows whose bits depend on
their own sequence alone, in decode, prefill cut at every place, and with slots copied.

The chunks have 16 rows here, except in one test: a shorter sequence has as many borders.
"""

from itertools import pairwise

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import LIMIT, rand, same
from rlk_kernels.ops.causal_conv.operator import causal_conv1d_ref
from rlk_kernels.ops.delta_gates.operator import delta_gates_ref
from rlk_kernels.ops.delta_rule import gradient, on_torch, on_triton, operator, portable
from rlk_kernels.ops.delta_rule.operator import gated_delta_rule_ref
from rlk_kernels.ops.gated_norm.operator import gated_rms_norm_ref

HK, HV, D, E, CHUNK = 1, 2, 12, 6, 16
LENGTH = 40
SHORT = {"torch": LENGTH, "triton": 21}
"""The interpreter takes long for a row."""
SHORT_OF_64 = {"torch": 150, "triton": 110}
TAPS = 4
DTYPES = {"torch": torch.bfloat16, "triton": torch.float16}
"""The interpreter's bf16 rounds differently from a GPU's."""


CHUNKED = gradient, on_torch, on_triton, operator, portable
"""The modules that have the length of a chunk."""


@pytest.fixture
def short_chunks(monkeypatch):
    for module in CHUNKED:
        monkeypatch.setattr(module, "CHUNK", CHUNK)


def rows(length, dtype, seed=0, heads=HV):
    """q, k, v, g, beta of a sequence, with a slow and a fast head."""

    def r(*shape, at):
        return rand(*shape, dtype=dtype, device="cpu", seed=seed + at)

    g = -torch.rand(length, heads, generator=torch.Generator().manual_seed(seed))
    g = g * torch.tensor([0.02, 1.5])[:heads]
    beta = r(length, heads, at=4).sigmoid()
    return [r(length, HK, D, at=1), r(length, HK, D, at=2), r(length, heads, E, at=3), g, beta]


def new_cache(dtype, slots=3, chunk=CHUNK):
    """Whatever was in the slots before: NaN."""

    def full(*shape, of):
        return torch.full(shape, float("nan"), dtype=of)

    return [
        full(slots, HV, D, E, of=torch.float32), full(slots, chunk, HK, D, of=dtype),
        full(slots, chunk, HV, E, of=dtype), full(slots, chunk, HV, of=torch.float32),
    ]  # fmt: skip


def bounds(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def continued(x, cache, slot, start, end, backend):
    """Rows start to end of a sequence, after those before them."""
    return rk.cached_gated_delta_rule(
        *(part[start:end] for part in x), *cache, torch.tensor([slot]), torch.tensor([start]),
        bounds(end - start), backend=backend,
    )  # fmt: skip


def in_pieces(x, cuts, backend, dtype):
    """(out, cache) of a sequence that is computed in pieces."""
    cache, at = new_cache(dtype), [0, *cuts, len(x[0])]
    parts = [continued(x, cache, 1, a, b, backend) for a, b in pairwise(at)]
    return torch.cat(parts), cache


@pytest.mark.usefixtures("short_chunks")
def test_the_rule_is_the_recurrence_of_float64(backend):
    length = SHORT[backend]
    for dtype in (DTYPES[backend], torch.float32):
        x, cu = rows(length, dtype), bounds(18, 0, length - 18)
        truth = gated_delta_rule_ref(*x, cu)
        value = rk.gated_delta_rule(*x, cu, backend=backend).double()
        error = (value - truth).norm() / truth.norm()
        assert bool(error <= 2 * LIMIT[dtype])
        assert rk.last_backend("gated_delta_rule") == backend


CUTS = {
    "torch": [range(1, LENGTH), *([cut] for cut in range(1, LENGTH, 2)), [1, 15, 16, 17, 32]],
    "triton": [[7], [1, 15, 16, 17]],
}


@pytest.mark.usefixtures("short_chunks")
def test_decode_and_prefill_cut_anywhere_have_the_bits_of_the_whole(backend):
    length = SHORT[backend]
    for dtype in (DTYPES[backend], torch.float32) if backend == "torch" else (DTYPES[backend],):
        x = rows(length, dtype)
        whole = rk.gated_delta_rule(*x, bounds(length), backend=backend)
        _, final = in_pieces(x, [], backend, dtype)
        for cuts in CUTS[backend]:
            out, cache = in_pieces(x, cuts, backend, dtype)
            assert torch.equal(out, whole), cuts
            assert torch.equal(cache[0][1], final[0][1])
            open_rows = length % CHUNK
            assert same(
                [c[1, :open_rows] for c in cache[1:]], [c[1, :open_rows] for c in final[1:]]
            )


BORDERS = {"torch": [[37], [64, 128], [1, 63, 64, 65, 100, 130]], "triton": [[1, 63, 64, 65, 100]]}


def test_chunks_of_64_rows_are_cut_anywhere(backend):
    length, dtype = SHORT_OF_64[backend], DTYPES[backend]
    x = rows(length, dtype)
    whole = rk.gated_delta_rule(*x, bounds(length), backend=backend)
    for cuts in BORDERS[backend]:
        cache, at = new_cache(dtype, chunk=64), [0, *cuts, length]
        parts = [continued(x, cache, 0, *ends, backend) for ends in pairwise(at)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("start", [13, 15, 16, 30])
def test_few_rows_of_one_sequence_have_the_bits_of_the_whole(backend, start):
    """As many rows as sequences, which a step of decode has; but one sequence has all of them."""
    dtype, end = DTYPES[backend], start + 3
    x, cache = rows(end + 2, dtype), new_cache(dtype)
    whole = rk.gated_delta_rule(*x, bounds(end + 2), backend=backend)
    continued(x, cache, 2, 0, start, backend)
    out = rk.cached_gated_delta_rule(
        *(part[start:end] for part in x), *cache, torch.tensor([1, 2, 0]),
        torch.tensor([4, start, 0]), bounds(0, 3, 0), backend=backend,
    )  # fmt: skip
    assert torch.equal(out, whole[start:end])
    assert torch.equal(continued(x, cache, 2, end, end + 2, backend), whole[end:])
    assert all(bool(part[:2].isnan().all()) for part in cache)


@pytest.mark.usefixtures("short_chunks")
def test_other_sequences_slots_and_copies_change_no_bit(backend):
    length = SHORT[backend]
    dtype = DTYPES[backend]
    x, other = rows(length, dtype), rows(14, dtype, seed=50)
    whole = rk.gated_delta_rule(*x, bounds(length), backend=backend)
    cache = new_cache(dtype)
    continued(x, cache, 2, 0, 11, backend)
    for part in cache:  # a prefix that ends within a chunk, copied
        part[0] = part[2]
    continued(other, cache, 2, 0, 9, backend)
    # The copy continues, beside a sequence of length 0 and another one that continues.
    both = [torch.cat([a[11:], b[9:]]) for a, b in zip(x, other, strict=True)]
    out = rk.cached_gated_delta_rule(
        *both, *cache, torch.tensor([0, 1, 2]), torch.tensor([11, 5, 9]),
        bounds(length - 11, 0, 5), backend=backend,
    )  # fmt: skip
    alone = rk.gated_delta_rule(*other, bounds(14), backend=backend)
    assert torch.equal(out, torch.cat([whole[11:], alone[9:]]))
    assert bool(cache[0][1].isnan().all())  # the sequence without new rows


@pytest.mark.usefixtures("short_chunks")
def test_a_share_of_the_heads_or_features_of_v_has_the_same_bits(backend):
    length = SHORT[backend]
    dtype = DTYPES[backend]
    q, k, v, g, beta = rows(length, dtype)
    cu = bounds(length)
    whole = rk.gated_delta_rule(q, k, v, g, beta, cu, backend=backend)
    half = rk.gated_delta_rule(q, k, v[..., :3], g, beta, cu, backend=backend)
    head = rk.gated_delta_rule(q, k, v[:, 1:], g[:, 1:], beta[:, 1:], cu, backend=backend)
    assert torch.equal(half, whole[..., :3])
    assert torch.equal(head, whole[:, 1:])


def lost_decays(monkeypatch):
    write = portable.Cache.write
    monkeypatch.setattr(
        portable.Cache, "write",
        lambda self, slots, at, chunk: write(
            self, slots, at, chunk._replace(decays=torch.zeros_like(chunk.decays))
        ),
    )  # fmt: skip


def lost_row(monkeypatch):
    """The last row of a call is not kept."""
    write = portable.Cache.write
    monkeypatch.setattr(
        portable.Cache, "write",
        lambda self, slots, at, chunk: write(self, slots, at[:, :-1], chunk),
    )  # fmt: skip


def rounded_state(monkeypatch):
    """A cache that keeps the state in bf16."""
    write = portable.Cache.write

    def rounding(self, slots, at, chunk):
        write(self, slots, at, chunk)
        self.state.copy_(self.state.bfloat16())

    monkeypatch.setattr(portable.Cache, "write", rounding)


def stale_state(monkeypatch):
    """A new sequence reads the state that another one left in its slot."""
    read = portable.Cache.read
    monkeypatch.setattr(
        portable.Cache, "read",
        lambda self, slots, context: read(self, slots, context)._replace(state=self.state[slots]),
    )  # fmt: skip


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("fault", [None, lost_decays, lost_row, rounded_state, stale_state])
def test_a_fault_at_a_border_is_noticed(fault, monkeypatch):
    x = rows(LENGTH, torch.bfloat16)
    # The forward of whole sequences has a cache of its own, which the fault does not reach.
    whole = rk.gated_delta_rule(*x, bounds(LENGTH), backend="torch")
    if fault is not None:
        fault(monkeypatch)
    out, _ = in_pieces(x, [7, 20], "torch", torch.bfloat16)
    assert torch.equal(out, whole) is (fault is None)


def test_a_cache_is_checked():
    x, cache = rows(4, torch.float32), new_cache(torch.float32, chunk=64)
    where = torch.tensor([5]), torch.tensor([0]), bounds(4)
    with pytest.raises(IndexError, match=r"slot 5 is not in 0\.\.2"):
        rk.cached_gated_delta_rule(*x, *cache, *where, backend="torch")
    with pytest.raises(rk.UnsupportedShape, match="keys must be"):
        rk.cached_gated_delta_rule(*x, cache[0], cache[1][:, :63], *cache[2:], *where)
    with pytest.raises(rk.UnsupportedDtype, match=r"state is torch\.bfloat16; torch\.float32"):
        rk.cached_gated_delta_rule(*x, cache[0].bfloat16(), *cache[1:], *where)
    with pytest.raises(rk.UnsupportedDtype, match="g is"):
        rk.gated_delta_rule(*x[:3], x[3].double(), x[4], bounds(4))
    with pytest.raises(rk.UnsupportedShape, match="must rise"):
        rk.gated_delta_rule(*x, bounds(5), backend="torch")


def leaves_of(dtype):
    """name -> (function of (backend, *leaves), leaves)."""

    def leaf(*shape, seed):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    cu, wide = torch.tensor([0, 2, 2, 19]), torch.promote_types(dtype, torch.float32)
    x = [part.detach() for part in rows(19, dtype)]
    x = [(part.to(wide) if i == 3 else part.to(dtype)).requires_grad_() for i, part in enumerate(x)]
    gates = [leaf(5, 3, seed=1), leaf(5, 3, seed=2), leaf(3, seed=3), leaf(3, seed=4)]
    return {
        "gated_delta_rule": (lambda b, *y: rk.gated_delta_rule(*y, cu, backend=b), x),
        "causal_conv1d": (
            lambda b, x, w: rk.causal_conv1d(x, w, torch.tensor([0, 3, 3, 9]), backend=b),
            [leaf(9, 5, seed=1), leaf(5, TAPS, seed=2)],
        ),
        "gated_rms_norm": (
            lambda b, *y: rk.gated_rms_norm(*y, 1e-6, backend=b),
            [leaf(20, 7, seed=1), leaf(20, 7, seed=2), leaf(7, seed=3)],
        ),
        "delta_gates": (
            lambda b, *y: torch.cat([z.to(wide) for z in rk.delta_gates(*y, backend=b)]), gates,
        ),
        "swiglu, sigmoid": (
            lambda b, g, u: rk.swiglu(g, u, activation="sigmoid", backend=b),
            [leaf(5, 7, seed=1), leaf(5, 7, seed=2)],
        ),
    }  # fmt: skip


NAMES = list(leaves_of(torch.float64))


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", NAMES)
def test_gradcheck(name):
    run, leaves = leaves_of(torch.float64)[name]
    assert torch.autograd.gradcheck(lambda *x: run("torch", *x), leaves, fast_mode=True)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_agree_with_float64_and_repeat(name, dtype, backend):
    run, leaves = leaves_of(dtype)[name]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = run("torch", *wide)
    dy = torch.randn(exact.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    truth = torch.autograd.grad(exact, wide, dy.double())
    out = run(backend, *leaves)
    first = torch.autograd.grad(out, leaves, dy.to(out.dtype), retain_graph=True)
    repeats = torch.autograd.grad(out, leaves, dy.to(out.dtype))
    for x, value, repeat, expected in zip(leaves, first, repeats, truth, strict=True):
        assert torch.equal(value, repeat)
        assert value.dtype == x.dtype
        limit = 8 * LIMIT[dtype] * (float(expected.abs().max()) + 1e-6)
        error = (value.double() - expected).abs()
        assert error.numel() > 0
        assert bool((error <= limit).all())


@pytest.mark.usefixtures("short_chunks")
def test_blocks_of_features_add_up_to_the_gradient(monkeypatch):
    q, k, _, g, beta = rows(7, torch.float32)
    v = rand(7, HV, 41, dtype=torch.float32, device="cpu", seed=3)
    x = [part.requires_grad_() for part in (q, k, v, g, beta)]
    dy = rand(7, HV, 41, dtype=torch.float32, device="cpu", seed=8)

    def gradient_of(backend):
        return torch.autograd.grad(rk.gated_delta_rule(*x, bounds(7), backend=backend), x, dy)

    def with_blocks(**most):
        monkeypatch.setattr(on_triton, "WIDE_BACKWARD_FEATURES", most)
        return gradient_of("triton")

    expected = gradient_of("torch")
    assert on_triton.WIDE_BACKWARD_FEATURES == {"carry": 16, "rows": 32}
    usual = gradient_of("triton")
    assert same(with_blocks(carry=32, rows=32), usual), "no block reads another's features"
    for found in (usual, with_blocks(carry=16, rows=16)):
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("chunk", "length"), [(CHUNK, 40), (64, 71)])
def test_the_gradient_of_several_chunks_is_that_of_float64(backend, chunk, length, monkeypatch):
    """Three chunks, and one of several blocks of rows; keys are alike, so that rows matter to one
    another. Rows outside every sequence have zeros."""
    for module in CHUNKED:
        monkeypatch.setattr(module, "CHUNK", chunk)
    dtype = DTYPES[backend]
    q, k, *rest = rows(length, dtype)
    k = (k + 2 * rand(1, HK, D, dtype=dtype, device="cpu", seed=9)).to(dtype)
    x = [part.requires_grad_() for part in (q, k, *rest)]
    cu, dy = 1 + bounds(length - 5, 0, 2), rand(length, HV, E, dtype=dtype, device="cpu", seed=8)
    inside = slice(1, length - 2)
    out = rk.gated_delta_rule(*x, cu, backend=backend)[inside]
    found = torch.autograd.grad(out, x, dy[inside])
    wide = [part.detach().double().requires_grad_() for part in x]
    truth = torch.autograd.grad(gated_delta_rule_ref(*wide, cu), wide, dy[inside].double())
    for value, expected in zip(found, truth, strict=True):
        assert bool((value.double() - expected).norm() <= 8 * LIMIT[dtype] * expected.norm())
        assert not value[0].any()
        assert not value[-2:].any()


@pytest.mark.usefixtures("short_chunks")
def test_a_sequences_gradients_do_not_depend_on_the_others(backend):
    dtype = DTYPES[backend]
    x = [part.requires_grad_() for part in rows(LENGTH, dtype)]
    dy = rand(LENGTH, HV, E, dtype=dtype, device="cpu", seed=8)
    both = torch.autograd.grad(rk.gated_delta_rule(*x, bounds(22, 18), backend=backend), x, dy)
    mine = [part.detach()[22:].requires_grad_() for part in x]
    alone = rk.gated_delta_rule(*mine, bounds(18), backend=backend)
    assert same(torch.autograd.grad(alone, mine, dy[22:]), [part[22:] for part in both])


def test_row_operators_are_within_float64_budgets(backend):
    dtype = DTYPES[backend]

    def r(*shape, seed, scale=1.0):
        return rand(*shape, dtype=dtype, device="cpu", seed=seed, scale=scale)

    x, z, w = r(9, 20, seed=1), r(9, 20, seed=2, scale=3), r(20, seed=3)
    taps, cu = r(20, TAPS, seed=4), bounds(2, 0, 7)
    gates = r(9, 3, seed=5, scale=4), r(9, 3, seed=6, scale=3), r(3, seed=7), r(3, seed=8)
    g, beta = rk.delta_gates(*gates, backend=backend)
    pairs = [
        (rk.gated_rms_norm(x, z, w, 1e-6, backend=backend), gated_rms_norm_ref(x, z, w, 1e-6)),
        (rk.causal_conv1d(x, taps, cu, backend=backend), causal_conv1d_ref(x, taps, cu)),
        (rk.swiglu(z, x, activation="sigmoid", backend=backend), z.double().sigmoid() * x.double()),
        (beta, delta_gates_ref(*gates)[1]),
        (g, delta_gates_ref(*gates)[0]),
    ]
    for value, truth in pairs:
        error = ((value.double() - truth).abs() / truth.abs().clamp(min=1e-4)).max()
        assert bool(error <= 2 * LIMIT[value.dtype])
    assert g.dtype == torch.float32


def test_a_slow_decay_keeps_its_digits(backend):
    """softplus of a very negative number is its exponential, not 0."""
    a, zero = torch.full((1, 1), -30.0), torch.zeros(1)
    g, _ = rk.delta_gates(a, a, zero, zero, backend=backend)
    assert float(g) == pytest.approx(-9.357622968839299e-14, rel=1e-6)


def test_a_convolution_that_continues_has_the_bits_of_the_whole(backend):
    dtype, f = DTYPES[backend], 5
    x = rand(11, f, dtype=dtype, device="cpu", seed=1)
    other = rand(6, f, dtype=dtype, device="cpu", seed=2)
    w = rand(f, TAPS, dtype=dtype, device="cpu", seed=3)
    whole = rk.causal_conv1d(x, w, bounds(11), backend=backend)
    beside = rk.causal_conv1d(torch.cat([other, x]), w, bounds(6, 11), backend=backend)
    assert torch.equal(beside[6:], whole)
    for cuts in (range(1, 11), [1], [2], [3, 4], [7]):
        # As an engine may keep it: features before rows.
        cache = torch.full((3, f, TAPS - 1), float("nan"), dtype=dtype).mT
        at, parts = [0, *cuts, 11], []
        for begin, end in pairwise(at):
            out = rk.cached_causal_conv1d(
                torch.cat([other[:2], x[begin:end]]), w, cache, torch.tensor([2, 0]),
                torch.tensor([0, begin]), bounds(2, end - begin), backend=backend,
            )  # fmt: skip
            parts.append(out[2:])
        assert torch.equal(torch.cat(parts), whole), cuts
        assert torch.equal(cache[0], x[-3:])
        assert bool((cache[2] == torch.cat([torch.zeros(1, f), other[:2]])).all())
    with pytest.raises(IndexError, match="slot 7"):
        rk.cached_causal_conv1d(
            x, w, cache, torch.tensor([7]), torch.tensor([0]), bounds(11), backend="torch"
        )
