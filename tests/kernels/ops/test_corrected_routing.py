"""Routing by corrected scores: right by float64, and a row its own, on both backends."""

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import rand
from rlk_kernels.ops.routing import portable
from rlk_kernels.ops.routing.operator import route_corrected_ref

NAN, INF = float("nan"), float("inf")
GROUPED = [(1, 1), (4, 2), (3, 3), (6, 1)]
"""(groups, top_groups) of 12 experts."""


def values(t: int, experts: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and a correction, fp32; many corrected scores tie."""
    logits = (rand(t, experts, dtype=torch.float32, device="cpu", seed=3) * 4).round() / 4
    return logits, (rand(experts, dtype=torch.float32, device="cpu", seed=4) * 2).round() / 8


@pytest.mark.parametrize(("groups", "top_groups"), GROUPED)
@pytest.mark.parametrize("normalize", [True, False])
def test_it_is_right_and_a_row_is_its_own(backend, groups, top_groups, normalize):
    logits, correction = values(35)
    how = {"normalize": normalize, "groups": groups, "top_groups": top_groups, "scale": 2.5}
    k = 2 if top_groups == 1 and groups > 1 else 4
    shares, ids = rk.route_corrected(logits, correction, k, **how, backend=backend)
    assert (shares.dtype, ids.dtype) == (torch.float32, torch.int32)
    # Scores are rounded before they are compared: where two of them tie, float64 is no judge.
    assert torch.equal(ids, by_rounded_scores(logits, correction, k, groups, top_groups))
    of_ids = logits.double().sigmoid().gather(1, ids.long())
    whole = of_ids.sum(1, keepdim=True) if normalize else 1.0
    expected = 2.5 * of_ids / whole
    assert bool(((shares - expected).abs() <= 1e-6 * expected).all())
    assert rk.last_backend("route_corrected") == backend
    for rows in (torch.arange(1), torch.arange(34, 35), torch.randperm(35)):
        part = rk.route_corrected(logits[rows], correction, k, **how, backend=backend)
        assert torch.equal(part[0], shares[rows])
        assert torch.equal(part[1], ids[rows])


def by_rounded_scores(
    logits: torch.Tensor, correction: torch.Tensor, k: int, groups: int, top_groups: int
) -> torch.Tensor:
    """The choice of each row by its fp32 scores, by sorting in Python."""
    chosen = []
    for row in (logits.double().sigmoid().float() + correction).tolist():
        size = len(row) // groups
        parts = [sorted(row[g * size : (g + 1) * size])[-2:] for g in range(groups)]
        sums = torch.tensor(parts).sum(1).tolist()
        best = sorted(range(groups), key=lambda g: (-sums[g], g))[:top_groups]
        inside = [e for e in range(len(row)) if e // size in best]
        chosen.append(sorted(sorted(inside, key=lambda e: (-row[e], e))[:k]))
    return torch.tensor(chosen, dtype=torch.int32)


def test_float64_chooses_the_same_where_nothing_ties(backend):
    logits = rand(50, 160, dtype=torch.float32, device="cpu", seed=5)
    correction = rand(160, dtype=torch.float32, device="cpu", seed=6) * 0.1
    for groups, top_groups in ((8, 4), (1, 1), (5, 2)):
        how = {"groups": groups, "top_groups": top_groups}
        _, ids = rk.route_corrected(logits, correction, 8, **how, backend=backend)
        _, exact = route_corrected_ref(logits, correction, 8, True, groups, top_groups, 1.0)
        assert torch.equal(ids, exact)


def test_ties_go_to_the_lowest_group_and_id(backend):
    zeros = torch.zeros(2, 8)
    zeros[1, 6] = 1.0
    _, ids = rk.route_corrected(zeros, torch.zeros(8), 3, groups=4, top_groups=2, backend=backend)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 6]]


def test_the_correction_chooses_and_weighs_nothing(backend):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    correction = torch.tensor([-1.0, 0.0, 0.0, 1.0])
    shares, ids = rk.route_corrected(logits, correction, 2, normalize=False, backend=backend)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(shares, logits[:, [1, 3]].sigmoid(), rtol=1e-6, atol=0)


def test_a_nan_keeps_to_its_row_and_infinities_have_their_place(backend):
    logits = torch.tensor([[1.0, NAN, 0.0, 3.0], [-INF, 0.0, INF, -INF], [-INF] * 4])
    how = {"groups": 2, "top_groups": 1, "backend": backend}
    shares, ids = rk.route_corrected(logits, torch.zeros(4), 2, **how)
    assert ids.tolist() == [[0, 1], [2, 3], [0, 1]]
    assert bool(shares[0].isnan().all())
    assert shares[1].tolist() == [1.0, 0.0]
    assert shares[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients(backend, normalize):
    logits, correction = (x.double() for x in values(6))
    logits = logits + rand(6, 12, dtype=torch.float32, device="cpu", seed=9).double()
    how = {"normalize": normalize, "groups": 4, "top_groups": 2, "scale": 2.5}
    assert torch.autograd.gradcheck(
        lambda z: rk.route_corrected(z, correction, 3, **how)[0],
        (logits.requires_grad_(),),
        fast_mode=True,
    )
    grad = rand(6, 3, dtype=torch.float32, device="cpu", seed=7)
    _, ids = rk.route_corrected(logits.detach().float(), correction.float(), 3, **how)
    exact = portable.backward_corrected(logits.detach(), ids, grad, normalize, 2.5)
    leaf = logits.detach().float().requires_grad_()
    shares, _ = rk.route_corrected(leaf, correction.float(), 3, **how, backend=backend)
    shares.backward(grad)
    assert leaf.grad is not None
    assert bool(((leaf.grad - exact).abs() <= 1e-5 * exact.abs().max()).all())
    alone = logits.detach().float()[2:3].requires_grad_()
    rk.route_corrected(alone, correction.float(), 3, **how, backend=backend)[0].backward(grad[2:3])
    assert torch.equal(alone.grad, leaf.grad[2:3])
