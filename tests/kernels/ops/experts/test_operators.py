"""The operators of a sparse layer: right by float64, and the bits of a row its own."""

import pytest
import rlk_kernels as rk
import torch
from expert_suite import SPREADS, by_linear, chosen, layer, weights
from kernel_suite import LIMIT, rand, within_budget
from rlk_kernels.ops.combine import portable as combine_portable
from rlk_kernels.ops.combine.operator import combine_experts_ref
from rlk_kernels.ops.experts import grouping
from rlk_kernels.ops.experts import portable as experts_portable
from rlk_kernels.ops.experts.operator import ExpertGroups, grouped_linear_ref
from rlk_kernels.ops.linear import weight_grad
from rlk_kernels.ops.routing import portable as routing_portable
from rlk_kernels.ops.routing.operator import route_ref

EXPERTS, TOP_K = 6, 3
DTYPES = {"torch": [torch.bfloat16, torch.float32], "triton": [torch.float16, torch.float32]}
FEWER = DTYPES | {"triton": [torch.float16]}
"""For tests of several kernels, which are slow in the interpreter."""
NAN = float("nan")


def logits_of(t: int, experts: int = 17) -> torch.Tensor:
    """fp32; many of them tie."""
    return (rand(t, experts, dtype=torch.float32, device="cpu", seed=3) * 4).round() / 4


@pytest.mark.parametrize("normalize", [True, False])
def test_routing_is_right_and_a_row_is_its_own(backend, normalize):
    logits = logits_of(35)
    shares, ids = rk.route(logits, 5, normalize=normalize, backend=backend)
    truth, expected = route_ref(logits, 5, normalize)
    assert torch.equal(ids, expected)
    assert bool(((shares - truth).abs() <= 2e-6 * truth + 1e-9).all())
    assert rk.last_backend("route") == backend
    for rows in (torch.arange(1), torch.arange(34, 35), torch.randperm(35)):
        part = rk.route(logits[rows], 5, normalize=normalize, backend=backend)
        assert torch.equal(part[0], shares[rows])
        assert torch.equal(part[1], ids[rows])


def test_a_tie_goes_to_the_lowest_id(backend):
    logits = torch.tensor(
        [[1.0, 2.0, 1.0, 1.0], [0.0, -0.0, -0.0, 0.0], [-0.0, 0.0, -1.0, -2.0], [3.0] * 4]
    )
    _, ids = rk.route(logits, 2, backend=backend)
    assert ids.tolist() == [[0, 1], [0, 1], [0, 1], [0, 1]]
    wide = torch.zeros(3, 130)
    wide[1, 129] = 1.0
    wide[2, 100:] = 5e-45
    _, ids = rk.route(wide, 2, backend=backend)
    assert ids.tolist() == [[0, 1], [0, 129], [100, 101]]


def test_a_nan_keeps_to_its_row_and_infinities_have_their_place(backend):
    inf = float("inf")
    logits = torch.tensor([[1.0, NAN, 0.0], [1.0, 2.0, 0.0], [-inf, 0.0, -inf], [-inf, 1.0, 1.0]])
    shares, ids = rk.route(logits, 2, backend=backend)
    assert ids.tolist() == [[0, 1], [0, 1], [0, 1], [1, 2]]
    assert bool(shares[0].isnan().all())
    assert not bool(shares[1:].isnan().any())
    assert shares[2].tolist() == [0.0, 1.0]
    assert shares[3].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("shared", [True, False])
def test_a_row_has_the_bits_of_linear(backend, spread, shared):
    for dtype in DTYPES[backend]:
        t = 21
        ids = chosen(t, EXPERTS, TOP_K, spread, "cpu")
        x = rand(*((t, 40) if shared else (t, TOP_K, 40)), dtype=dtype, device="cpu", seed=5)
        weight = weights(EXPERTS, 37, 40, dtype, "cpu")
        groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
        y = rk.grouped_linear(x, weight, groups, backend=backend)
        assert torch.equal(y, by_linear(x, weight, ids, backend))
        truth = grouped_linear_ref(x, weight, ids)
        assert within_budget(y, truth, truth.to(dtype), dtype)
        for rows in (torch.arange(1), torch.arange(17, 21), torch.randperm(t)):
            alone = rk.group_by_expert(ids[rows], EXPERTS, backend=backend)
            assert torch.equal(rk.grouped_linear(x[rows], weight, alone, backend=backend), y[rows])


@pytest.mark.parametrize("spread", ["skewed", "dropped"])
def test_a_row_with_a_bias_has_the_bits_of_linear(backend, spread):
    for dtype in FEWER[backend]:
        t = 21
        ids = chosen(t, EXPERTS, TOP_K, spread, "cpu")
        x = rand(t, 40, dtype=dtype, device="cpu", seed=5)
        # As GPT-OSS's checkpoint has it, with the sum along the rows.
        weight = weights(EXPERTS, 40, 37, dtype, "cpu").mT
        bias = rand(EXPERTS, 37, dtype=dtype, device="cpu", seed=7)
        groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
        y = rk.grouped_linear(x, weight, groups, bias, backend=backend)
        for e in range(EXPERTS):
            at = ids == e
            rows = x[:, None].expand(-1, TOP_K, -1)[at].contiguous()
            assert torch.equal(y[at], rk.linear(rows, weight[e], bias[e], backend=backend))
        assert not bool(y[ids == EXPERTS].any())
        truth = grouped_linear_ref(x, weight, ids, bias)
        assert within_budget(y, truth, truth.to(dtype), dtype)
        alone = rk.group_by_expert(ids[17:18], EXPERTS, backend=backend)
        assert torch.equal(
            rk.grouped_linear(x[17:18], weight, alone, bias, backend=backend), y[17:18]
        )


def test_groups_are_by_expert_and_by_token(backend):
    ids = chosen(50, EXPERTS, TOP_K, "dropped", "cpu")
    groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
    flat, order = ids.flatten(), groups.order.long()
    assert order.sort().values.tolist() == list(range(150))
    bounds = groups.offsets.tolist()
    assert len(bounds) == EXPERTS + 1
    for e in range(EXPERTS):
        mine = order[bounds[e] : bounds[e + 1]]
        assert mine.tolist() == (flat == e).nonzero().flatten().tolist()
    assert bool((flat[order[bounds[-1] :]] == EXPERTS).all())
    assert bounds[0] == 0


@pytest.mark.parametrize("spread", ["even", "dropped"])
def test_the_sum_is_right_and_rounded_once(backend, spread):
    for dtype in DTYPES[backend]:
        ids = chosen(35, EXPERTS, TOP_K, spread, "cpu")
        rows = rand(35, TOP_K, 70, dtype=dtype, device="cpu", seed=1)
        shares = rand(35, TOP_K, dtype=torch.float32, device="cpu", seed=2).softmax(-1)
        y = rk.combine_experts(rows, shares, ids, EXPERTS, backend=backend)
        kept = torch.where(ids < EXPERTS, shares, 0.0)
        truth = combine_experts_ref(rows, kept)
        assert bool(((y - truth).abs() <= (truth.abs() + 0.1) * LIMIT[dtype]).all())
        assert torch.equal(y, combine_portable.forward(rows, shares, ids, EXPERTS))
        part = rk.combine_experts(rows[7:9], shares[7:9], ids[7:9], EXPERTS, backend=backend)
        assert torch.equal(part, y[7:9])


def test_shares_of_the_outputs_have_the_bits_of_all(backend):
    """Of all products by expert, for ranks that gather the activation and the sums."""
    for dtype in FEWER[backend]:
        x, router = (
            rand(9, 48, dtype=dtype, device="cpu", seed=1),
            weights(1, EXPERTS, 48, dtype, "cpu")[0],
        )
        up, down = weights(EXPERTS, 80, 48, dtype, "cpu"), weights(EXPERTS, 52, 40, dtype, "cpu")
        shares, ids = rk.route(rk.linear(x, router, out_dtype=torch.float32), TOP_K)
        groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
        halves = zip(*(half.chunk(2, 1) for half in up.chunk(2, 1)), strict=True)
        act = torch.cat(
            [rk.grouped_swiglu(x, torch.cat(h, 1), groups, backend=backend) for h in halves], -1
        )
        y = torch.cat(
            [
                rk.combine_experts(
                    rk.grouped_linear(act, rows.contiguous(), groups, backend=backend),
                    shares, ids, EXPERTS, backend=backend,
                )
                for rows in down.chunk(2, 1)
            ],
            -1,
        )  # fmt: skip
        whole = layer(x, router, up, down, TOP_K, backend)
        assert bool(whole.any())
        assert torch.equal(y, whole)


def test_a_layer_does_not_depend_on_its_batch(backend):
    for dtype in FEWER[backend]:
        x = rand(21, 48, dtype=dtype, device="cpu", seed=1)
        router, up = (
            weights(1, EXPERTS, 48, dtype, "cpu")[0],
            weights(EXPERTS, 64, 48, dtype, "cpu"),
        )
        down = weights(EXPERTS, 48, 32, dtype, "cpu")
        whole = layer(x, router, up, down, TOP_K, backend)
        for rows in ([0], [20], list(range(7)), torch.randperm(21).tolist()):
            assert torch.equal(layer(x[rows], router, up, down, TOP_K, backend), whole[rows])


def gradients(backend: str, dtype: torch.dtype, t: int = 20, bad: bool = False) -> dict:
    """Of a layer whose last two tokens are dropped; `bad`: NaN is all that these two hold."""
    x = rand(t, 24, dtype=dtype, device="cpu", seed=1)
    up, down = weights(EXPERTS, 32, 24, dtype, "cpu"), weights(EXPERTS, 24, 16, dtype, "cpu")
    ids = chosen(t, EXPERTS, TOP_K, "even", "cpu")
    ids[-2:] = EXPERTS
    wide = torch.promote_types(dtype, torch.float32)
    shares = rand(t, TOP_K, dtype=wide, device="cpu", seed=2)
    grad = rand(t, 24, dtype=dtype, device="cpu", seed=3)
    if bad:
        x[-2:], shares[-2:], grad[-2:] = NAN, NAN, NAN
    leaves = {"x": x, "up": up, "down": down, "shares": shares}
    for leaf in leaves.values():
        leaf.requires_grad_()
    groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
    both = rk.grouped_linear(x, up, groups, backend=backend)
    act = rk.swiglu(*both.chunk(2, -1), backend=backend)
    rows = rk.grouped_linear(act, down, groups, backend=backend)
    y = rk.combine_experts(rows, shares, ids, EXPERTS, backend=backend)
    found = torch.autograd.grad(y, list(leaves.values()), grad)
    return dict(zip(leaves, found, strict=True)) | {"y": y}


def test_nan_of_a_dropped_token_reaches_nobody(backend):
    for dtype in FEWER[backend]:
        clean, bad = gradients(backend, dtype), gradients(backend, dtype, bad=True)
        for name, value in clean.items():
            assert not bool(value.isnan().any()), name
            assert torch.equal(bad[name], value), name
        assert not bool(clean["y"][-2:].any())


def test_gradients_are_those_of_float64(backend):
    truth = gradients("torch", torch.float64)
    for dtype in FEWER[backend]:
        for name, value in gradients(backend, dtype).items():
            # inputs were rounded to the dtype, too
            limit = 12 * LIMIT[dtype] * truth[name].abs().max()
            assert bool(((value - truth[name]).abs() <= limit).all()), name


@pytest.mark.parametrize("spread", ["skewed", "dropped"])
def test_weight_gradients_are_those_of_linear_over_an_experts_rows(backend, spread):
    for dtype in FEWER[backend]:
        t = 40
        ids = chosen(t, EXPERTS, TOP_K, spread, "cpu")
        x = rand(t, 40, dtype=dtype, device="cpu", seed=5)
        grad = rand(t, TOP_K, 33, dtype=dtype, device="cpu", seed=6)
        weight = weights(EXPERTS, 33, 40, dtype, "cpu").requires_grad_()
        groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
        (found,) = torch.autograd.grad(
            rk.grouped_linear(x, weight, groups, backend=backend), weight, grad
        )
        rows = x[:, None].expand(-1, TOP_K, -1)
        for e in range(EXPERTS):
            at = ids == e
            dy, mine = grad[at].contiguous(), rows[at].contiguous()
            assert torch.equal(found[e], weight_grad(dy, mine, dtype, backend)), e


@pytest.mark.parametrize("shape", [(30, 40), (30, TOP_K, 64)])
def test_swiglu_of_the_halves_in_one_kernel_has_its_bits(backend, shape):
    ids = chosen(30, EXPERTS, TOP_K, "dropped", "cpu")
    groups = rk.group_by_expert(ids, EXPERTS, backend=backend)
    for dtype in FEWER[backend]:
        weight = weights(EXPERTS, 2 * 37, shape[-1], dtype, "cpu")
        x = rand(*shape, dtype=dtype, device="cpu", seed=5)
        both = rk.grouped_linear(x, weight, groups, backend=backend)
        expected = rk.swiglu(*both.chunk(2, -1), backend=backend)
        assert torch.equal(rk.grouped_swiglu(x, weight, groups, backend=backend), expected)
        assert rk.last_backend("grouped_swiglu") == backend
        assert not bool(expected[ids == EXPERTS].any())
        assert bool(expected[ids < EXPERTS].any())


def test_swiglu_of_the_halves_in_one_kernel_has_no_gradient():
    groups = rk.group_by_expert(chosen(4, EXPERTS, TOP_K, "even", "cpu"), EXPERTS)
    weight = weights(EXPERTS, 6, 8, torch.float32, "cpu")
    x = rand(4, 8, dtype=torch.float32, device="cpu", seed=5).requires_grad_()
    with pytest.raises(NotImplementedError, match="grouped_swiglu"):
        rk.grouped_swiglu(x, weight, groups).sum().backward()


def test_many_rows_are_grouped_as_few_are():
    ids = chosen(200, 5, 3, "dropped", "cpu")
    expected = experts_portable.group(ids, 5)
    for found in (grouping.group(ids, 5, few=few) for few in ((1024,), ())):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_gradcheck():
    ids = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [1, 4]], dtype=torch.int32)  # one dropped
    groups = rk.group_by_expert(ids, 4)

    def double(*shape, seed):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return x.requires_grad_()

    def run(x, weight, shares):
        rows = rk.grouped_linear(x, weight, groups)
        again = rk.grouped_linear(rows, weight, groups)
        return rk.combine_experts(again, shares, ids, 4)

    assert torch.autograd.gradcheck(
        run, (double(5, 3, seed=1), double(4, 3, 3, seed=2), double(5, 2, seed=3))
    )
    for normalize in (True, False):
        assert torch.autograd.gradcheck(
            lambda z, n=normalize: rk.route(z, 2, normalize=n)[0], (double(5, 6, seed=4),)
        )


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_of_the_router(backend, normalize):
    logits, grad = logits_of(33), rand(33, 5, dtype=torch.float32, device="cpu", seed=9)
    found = []
    for dtype, runs_on in ((torch.float32, backend), (torch.float64, "torch")):
        leaf = logits.detach().clone().to(dtype).requires_grad_()
        shares, _ = rk.route(leaf, 5, normalize=normalize, backend=runs_on)
        shares.backward(grad.to(dtype))
        found.append(leaf.grad)
    assert bool(((found[0] - found[1]).abs() <= 4e-6).all())
    assert float(found[0].abs().max()) > 0.05


# Would the tests notice?


def test_a_top_k_with_other_ties_is_noticed(monkeypatch):
    def last(logits, k, normalize):
        ids = (logits.shape[1] - 1 - logits.flip(-1).topk(k).indices).sort(-1).values
        chosen_logits = logits.gather(-1, ids)
        return chosen_logits.softmax(-1), ids.int()

    monkeypatch.setattr(routing_portable, "forward", last)
    with pytest.raises(AssertionError):
        test_routing_is_right_and_a_row_is_its_own("torch", True)


def test_a_grid_shared_by_an_experts_rows_is_noticed(monkeypatch):
    """A row rounded to what the largest row of its expert allows."""
    honest = experts_portable.product

    def coarse(a, b, bias, trans_a, trans_b, dtype):
        step = a.float().abs().max() / 64
        return honest(
            ((a.float() / step).round() * step).to(a.dtype), b, bias, trans_a, trans_b, dtype
        )

    monkeypatch.setattr(experts_portable, "product", coarse)
    with pytest.raises(AssertionError):
        test_a_row_has_the_bits_of_linear("torch", "even", True)


def test_a_bias_that_is_added_after_the_rounding_is_noticed(monkeypatch):
    honest = experts_portable.forward

    def late(x, weight, order, offsets, each, bias=None):
        y = honest(x, weight, order, offsets, each)
        if bias is not None:
            for e in range(len(bias)):
                y[order[offsets[e] : offsets[e + 1]].long()] += bias[e]
        return y

    monkeypatch.setattr(experts_portable, "forward", late)
    with pytest.raises(AssertionError):
        test_a_row_with_a_bias_has_the_bits_of_linear("torch", "skewed")


def test_a_sum_by_descending_id_is_noticed(monkeypatch):
    honest = combine_portable.forward

    def descending(rows, shares, ids, experts):
        return honest(rows.flip(1), shares.flip(1), ids.flip(1), experts)

    rows = rand(35, TOP_K, 70, dtype=torch.float32, device="cpu", seed=1)
    shares = rand(35, TOP_K, dtype=torch.float32, device="cpu", seed=2)
    ids = chosen(35, EXPERTS, TOP_K, "even", "cpu")
    assert not torch.equal(
        descending(rows, shares, ids, EXPERTS), honest(rows, shares, ids, EXPERTS)
    )


def test_a_dropped_slot_that_is_multiplied_by_zero_is_noticed(monkeypatch):
    def forward(rows, shares, ids, experts):
        kept = torch.where(ids < experts, shares, 0.0)
        return (rows.float() * kept[..., None]).sum(1).to(rows.dtype)

    monkeypatch.setattr(combine_portable, "forward", forward)
    groups = rk.group_by_expert(torch.tensor([[0, 1]], dtype=torch.int32), 1)
    assert isinstance(groups, ExpertGroups)
    rows = torch.tensor([[[1.0], [NAN]]])
    y = rk.combine_experts(rows, torch.ones(1, 2), groups.ids, 1)
    assert bool(y.isnan().all())  # which test_nan_of_a_dropped_token_reaches_nobody excludes
