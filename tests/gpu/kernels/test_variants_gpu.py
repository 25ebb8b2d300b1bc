"""On a GPU: norm and rotation in one launch, norms around a residual in one launch, norms by
1 + weight, sinks and capped scores of attention, weight gradients in fp32, capped logits."""

import pytest
import rlk_kernels as rk
import torch
from covering import pairwise
from kernel_suite import same
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.attention.forward import forward
from rlk_kernels.ops.attention.operator import attention_ref

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def rand(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.float32, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("tokens", [1, 333, 5000])
def test_norm_and_rotation_have_the_bits_of_the_two(tokens, dim, dtype):
    qkv = rand(tokens, 28, dim, dtype=dtype)
    q, k = qkv[:, :20], qkv[:, 20:24]
    weights = [rand(dim, dtype=dtype, seed=s) for s in (1, 2)]
    positions = torch.arange(tokens, device="cuda") * 7919 % 100000
    for cast, rotation in (
        ("hf", {"theta": 1e6}),
        ("vllm", {"theta": 1e4, "cos_sin_dtype": torch.bfloat16}),
        ("vllm", {"theta": 1e4, "rotary_dim": dim // 2, "interleaved": True}),
        ("vllm", {"theta": 1e6, "scaling": torch.tensor([1.1386], device="cuda")}),
    ):
        normed = [rk.rms_norm(x, w, 1e-6, cast=cast) for x, w in zip((q, k), weights, strict=True)]
        expected = rk.rope(*normed, positions, **rotation)
        got = rk.norm_rope(q, k, *weights, positions, eps=1e-6, cast=cast, **rotation)
        assert rk.last_backend("norm_rope") == "triton"
        assert same(got, expected)
        few = slice(tokens // 2, tokens // 2 + 1)
        part = rk.norm_rope(
            q[few], k[few], *weights, positions[few], eps=1e-6, cast=cast, **rotation
        )
        assert all(torch.equal(a, b[few]) for a, b in zip(part, got, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [33, 96, 1001, 2560, 3840, 5376])
@pytest.mark.parametrize("tokens", [1, 333, 5000])
def test_norms_around_a_residual_have_the_bits_of_the_two(tokens, width, dtype):
    x = rand(tokens, width + 8, dtype=dtype, seed=1)[:, :width]
    residual = rand(tokens, width, dtype=dtype, seed=2)
    weights = [rand(width, dtype=dtype, seed=s) for s in (3, 4)]
    for options in ({}, {"cast": "vllm"}, {"cast": "vllm", "one_plus": True}):
        branch = rk.rms_norm(x, weights[0], 1e-6, **options)
        expected = rk.rms_norm(branch, weights[1], 1e-6, residual=residual, **options)
        got = rk.norm_add_norm(x, residual, *weights, 1e-6, **options)
        assert rk.last_backend("norm_add_norm") == "triton"
        assert same(got, expected)
        few = slice(tokens // 2, tokens // 2 + 1)
        part = rk.norm_add_norm(x[few], residual[few], *weights, 1e-6, **options)
        assert all(torch.equal(a, b[few]) for a, b in zip(part, got, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 2560])
def test_one_plus_has_the_bits_of_a_sum_in_fp32(width, dtype):
    """In the norms and in their gradients."""
    rows = [rand(333, width, dtype=dtype, seed=s) for s in (1, 2, 3)]
    heads = rand(333, 9, 32, dtype=dtype, seed=4)
    weights = [rand(size, dtype=dtype, seed=size) for size in (width, width, 32, 32)]
    positions = torch.arange(333, device="cuda")

    def normed(factor, **how):
        leaves = [x.clone().requires_grad_() for x in (*rows, heads, *weights)]
        a, b, residual, qk, *gains = leaves
        gains, how = [factor(x) for x in gains], {"cast": "vllm", **how}
        outputs = [
            rk.rms_norm(a, gains[0], 1e-6, **how),
            *rk.rms_norm(b, gains[1], 1e-6, residual=residual, **how),
            *rk.norm_rope(
                qk[:, :6], qk[:, 6:], *gains[2:], positions, eps=1e-6, theta=1e6, **how
            ),
        ]  # fmt: skip
        up = [rand(*y.shape, dtype=dtype, seed=9) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, up)]

    got = normed(lambda weight: weight, one_plus=True)
    assert same(got, normed(lambda weight: weight.float() + 1.0))
    assert not torch.equal(got[0], normed(lambda weight: weight)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(500, 520, 264), (4096, 2048, 1024), (3, 8, 40), (1001, 33, 77)])
def test_a_weight_gradient_is_added_once_in_fp32(shape, dtype):
    m, n, k = shape
    x, w = rand(m, k, dtype=dtype, seed=1), rand(n, k, dtype=dtype, seed=2).requires_grad_()
    dy, main_grad = rand(m, n, dtype=dtype, seed=3), rand(n, k, dtype=torch.float32, seed=4)
    product = rk.linear(dy.mT.contiguous(), x.mT.contiguous(), out_dtype=torch.float32)
    expected = main_grad + product
    rk.linear(x, w, main_grad=main_grad).backward(dy)
    assert torch.equal(main_grad, expected)
    assert w.grad is None


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_sinks_in_prefill_decode_and_training(dim, window):
    cu = torch.tensor([0, 1500, 1501, 2000], device="cuda")
    q, k = (rand(2000, h, dim, seed=h).requires_grad_() for h in (8, 2))
    v = rand(2000, 2, dim, seed=5).requires_grad_()
    sinks = rand(8, dtype=torch.float32, seed=6).requires_grad_()
    out = rk.attention(q, k, v, cu, cu, sinks=sinks, window=window)
    truth, _ = attention_ref(
        *(x.detach() for x in (q, k, v)), cu, cu, sinks=sinks.detach(), window=window
    )
    assert (out.double() - truth).norm() / truth.norm() < 4e-3
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    wide, _ = attention_ref(*exact[:3], cu, cu, sinks=exact[3], window=window)
    up = rand(*out.shape, seed=7)
    grads = torch.autograd.grad(out, (q, k, v, sinks), up)
    for got, want in zip(grads, torch.autograd.grad(wide, exact, up.double()), strict=True):
        assert (got.double() - want).norm() / want.norm() < 1e-2
    last = [x.detach()[1500:1996] for x in (q, k, v)]
    bounds = torch.tensor([0, 496], device="cuda")
    alone = rk.attention(*last, bounds, bounds, sinks=sinks, window=window)
    cache = [x[:496].reshape(31, 16, 2, dim) for x in last[1:]]
    paged = rk.paged_attention(
        last[0][-1:], *cache, torch.arange(31, device="cuda")[None],
        torch.tensor([496], device="cuda"), cu_seqlens_q=torch.tensor([0, 1], device="cuda"),
        sinks=sinks, window=window,
    )  # fmt: skip
    assert torch.equal(paged, alone[-1:])


@pytest.mark.parametrize("dim", [16, 64, 128, 256])
def test_sinks_are_added_in_place_once(dim):
    """Every warp of a program reads all log-sum-exps that the program replaces."""
    cu = torch.tensor([0, 3000], device="cuda")
    q, k, v = (rand(3000, h, dim, seed=h) for h in (8, 2, 4))
    v, sinks = v[:, :2].contiguous(), rand(8, dtype=torch.float32, seed=6)
    plain, lse = rk.attention(q, k, v, cu, cu, return_lse=True)
    wanted = torch.logaddexp(lse.double(), sinks.double()[:, None])
    share = (lse.double() - wanted).exp().T[..., None]
    for _ in range(20):
        out, with_sinks = rk.attention(q, k, v, cu, cu, sinks=sinks, return_lse=True)
        assert float((with_sinks.double() - wanted).abs().max()) < 1e-5
        assert float((out.double() - plain.double() * share).abs().max()) < 0.02


@pytest.mark.parametrize(
    ("options", "dim", "dtype"),
    pairwise([{}, {"window": 100}, {"sinks": True}], [64, 128, 256], DTYPES),
)
def test_capped_scores_in_prefill_decode_and_training(options, dim, dtype):
    cu = torch.tensor([0, 1500, 1501, 2000], device="cuda")
    q, k = (3 * rand(2000, h, dim, dtype=dtype, seed=h) for h in (8, 2))
    v = rand(2000, 2, dim, dtype=dtype, seed=5)
    options = {"softcap": 5.0, **options}
    if "sinks" in options:
        options["sinks"] = rand(8, dtype=torch.float32, seed=6)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rk.attention(*leaves, cu, cu, **options)
    assert rk.last_backend("attention") == "triton"
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth, _ = attention_ref(*exact, cu, cu, **options)
    up = rand(*out.shape, dtype=dtype, seed=7)
    grads = torch.autograd.grad(out, leaves, up)
    room = 1e-5 if dtype == torch.float32 else 1e-2
    assert (out.double() - truth).norm() / truth.norm() < room
    for got, want in zip(grads, torch.autograd.grad(truth, exact, up.double()), strict=True):
        assert (got.double() - want).norm() / want.norm() < 2 * room
    whole = out.detach()
    q, k, v = (x.detach() for x in leaves)
    for rows in (16, 64):  # the schedule changes no bit
        if "sinks" not in options:
            call = AttentionCall(
                q, k, v, cu.int(), cu.int(), None, True, dim**-0.5, options.get("window"), 5.0
            )
            assert torch.equal(forward(call, rows=rows)[0], whole)
    bounds = torch.tensor([0, 496], device="cuda")
    alone = rk.attention(*(x[1500:1996] for x in (q, k, v)), bounds, bounds, **options)
    cache = [x[1500:1996].reshape(31, 16, 2, dim) for x in (k, v)]
    for count in (1, 200):
        paged = rk.paged_attention(
            q[1996 - count : 1996], *cache, torch.arange(31, device="cuda")[None],
            torch.tensor([496], device="cuda"), **options,
            cu_seqlens_q=torch.tensor([0, count], device="cuda"),
        )  # fmt: skip
        assert torch.equal(paged, alone[-count:])
    long = [x[:1500] for x in (q, k, v)]  # two chunks: decode in pieces
    cache = [torch.cat([x, x[:4]]).reshape(94, 16, 2, dim) for x in long[1:]]
    paged = rk.paged_attention(
        long[0][-1:], *cache, torch.arange(94, device="cuda")[None],
        torch.tensor([1500], device="cuda"), cu_seqlens_q=torch.tensor([0, 1], device="cuda"),
        **options,
    )  # fmt: skip
    assert torch.equal(paged, whole[1499:1500])


@pytest.mark.parametrize("options", [{"softcap": 30.0}, {"softcap": 5.0, "logit_scale": 0.25}])
def test_capped_logits_have_the_bits_of_linear_logp(options):
    hidden, head = rand(65, 1024), 0.1 * rand(50001, 1024, seed=1)
    target = torch.arange(65, device="cuda") * 700
    logits = rk.linear(hidden, head, out_dtype=torch.float32)
    fused = rk.linear_logp(hidden, head, target, **options)
    assert torch.equal(rk.logp(logits, target, **options), fused)
