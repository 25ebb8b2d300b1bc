"""`policy_loss` against verl's own functions. Needs verl 0.9.1, and of what it asks for ray,
tensordict, torchdata, codetiming, hydra-core and pybind11: too large for the tests' environment."""

from typing import Any

import pytest
import rlk_kernels as rk
import torch

pytest.importorskip("verl")
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.workers.config import ActorConfig

B, L = 4, 9
CU = torch.arange(0, B * L + 1, L)
SETTINGS = {
    # Ours -> verl's policy_loss.loss_mode and loss_agg_mode.
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "dapo": ("vanilla", "token-mean"),
    "ppo": ("vanilla", "token-mean"),
    "gspo": ("gspo", "seq-mean-token-mean"),
    "cispo": ("cispo", "token-mean"),
}


def numbers(seed: int, scale: float = 0.3) -> torch.Tensor:
    return torch.randn(B, L, generator=torch.Generator().manual_seed(seed)) * scale


def problem() -> tuple[torch.Tensor, ...]:
    mask = torch.ones(B, L)
    mask[1, 5:] = mask[3, 8:] = 0
    logp = numbers(0, 1.0) - 2
    return logp, logp + numbers(1), torch.tensor([1.3, -0.4, 0.9, -1.1]), mask


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_policy_losses_are_those_of_verl(kind: str, corrected: bool) -> None:
    mode, average = SETTINGS[kind]
    logp, old, advantages, mask = problem()
    rollout = old + numbers(3)
    # rollout_is=token, or sequence where the ratio is a sequence's, at a threshold
    log_rho, level = (old - rollout) * mask, "token"
    if kind == "gspo":
        log_rho, level = log_rho.sum(1, keepdim=True).expand(B, L), "sequence"
    weights = (log_rho.exp() * mask).clamp(max=1.1) if corrected else None

    def of_verl(high: float, leaf: torch.Tensor) -> torch.Tensor:
        how: dict[str, Any] = {"clip_ratio_low": 0.2, "clip_ratio_high": high, "clip_ratio_c": 1e9}
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=4,
            **how,
        )  # fmt: skip
        spread = advantages[:, None].expand(B, L)
        return get_policy_loss_fn(mode)(
            old, leaf, spread, mask, average, config=config, rollout_is_weights=weights
        )[0]

    leaves = [logp.clone().requires_grad_() for _ in range(2)]
    theirs = of_verl(0.28, leaves[0])
    ours, _ = rk.policy_loss(
        leaves[1].flatten(), old.flatten(), advantages, mask.flatten(), cu_seqlens=CU,
        loss_type=kind, clip=(0.2, 0.28), rollout_logp=rollout.flatten(), limits=(0.0, 1.1),
        correction=f"{level}_truncate" if corrected else None, max_tokens=L,
    )  # fmt: skip
    theirs.backward()
    ours.backward()
    assert (theirs - ours).abs() <= 1e-6
    assert ((leaves[0].grad - leaves[1].grad).abs() <= 1e-6).all()
    assert (of_verl(0.02, logp) - ours).abs() > 1e-5


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimates_are_those_of_verl(ours: str, theirs: str) -> None:
    logp, _, _, mask = problem()
    ref = logp + numbers(4)
    _, metrics = rk.policy_loss(
        logp.flatten(), None, torch.zeros(B), mask.flatten(), cu_seqlens=CU, loss_type="dapo",
        ref_logp=ref.flatten(), beta=1.0, kl=ours,
    )  # fmt: skip
    expected = (kl_penalty(logp, ref, theirs) * mask).sum() / mask.sum()
    assert (metrics["kl"] - expected).abs() <= 1e-6
