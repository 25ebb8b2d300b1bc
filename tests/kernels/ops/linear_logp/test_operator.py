"""linear_logp on the CPU: the portable backend, and Triton in its interpreter."""

import math

import pytest
import rlk_kernels as rk
import torch
from linear_logp_suite import (
    KINDS,
    case,
    equals_logp_of_linear,
    error,
    gradients,
    gradients_within_budget,
    one_sequence_loss,
    outputs,
    rows_that_differ,
    run_ours,
    truth,
    upstreams,
)
from rlk_kernels.device import DeviceFacts
from rlk_kernels.losses.linear_grpo import launch as linear_grpo
from rlk_kernels.losses.linear_grpo import plan as linear_grpo_plan
from rlk_kernels.matmul import plan as matmul_plan
from rlk_kernels.matmul import tiles
from rlk_kernels.matmul.accumulate import accumulate
from rlk_kernels.matmul.tiles import Tile
from rlk_kernels.numerics.lse_tree.portable import block_portable, merge_portable
from rlk_kernels.numerics.lse_tree.tree import LEAF
from rlk_kernels.ops.linear_logp import kernels, launch, plan, portable

BACKENDS = ["torch", "triton"]
DTYPES = [torch.float32, torch.float16]
ALL = {"torch": [torch.bfloat16, *DTYPES], "triton": DTYPES}
PAIRS = [(backend, dtype) for backend in BACKENDS for dtype in ALL[backend]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks and chunks at the sizes of a test."""
    monkeypatch.setattr(portable, "BLOCK_V", 64)
    monkeypatch.setattr(portable, "BLOCK_T", 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
def test_error_against_float64(kind, backend, dtype):
    c = case(21, 96 if kind == "confident" else 40, 205, dtype, "cpu", kind)
    for value, exact in zip(outputs(c, backend), truth(c), strict=True):
        # an offset of 1e4 leaves fp32 logits a spacing of 1e-3
        assert error(value, exact) <= (2e-3 if kind == "offset" else 1e-4)
    if kind == "confident":
        assert 0.99 < float(truth(c)[0].exp().median()) < 0.9999


def test_options_and_given_ids_follow_the_formula(backend):
    options = {"temperature": 0.7, "softcap": 4.0, "logit_scale": 1.5}
    c = case(9, 24, 100, torch.float32, "cpu", bias=True, **options)
    ids = torch.stack([c.target, c.target.flip(0), torch.full((9,), -100)], 1)
    logp, lse, entropy, id_logp = outputs(c, backend, token_ids=ids)
    for value, exact in zip((logp, lse, entropy), truth(c), strict=True):
        assert error(value, exact) <= 1e-5
    assert torch.equal(id_logp[:, 0], logp)
    assert bool((id_logp[:, 2] == 0).all())
    other = case(9, 24, 100, torch.float32, "cpu", bias=True, **options)
    object.__setattr__(other, "target", c.target.flip(0))
    assert error(id_logp[:, 1], truth(other)[0]) <= 1e-5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
def test_the_bits_of_logp_of_linear(backend, dtype, logit_dtype, temperature):
    for t, h, v, bias in ((1, 16, 16, False), (5, 40, 83, True), (33, 48, 256, False)):
        c = case(t, h, v, dtype, "cpu", "peaked", bias)
        c.target[0] = -100
        assert equals_logp_of_linear(c, backend, logit_dtype, temperature), (t, h, v)


@pytest.mark.parametrize("logit_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
def test_a_row_does_not_depend_on_its_batch(backend, dtype, logit_dtype):
    c = case(35, 24, 131, dtype, "cpu", logit_dtype=logit_dtype)
    c.target[3] = -100
    order = torch.randperm(35, generator=torch.Generator().manual_seed(1))
    parts = [slice(0, 1), slice(34, 35), slice(7, 24), order, torch.tensor([4, 4, 9])]
    assert rows_that_differ(c, backend, parts) == 0


@pytest.mark.parametrize("count", [2, 3])
def test_the_portable_backend_does_not_depend_on_threads_or_blocks_of_rows(count, monkeypatch):
    c = case(70, 40, 150, torch.float32, "cpu")
    ups = upstreams(c)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = *outputs(c, "torch"), *gradients(c, run_ours(c, "torch"), ups)
        torch.set_num_threads(count)
        monkeypatch.setattr(portable, "BLOCK_T", 7 * count)
        other = *outputs(c, "torch"), *gradients(c, run_ours(c, "torch"), ups)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_and_chunks_change_no_bit(dtype, monkeypatch):
    c = case(140, 16, 530, dtype, "cpu")
    ups = upstreams(c)

    def everything():
        return *outputs(c, "triton"), *gradients(c, run_ours(c, "triton"), ups)

    whole = everything()
    size = c.hidden.element_size()
    changes = [
        (matmul_plan, "INTERPRETED_LOGITS", Tile(32, 64, 16, 4, 1)),
        (plan, "WORKSPACE_BYTES", 140 * size * (256 + 16)),  # chunks of the vocabulary
        (plan, "STATISTICS_BYTES", 128 * 3 * 4 * 5),  # two chunks of tokens, forward
        (plan, "ONE_PASS_ELEMENTS", 128 * 16),  # two chunks of tokens, backward: two passes
    ]
    for module, name, value in changes[1:2] if dtype == torch.float32 else changes:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert all(torch.equal(a, b) for a, b in zip(everything(), whole, strict=True)), name


@pytest.mark.parametrize("v", [384, 331])  # rows of the weight permuted by 128, and as they lie
def test_the_kernels_for_tensor_maps_give_the_bits_of_those_for_pointers(v, monkeypatch):
    c = case(140, 32, v, torch.float16, "cpu", bias=True)
    ups = upstreams(c)

    def everything():
        leaves = [x.detach().clone().requires_grad_() for x in (c.hidden, c.weight, c.bias)]
        loss, metrics = one_sequence_loss(c, leaves)
        grpo = loss, metrics["logp"], *torch.autograd.grad(loss, leaves)
        return *outputs(c, "triton"), *gradients(c, run_ours(c, "triton"), ups), *grpo

    whole = everything()
    # several tiles a program
    here = DeviceFacts(interpreted=True, processors=3, tma=True, overlaps=False, gluon=False)
    for module in (launch, linear_grpo, accumulate):
        monkeypatch.setattr(module, "facts", lambda device: here)
    monkeypatch.setattr(tiles, "_PARTIAL", [(Tile(64, 32, 32, 4, 1), 1.0, 1.0)])
    launched = []
    kernel = kernels._tiles_tma_kernel
    monkeypatch.setattr(
        kernels, "_tiles_tma_kernel",
        type("Seen", (), {"__getitem__": lambda _, grid: launched.append(grid) or kernel[grid]})(),
    )  # fmt: skip
    for held, chunk in ((288 << 20, 512 << 20), (140 * 2 * (256 + 32), 128 * v * 2)):
        monkeypatch.setattr(plan, "WORKSPACE_BYTES", held)
        monkeypatch.setattr(linear_grpo_plan, "CHUNK_BYTES", chunk)
        assert all(torch.equal(a, b) for a, b in zip(everything(), whole, strict=True)), held
    assert len(launched) > 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
def test_gradients_within_the_budget(kind, backend, dtype):
    c = case(21, 64 if kind == "confident" else 24, 131, dtype, "cpu", kind)
    c.target[2] = -100
    assert max(gradients_within_budget(c, backend, logp_only=True)) <= 1.0


def test_gradients_of_every_output_with_every_option(backend):
    options = {"temperature": 0.7, "softcap": 4.0, "logit_scale": 1.5}
    c = case(21, 24, 131, torch.float32, "cpu", bias=True, **options)
    ups = upstreams(c)
    exact = gradients(c, lambda leaves: truth(c, leaves), ups, torch.float64)
    for value, expected in zip(gradients(c, run_ours(c, backend), ups), exact, strict=True):
        assert error(value, expected) <= 4e-6 * float(expected.abs().max())


@pytest.mark.parametrize(("backend", "dtype"), PAIRS)
def test_a_confident_token_keeps_the_digits_of_one_minus_p(backend, dtype):
    """Of the gradient in the bias, g (1 - p): computed from p in 16 bits it would be off by all."""
    c = case(1, 96, 200, dtype, "cpu", "confident")
    bias = torch.zeros(200, dtype=torch.float32, requires_grad=True)
    logp = rk.linear_logp(c.hidden, c.weight, c.target, bias=bias, backend=backend)
    slope = torch.autograd.grad(logp.sum(), bias)[0][c.target[0]].double()
    exact = -torch.expm1(truth(c)[0])[0]
    assert 1e-5 < float(exact) < 1e-2
    limit = {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 1e-4}[dtype]
    assert abs(float(slope / exact) - 1) < limit


def test_gradcheck():
    c = case(3, 4, 21, torch.float64, "cpu", bias=True)
    ids = torch.tensor([[1, 1, 2], [0, 20, -100], [3, 3, 3]])
    c.target[1] = -100
    c.target[2] = 3

    def run(hidden, weight, bias):
        return rk.linear_logp(
            hidden, weight, c.target, bias=bias, temperature=0.8, softcap=3.0, logit_scale=1.3,
            return_lse=True, return_entropy=True, token_ids=ids,
        )  # fmt: skip

    leaves = [x.requires_grad_() for x in (c.hidden, c.weight, c.bias)]
    assert torch.autograd.gradcheck(run, leaves)


def test_each_gradient_can_be_asked_for_alone(backend):
    c = case(20, 24, 90, torch.float32, "cpu", bias=True)
    names = ("hidden", "weight", "bias")
    ups = upstreams(c)
    whole = gradients(c, run_ours(c, backend), ups)
    for i in range(3):
        leaves = [x.clone() for x in (c.hidden, c.weight, c.bias)]
        leaves[i].requires_grad_()
        total = sum((x * up).sum() for x, up in zip(run_ours(c, backend)(leaves), ups, strict=True))
        assert torch.equal(torch.autograd.grad(total, leaves[i])[0], whole[i]), names[i]


def test_ignored_tokens_no_tokens_and_one_token(backend):
    c = case(6, 24, 90, torch.float32, "cpu")
    target = c.target.clone()
    target[[1, 4]] = torch.tensor([7, 8])
    hidden = c.hidden.clone().requires_grad_()
    ignored = target.clone()
    ignored[[1, 4]] = 55
    logp = rk.linear_logp(hidden, c.weight, ignored, ignore_index=55, backend=backend)
    whole = rk.linear_logp(c.hidden, c.weight, target, backend=backend)
    assert bool((logp[[1, 4]] == 0).all())
    assert torch.equal(logp[[0, 2, 3, 5]], whole[[0, 2, 3, 5]])
    grad = torch.autograd.grad(logp.sum(), hidden)[0]
    assert bool((grad[[1, 4]] == 0).all())
    assert bool((grad[[0, 2, 3, 5]] != 0).all())
    none = c.hidden[:0].clone().requires_grad_()
    weight = c.weight.clone().requires_grad_()
    out = rk.linear_logp(none, weight, c.target[:0], backend=backend)
    assert out.shape == (0,)
    grads = torch.autograd.grad(out.sum(), (none, weight))
    assert grads[0].shape == (0, 24)
    assert bool((grads[1] == 0).all())


def test_columns_that_cannot_be_are_minus_infinity(backend):
    """A bias of -inf (banned tokens), a whole leaf of them too."""
    c = case(5, 24, 90, torch.float32, "cpu")
    bias = torch.zeros(90)
    bias[16:33] = -math.inf
    target = torch.tensor([0, 15, 33, 89, 40])
    columns = torch.tensor([*range(16), *range(33, 90)])
    logp = rk.linear_logp(c.hidden, c.weight, target, bias=bias, backend=backend)
    at = torch.searchsorted(columns, target)
    expected = rk.linear_logp(c.hidden, c.weight[columns], at, backend="torch")
    assert error(logp, expected) < 2e-6


def test_shards_of_the_vocabulary_merge_to_the_bits_of_the_whole():
    """Statistics of aligned blocks, of any size, merged by the tree give the row's own."""
    z = torch.randn(7, 1187 * LEAF, dtype=torch.float64) * 5
    whole = block_portable(z, entropy=True)
    for width in (LEAF, 64 * LEAF, 1024 * LEAF):
        parts = [block_portable(part, entropy=True) for part in z.split(width, 1)]
        merged = merge_portable(tuple(torch.stack(x, -1) for x in zip(*parts, strict=True)))
        assert all(torch.equal(a, b) for a, b in zip(merged, whole, strict=True)), width


def test_logits_are_never_whole(monkeypatch):
    """No tensor of T x V: the largest the portable backend asks for stays a block."""
    c = case(100, 8, 320, torch.float32, "cpu")
    products = []
    product = portable.product
    monkeypatch.setattr(
        portable, "product",
        lambda *a: products.append(product(*a)) or products[-1],
    )  # fmt: skip
    gradients(c, run_ours(c, "torch"), upstreams(c))
    assert products
    assert max(x.numel() for x in products) <= 64 * 64


@pytest.mark.parametrize("ids", [torch.arange(5), torch.arange(5)[:, None]])
def test_registration_passes_torchs_own_check(ids):
    c = case(5, 16, 50, torch.float32, "cpu", bias=True)
    options = (torch.float32, 0.0, 1.0, 1.0, True, "torch")
    torch.library.opcheck(torch.ops.rlk.linear_logp, (c.hidden, c.weight, c.bias, ids, *options))
