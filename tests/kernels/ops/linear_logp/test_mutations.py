"""Would the tests of linear_logp notice? Each claim is broken on purpose; its check must fail."""

import pytest
import rlk_kernels as rk
import torch
from linear_logp_suite import (
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
from rlk_kernels.losses.linear_grpo import launch as linear_grpo
from rlk_kernels.losses.linear_grpo import plan as linear_grpo_plan
from rlk_kernels.numerics.lse_tree import portable as lse_tree
from rlk_kernels.ops.linear_logp import launch, plan, portable
from rlk_kernels.ops.linear_logp.options import LogitOptions

PARTS = [slice(0, 1), slice(3, 20)]


def test_before_anything_is_broken():
    c = case(35, 24, 131, torch.float32, "cpu")
    for backend in ("torch", "triton"):
        assert equals_logp_of_linear(c, backend, torch.bfloat16, 0.7)
        assert rows_that_differ(c, backend, PARTS) == 0


def test_blocks_merged_in_the_order_of_arrival_are_noticed(monkeypatch):
    """One after the other instead of in the tree: still right, no longer logp's bits."""
    c = case(35, 24, 700, torch.float32, "cpu")
    monkeypatch.setattr(portable, "BLOCK_V", 64)
    merge = portable.merge_portable

    def one_by_one(stats):
        total = tuple(x[..., 0] for x in stats)
        for i in range(1, stats[0].shape[-1]):
            pair = zip(total, (x[..., i] for x in stats), strict=True)
            total = merge(tuple(torch.stack(x, -1) for x in pair))
        return total

    assert equals_logp_of_linear(c, "torch", torch.float32, 1.0)
    monkeypatch.setattr(portable, "merge_portable", one_by_one)
    assert error(outputs(c, "torch")[0], truth(c)[0]) < 1e-5
    monkeypatch.undo()
    wide = case(300, 24, 400, torch.float32, "cpu")
    monkeypatch.setattr(portable, "BLOCK_V", 64)
    honest = portable.forward(*operands(wide))
    monkeypatch.setattr(portable, "merge_portable", one_by_one)
    broken = portable.forward(*operands(wide))
    assert not torch.equal(honest.log_s, broken.log_s)


def operands(c):
    spec = LogitOptions(torch.float32, 0.0, 1.0, 1.0)
    return c.hidden, c.weight, c.bias, c.target[:, None], spec, False


def test_a_temperature_before_the_rounding_is_noticed(backend):
    """The operands scaled instead of the logits: right to rounding, other bits."""
    c = case(35, 24, 131, torch.float32, "cpu")
    fused = rk.linear_logp(
        c.hidden / 0.7, c.weight, c.target, logit_dtype=torch.bfloat16, backend=backend
    )
    logits = rk.linear(c.hidden, c.weight, out_dtype=torch.bfloat16, backend=backend)
    assert not torch.equal(fused, rk.logp(logits, c.target, temperature=0.7, backend=backend))


def test_a_leaf_of_another_width_is_noticed(monkeypatch):
    c = case(300, 24, 400, torch.float32, "cpu", "peaked")
    whole = portable.forward(*operands(c)).log_s
    monkeypatch.setattr(lse_tree, "LEAF", 48)
    assert not torch.equal(portable.forward(*operands(c)).log_s, whole)


def test_an_order_of_tiles_that_depends_on_the_batch_is_noticed(monkeypatch):
    """In large batches two tiles change places: other neighbours in the tree."""
    c = case(200, 16, 600, torch.float32, "cpu")
    run = launch.run_tiles

    def swapped(plan, h, w, bias, spec, n, s, u=None, *rest, **more):
        run(plan, h, w, bias, spec, n, s, u, *rest, **more)
        for x in (n, s, u):
            if x is not None and x.dim() == 2 and h.shape[0] > 120:
                x[1:3] = x[1:3].flip(0).clone()

    part = outputs(c, "triton", slice(0, 120))[1]
    assert torch.equal(outputs(c, "triton")[1][:120], part)
    monkeypatch.setattr(launch, "run_tiles", swapped)
    assert not torch.equal(outputs(c, "triton")[1][:120], part)


def test_one_minus_p_in_sixteen_bits_is_noticed(monkeypatch):
    """The target's gradient left to the tile: p rounded first, its distance to 1 lost."""
    c = case(21, 64, 131, torch.float16, "cpu", "confident")
    assert max(gradients_within_budget(c, "triton", logp_only=True)) <= 1.0

    def coarse(out, ids, rows, g, a, b, spec, first, v):
        at = ids[:, 0] - first
        t = torch.nonzero((at >= 0) & (at < v)).squeeze(1)
        p = (out[t, at[t]].half() / -g[t, 0].half()).half()
        out[t, at[t]] = (g[t, 0].half() * (1 - p)).to(out.dtype)

    monkeypatch.setattr(launch, "store_id_gradients", coarse)
    assert max(gradients_within_budget(c, "triton", logp_only=True)) > 1.0


@pytest.mark.parametrize("operator", ["linear_logp", "linear_grpo_loss"])
def test_accumulators_that_lose_their_lower_halves_between_chunks_are_noticed(
    operator, monkeypatch
):
    """An accumulator kept at 16 bits: the number of chunks would show in the gradient."""
    c = case(140, 16, 530, torch.float16, "cpu")
    where = launch if operator == "linear_logp" else linear_grpo

    def grads():
        if operator == "linear_logp":
            return gradients(c, run_ours(c, "triton"), upstreams(c))
        leaves = [x.detach().clone().requires_grad_() for x in (c.hidden, c.weight)]
        return torch.autograd.grad(one_sequence_loss(c, leaves)[0], leaves)

    one = grads()
    if operator == "linear_logp":
        monkeypatch.setattr(plan, "WORKSPACE_BYTES", 140 * 2 * (256 + 16))
    else:
        monkeypatch.setattr(linear_grpo_plan, "CHUNK_BYTES", 128 * 530 * 2)
    assert all(torch.equal(a, b) for a, b in zip(one, grads(), strict=True))
    accumulate = where.accumulate

    def forgetful(*partials):
        for partial in partials:
            partial.lo.zero_()
        return accumulate(*partials)

    monkeypatch.setattr(where, "accumulate", forgetful)
    assert not all(torch.equal(a, b) for a, b in zip(one, grads(), strict=True))


def test_a_slope_left_out_is_noticed(monkeypatch):
    """The softcap's derivative."""
    c = case(21, 24, 131, torch.float32, "cpu", softcap=2.0)
    assert max(gradients_within_budget(c, "torch")) <= 1.0
    monkeypatch.setattr(portable, "softcap_slope", lambda z, spec: 1.0)
    assert max(gradients_within_budget(c, "torch")) > 1.0


def test_a_nan_or_nothing_is_no_small_error():
    one = torch.ones(2)
    assert error(one, one) == 0
    assert error(torch.tensor([1.0, float("nan")]), one) == float("inf")
    assert error(one[:0], one[:0]) == float("inf")
