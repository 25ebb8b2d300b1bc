"""Attention with sinks and a softcap on both backends: right, and a row's own bits."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.ops.attention import backward, forward, operator, portable, sinks
from rlk_kernels.ops.attention.operator import attention_ref

CU = torch.tensor([0, 9, 9, 30])
SINK = torch.tensor([0.5, -1.0, 3.0, 0.0])
BACKENDS = ["torch", "triton"]
OPTIONS = [
    *((backend, {"softcap": 2.0}) for backend in BACKENDS),
    *((backend, {"softcap": 1.5, "sinks": SINK, "window": 5}) for backend in BACKENDS),
    *((backend, {"sinks": SINK}) for backend in BACKENDS),
    ("triton", {"sinks": SINK, "window": 4}),
]


def case(dtype=torch.float32, dim=16):
    q = 2 * rand(30, 4, dim, dtype=dtype, device="cpu", seed=1)
    k, v = (rand(30, 2, dim, dtype=dtype, device="cpu", seed=s) for s in (2, 3))
    return q, k, v


@pytest.mark.parametrize(("backend", "options"), OPTIONS)
def test_values_and_gradients_are_those_of_the_formula(backend, options):
    inputs = [x.requires_grad_() for x in case()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    options, wide = dict(options), dict(options)
    if "sinks" in options:
        options["sinks"] = SINK.clone().requires_grad_()
        wide["sinks"] = SINK.double().requires_grad_()
        inputs.append(options["sinks"])
        exact.append(wide["sinks"])
    out, lse = rk.attention(*inputs[:3], CU, CU, return_lse=True, backend=backend, **options)
    truth, lse_truth = attention_ref(*exact[:3], CU, CU, **wide)
    assert (out - truth).abs().max() < 3e-6
    assert (lse - lse_truth).abs().max() < 3e-6
    up = rand(30, 4, 16, dtype=torch.float32, device="cpu", seed=7)
    grads = torch.autograd.grad(out, inputs, up)
    for got, want in zip(grads, torch.autograd.grad(truth, exact, up.double()), strict=True):
        assert (got - want).abs().max() < 3e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "options"), OPTIONS)
def test_a_sequence_has_its_bits_alone_and_out_of_a_paged_cache(backend, options, dtype):
    q, k, v = case(dtype)
    whole = rk.attention(q, k, v, CU, CU, backend=backend, **options)
    last = [x[9:] for x in (q, k, v)]
    bounds = torch.tensor([0, 21])
    assert torch.equal(rk.attention(*last, bounds, bounds, backend=backend, **options), whole[9:])
    cache = [torch.cat([x, x[:3]]).view(6, 4, 2, 16) for x in last[1:]]
    table, lens = torch.arange(6)[None], torch.tensor([21])
    how = {"cu_seqlens_q": torch.tensor([0, 3]), "backend": backend, **options}
    paged = rk.paged_attention(q[-3:], *cache, table, lens, **how)
    assert torch.equal(paged, whole[-3:])
    if "sinks" in options:
        how["sinks"] = SINK.to(dtype)  # which holds their values
    out = torch.full_like(q[-3:], torch.nan)
    result, lse = rk.paged_attention(q[-3:], *cache, table, lens, out=out, return_lse=True, **how)
    assert result is out
    assert torch.equal(out, whole[-3:])
    assert torch.equal(
        lse, rk.paged_attention(q[-3:], *cache, table, lens, return_lse=True, **how)[1]
    )
    out = torch.full_like(paged, float("nan"))
    rk.paged_attention(
        q[-1:], *cache, table, lens, cu_seqlens_q=torch.tensor([0, 1]), out=out[-1:],
        backend=backend, **options,
    )  # fmt: skip
    assert torch.equal(out[-1], whole[-1])


@pytest.mark.parametrize("dim", [64, 80, 256])
def test_head_sizes_with_sinks(backend, dim):
    q, k, v = case(dim=dim)
    out = rk.attention(q, k, v, CU, CU, sinks=SINK, backend=backend)
    truth, _ = attention_ref(q, k, v, CU, CU, sinks=SINK)
    assert (out - truth).abs().max() < 5e-6


def test_rows_without_keys_and_sinks_far_away(backend):
    q, k, v = case()
    none = torch.zeros(4, dtype=torch.long)
    out, lse = rk.attention(q, k[:0], v[:0], CU, none, sinks=SINK, return_lse=True, backend=backend)
    assert not out.any()
    assert torch.equal(lse, SINK[:, None].expand(4, 30))
    far = torch.full((4,), -1e4)
    plain = rk.attention(q, k, v, CU, CU, backend=backend)
    assert torch.equal(rk.attention(q, k, v, CU, CU, sinks=far, backend=backend), plain)
    assert not rk.attention(q, k, v, CU, CU, sinks=-far, backend=backend).any()


def test_a_sink_of_minus_infinity_is_none(backend):
    q, k, v = (x.requires_grad_() for x in case())
    keys = torch.tensor([0, 0, 9, 30])  # the first sequence's rows have no key, nor a sink
    off = torch.full((4,), -torch.inf).requires_grad_()
    plain = rk.attention(q, k, v, CU, keys, return_lse=True, backend=backend)
    with_sinks = rk.attention(q, k, v, CU, keys, sinks=off, return_lse=True, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(with_sinks, plain, strict=True))
    *grads, dsinks = torch.autograd.grad(with_sinks[0].sum(), (q, k, v, off))
    assert not dsinks.any()
    plain_grads = torch.autograd.grad(plain[0].sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(grads, plain_grads, strict=True))


def test_a_sink_of_another_head_is_noticed(monkeypatch):
    add = sinks.add
    monkeypatch.setattr(sinks, "add", lambda out, lse, sink, b: add(out, lse, sink.roll(1), b))
    with pytest.raises(AssertionError):
        test_values_and_gradients_are_those_of_the_formula("torch", {"sinks": SINK})


def test_a_cap_of_every_second_batch_is_noticed(monkeypatch):
    attend = portable.attend
    monkeypatch.setattr(
        portable, "attend", lambda *x: attend(*x[:5], x[5] if x[0].shape[0] > 1 else 0.0)
    )
    with pytest.raises(AssertionError):
        test_a_sequence_has_its_bits_alone_and_out_of_a_paged_cache(
            "torch", {"softcap": 2.0}, torch.float32
        )


@pytest.mark.parametrize("half", [forward, backward])
def test_another_cap_of_a_half_on_triton_is_noticed(monkeypatch, half):
    scales = half.capped_scales
    monkeypatch.setattr(half, "capped_scales", lambda scale, cap: scales(scale, 1.01 * cap))
    with pytest.raises(AssertionError):
        test_values_and_gradients_are_those_of_the_formula("triton", {"softcap": 2.0})


def test_the_registrations_pass_torchs_own_check():
    q, k, v = (x[:4].clone() for x in case())
    cu = torch.tensor([0, 4], dtype=torch.int32)
    options = (cu, cu.clone(), True, 0.5, None, 2.0, "torch")
    torch.library.opcheck(operator._attention, (q, k, v, SINK, *options))
    torch.library.opcheck(operator._attention, (q, k, v, None, *options))


@pytest.mark.parametrize(("backend", "options"), OPTIONS)
def test_rows_of_no_sequence_reach_no_gradient(backend, options):
    """What lies in their memory, NaN here, met a gradient of zero in that of the sinks."""
    options = dict(options)
    inputs = [x.requires_grad_() for x in case()]
    if "sinks" in options:
        inputs.append(options.setdefault("sinks", SINK).clone().requires_grad_())
        options["sinks"] = inputs[-1]
    up = rand(30, 4, 16, dtype=torch.float32, device="cpu", seed=7)
    up[9:] = 0
    grads = []
    for bounds in (CU, CU[:2]):
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        try:
            out = rk.attention(*inputs[:3], bounds, bounds, backend=backend, **options)
            grads.append(torch.autograd.grad(out, inputs, up))
        finally:
            torch.use_deterministic_algorithms(False)
    assert bool(out[9:].isnan().all()) == (backend == "triton")
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
