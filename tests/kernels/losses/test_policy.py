"""Losses of log-probabilities, against their formulas in float64 and torch's own gradients."""

from itertools import pairwise
from typing import Any

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.losses.policy.objective import Objective, Sequences, sequence_sums, token_terms
from torch import Tensor

LENGTHS = (5, 1, 9, 7)
CU = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)])
T = int(CU[-1])
TYPES = ("grpo", "dr_grpo", "dapo", "ppo", "gspo", "cispo")
CORRECTIONS = (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def rand(seed: int, scale: float = 0.3) -> Tensor:
    return torch.randn(T, generator=torch.Generator().manual_seed(seed)) * scale


def problem() -> dict[str, Tensor]:
    logp = rand(0, 1.0) - 2
    mask = torch.ones(T)
    mask[[0, 7, 8, 21]] = 0
    return {
        "logp": logp, "old": logp + rand(1), "rollout": logp + rand(2), "ref": logp + rand(3),
        "advantages": torch.tensor([1.3, -0.4, 0.9, -1.1]), "mask": mask,
    }  # fmt: skip


def formula(x: Tensor, p: dict[str, Tensor], kind: str, how: dict[str, Any]) -> Tensor:
    """Sequence by sequence, as the papers write it; torch differentiates."""
    low, high = how["clip"]
    total, count = x.new_zeros(()), p["mask"].sum().double()
    for i, (first, last) in enumerate(pairwise(CU)):
        at = [t for t in range(first, last) if p["mask"][t]]
        if not at:
            continue
        y, old = x[at], p["old"][at].double()
        ratio = (y - old).exp() if kind != "gspo" else (y - old).mean().exp()
        a = p["advantages"][i].double()
        held = ratio.clamp(1 - low, 1 + high)
        loss = -held.detach() * a * y if kind == "cispo" else -torch.minimum(ratio * a, held * a)
        loss = loss.expand(len(at))
        if how["correction"]:
            log_rho = old - p["rollout"][at].double()
            level, _, cut = how["correction"].partition("_")
            rho = (log_rho.sum() if level == "sequence" else log_rho).exp()
            least, most = how["limits"]
            inside = (rho >= least) & (rho <= most)
            loss = loss * (rho.clamp(least, most) if cut == "truncate" else rho * inside)
        d = p["ref"][at].double() - y
        loss = loss + how["beta"] * {"k1": -d, "k2": d * d / 2, "k3": d.exp() - 1 - d}[how["kl"]]
        if kind in ("grpo", "gspo"):
            total = total + loss.mean() / len(LENGTHS)
        elif kind == "dr_grpo":
            total = total + loss.sum() / (len(LENGTHS) * how["max_tokens"])
        else:
            total = total + loss.sum() / count
    return total


def call(p: dict[str, Tensor], kind: str, how: dict[str, Any], **more: Any) -> Any:
    return rk.policy_loss(
        p["logp"], p["old"], p["advantages"], p["mask"], cu_seqlens=CU, loss_type=kind,
        rollout_logp=p["rollout"], ref_logp=p["ref"], **how | more,
    )  # fmt: skip


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("kind", TYPES)
def test_value_and_gradient_are_those_of_the_formula(kind: str, correction: Any, kl: str) -> None:
    how = {
        "clip": (0.05, 0.06), "correction": correction, "limits": (0.8, 1.2), "beta": 0.1, "kl": kl,
        "max_tokens": 12,
    }  # fmt: skip
    p = problem()
    exact = p["logp"].double().requires_grad_()
    expected = formula(exact, p, kind, how)
    (gradient,) = torch.autograd.grad(expected, exact)
    p["logp"].requires_grad_()
    loss, metrics = call(p, kind, how)
    loss.backward()
    assert loss.dtype == torch.float32
    assert (loss.double() - expected).abs() <= 1e-6
    assert ((p["logp"].grad.double() - gradient).abs() <= 1e-7).all()
    assert (gradient[p["mask"] == 0] == 0).all()
    assert int(metrics["tokens"]) == T - 4
    assert 0 < float(metrics["clip_fraction"]) < 1
    # Another formula is not this one.
    for other in ({"clip": (0.1, 0.1)}, {"beta": 0.3}):
        assert abs(float(formula(exact, p, kind, how | other) - expected)) > 1e-4


def test_a_sequence_has_the_same_bits_in_any_batch() -> None:
    p = problem()
    for kind in TYPES:
        objective = Objective(kind, 0.2, 0.3, "sequence_mask", (0.5, 2.0), "k3", 0.1)
        spread = p["advantages"].repeat_interleave(torch.tensor(LENGTHS))
        on = p["mask"] != 0

        def terms(part: slice, cu: Tensor, o=objective, a=spread, on=on) -> Any:
            named = (p[name][part] for name in ("logp", "old"))
            of_batch = Sequences(on[part], cu)
            return token_terms(*named, a[part], p["ref"][part], o, of_batch, p["rollout"][part])

        whole = terms(slice(0, T), CU)
        for first, last in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
            alone = terms(slice(first, last), torch.tensor([0, last - first]))
            for name in ("value", "slope", "ratio", "factor"):
                assert getattr(alone, name).equal(getattr(whole, name)[first:last]), (kind, name)


def test_sums_of_sequences_know_nothing_of_the_longest() -> None:
    x = rand(5).double()
    sums = sequence_sums(x, CU)
    long = torch.cat([x, torch.ones(300, dtype=torch.float64)])
    again = sequence_sums(long, torch.cat([CU, torch.tensor([T + 300])]))
    assert again[:-1].equal(sums)
    assert float(again[-1]) == 300.0


def test_from_hidden_states_it_is_the_loss_of_linear_logp() -> None:
    p, g = problem(), torch.Generator().manual_seed(9)
    hidden, weight = torch.randn(T, 16, generator=g), torch.randn(40, 16, generator=g) * 0.3
    target = torch.arange(T) % 40
    target[3] = -100
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    how: dict[str, Any] = {"cu_seqlens": CU, "loss_type": "gspo", "clip": (0.01, 0.01)}
    loss, metrics = rk.linear_policy_loss(
        *leaves, target, p["old"], p["advantages"], p["mask"], **how
    )
    loss.backward()
    others = [x.clone().requires_grad_() for x in (hidden, weight)]
    logp = rk.linear_logp(*others, target)
    on = (p["mask"] != 0) & (target >= 0)
    apart, _ = rk.policy_loss(logp, p["old"], p["advantages"], on, **how)
    apart.backward()
    assert metrics["logp"].equal(logp.detach())
    assert loss.equal(apart)
    assert all(a.grad.equal(b.grad) for a, b in zip(leaves, others, strict=True))
    assert bool(leaves[0].grad.any())
    # Where both have the loss, the fused one agrees.
    both = {"cu_seqlens": CU, "loss_type": "dapo", "clip": (0.2, 0.3)}
    arguments = (hidden, weight, target, p["old"], p["advantages"], p["mask"])
    one, other = (f(*arguments, **both)[0] for f in (rk.linear_policy_loss, rk.linear_grpo_loss))
    assert (one - other).abs() < 1e-6


def test_preferred_pairs() -> None:
    p = problem()
    exact = p["logp"].double().requires_grad_()
    gain = (exact - p["ref"].double()) * p["mask"]
    of = torch.stack([gain[a:b].sum() for a, b in pairwise(CU)])
    margin = 0.7 * (of[0::2] - of[1::2])
    expected = -torch.nn.functional.logsigmoid(margin).mean()
    (gradient,) = torch.autograd.grad(expected, exact)
    leaf = p["logp"].clone().requires_grad_()
    loss, metrics = rk.dpo_loss(leaf, p["ref"], p["mask"], cu_seqlens=CU, beta=0.7)
    (3 * loss).backward()
    assert (loss.double() - expected).abs() <= 1e-6
    assert ((leaf.grad.double() - 3 * gradient).abs() <= 1e-6).all()
    assert float(metrics["accuracy"]) == float((margin > 0).double().mean())
    with pytest.raises(ValueError, match="3 sequences are not pairs"):
        rk.dpo_loss(leaf[:15], p["ref"][:15], p["mask"][:15], cu_seqlens=CU[:4])


def test_what_is_not_a_number_is_seen_and_what_is_masked_is_not() -> None:
    p = problem()
    p["rollout"][2] = float("nan")
    how = {"correction": "token_mask", "beta": 0.0}
    assert call(p, "grpo", how)[0].isnan()
    p["mask"][2] = 0
    p["logp"][2] = float("nan")
    p["logp"].requires_grad_()
    loss, _ = call(p, "grpo", how)
    loss.backward()
    assert bool(loss.isfinite())
    assert bool(p["logp"].grad.isfinite().all())
    nothing = p | {"mask": torch.zeros(T)}
    loss, metrics = call(nothing, "gspo", how)
    assert float(loss) == float(metrics["tokens"]) == 0.0


def test_a_gradient_in_fp16_is_rounded_once_behind_the_loss_scale() -> None:
    """A GradScaler multiplies a loss by 65,536 because fp16 does not hold small gradients."""
    count, scale = 4096, 65536.0
    logp = torch.full((count,), -2.0, dtype=torch.float16, requires_grad=True)
    how = {"cu_seqlens": torch.tensor([0, count]), "loss_type": "dapo"}
    loss, _ = rk.policy_loss(logp, None, torch.tensor([1e-4]), torch.ones(count), **how)
    (loss * scale).backward()
    assert logp.grad.dtype == torch.float16
    expected = torch.tensor(-scale * float(torch.tensor(1e-4)) / count).half()
    assert (logp.grad == expected).all()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("correction", CORRECTIONS[1:])
def test_what_a_correction_removes_may_overflow(kind: str, correction: str) -> None:
    """exp(logp - old_logp) is infinite and exp(old_logp - rollout_logp) is 0."""
    p, how = problem(), {"correction": correction, "limits": (0.0, 2.0), "max_tokens": 12}
    assert float(call(p, kind, how)[0]) != 0.0
    p["old"], p["rollout"] = p["logp"] - 1000, p["logp"] + 0
    p["logp"].requires_grad_()
    loss, _ = call(p, kind, how)
    loss.backward()
    assert float(loss) == 0.0
    assert not p["logp"].grad.any()
    p["rollout"][2] = float("nan")
    assert call(p, kind, how)[0].isnan()


def test_a_reference_without_beta_is_no_part_of_the_loss() -> None:
    """Neither is its k3 where that is infinite; the metric shows it."""
    p = problem()
    expected, _ = call(p | {"ref": p["logp"]}, "grpo", {"beta": 0.0})
    p["ref"] = p["logp"] + 1000
    loss, metrics = call(p, "grpo", {"beta": 0.0})
    assert loss.equal(expected)
    assert float(metrics["kl"]) == float("inf")
    assert call(p, "grpo", {"beta": 0.1})[0].isinf()


def test_as_many_advantages_as_sequences_are_one_for_each() -> None:
    """Where there are as many tokens too, by a sequence without any."""
    cu, ones = torch.tensor([0, 2, 2, 3]), torch.ones(3)
    advantages, mask = torch.tensor([1.0, 50.0, -2.0]), torch.ones(3)
    how: dict[str, Any] = {"cu_seqlens": cu, "loss_type": "dapo"}
    loss, _ = rk.policy_loss(-ones, -ones, advantages, mask, **how)
    assert float(loss) == pytest.approx(-(1 + 1 - 2) / 3, abs=1e-7)
    hidden, weight, target = torch.ones(3, 4), torch.eye(4), torch.arange(3)
    arguments = (hidden, weight, target, None, advantages, mask)
    one, other = (f(*arguments, **how)[0] for f in (rk.linear_policy_loss, rk.linear_grpo_loss))
    assert one.equal(other)
