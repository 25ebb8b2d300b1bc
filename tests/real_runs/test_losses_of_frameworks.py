"""The losses of policies against the functions of TRL and of verl that users train with.

verl needs ray, tensordict, torchdata, codetiming, hydra-core and pybind11 beside it: too large for
the tests' environment. It was 0.9.1.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import rlk_kernels as rk
import torch

B, L = 4, 9
CU = torch.arange(0, B * L + 1, L)
OF_TRL: dict[str, dict[str, Any]] = {
    # Ours -> what TRL is given for it.
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "ppo": {"loss_type": "bnpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"},
}
OF_VERL = {
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
    """Log-probs, old ones, advantages and the mask."""
    mask = torch.ones(B, L)
    mask[1, 5:] = mask[3, 8:] = 0
    logp = numbers(0, 1.0) - 2
    return logp, logp + numbers(1), torch.tensor([1.3, -0.4, 0.9, -1.1]), mask


def are_equal(theirs: torch.Tensor, ours: torch.Tensor, leaves: list[torch.Tensor]) -> bool:
    """Whether two losses, each of its leaf, and their gradients are equal to 1e-6."""
    grads = [torch.autograd.grad(x, y)[0] for x, y in zip((theirs, ours), leaves, strict=True)]
    assert bool(grads[0].any())
    return bool((theirs - ours).abs() <= 1e-6) and bool(((grads[0] - grads[1]).abs() <= 1e-6).all())


def of_trl(
    kind: str, logp: torch.Tensor, batch: dict[str, Any], clip: tuple[float, float], beta: float,
    corrected: bool,
) -> torch.Tensor:  # fmt: skip
    """GRPOTrainer's own loss, of log-probs that are there already."""
    trl = pytest.importorskip("trl")
    from accelerate import Accelerator

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, numbers(9).abs(), None),
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        beta=beta, epsilon_low=clip[0],
        use_vllm=corrected, vllm_importance_sampling_correction=True,
        # An upper bound of the ratio for CISPO, and how far above 1 for the others.
        epsilon_high=1 + clip[1] if kind == "cispo" else clip[1], max_completion_length=12,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        accelerator=Accelerator(cpu=True), _entropy_bonus_enabled=False, aux_loss_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    vars(trainer).update(OF_TRL[kind])
    return trl.GRPOTrainer._compute_loss(trainer, None, batch)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("kind", OF_TRL)
def test_policy_losses_are_those_of_grpo_trainer(kind: str, beta: float, corrected: bool) -> None:
    logp, old, advantages, mask = problem()
    ref, rollout, mask = logp + numbers(2), logp + numbers(3), mask.long()
    # token_truncate, as its trainer computes it
    rho = ((old - rollout) * mask).exp().clamp(max=1.1)
    clip = (1.0 if kind == "cispo" else 0.2, 0.28)
    batch = {
        "prompt_ids": mask[:, :2], "prompt_mask": mask[:, :2], "completion_ids": mask,
        "completion_mask": mask, "advantages": advantages, "old_per_token_logps": old,
        "ref_per_token_logps": ref, "importance_sampling_ratio": rho,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    leaves = [logp.clone().requires_grad_() for _ in range(2)]
    theirs = of_trl(kind, leaves[0], batch, clip, beta, corrected)
    ours, _ = rk.policy_loss(
        leaves[1].flatten(), old.flatten(), advantages, mask.flatten(), cu_seqlens=CU,
        loss_type=kind, clip=clip, max_tokens=12, rollout_logp=rollout.flatten(),
        correction="token_truncate" if corrected else None, limits=(0.0, 1.1),
        ref_logp=ref.flatten(), beta=beta,
    )  # fmt: skip
    assert are_equal(theirs, ours, leaves)
    other = of_trl(kind, leaves[0].detach(), batch, (clip[0], 0.02), beta, corrected)
    assert (other - ours).abs() > 1e-5


def test_preferred_pairs_are_those_of_dpo_trainer() -> None:
    """Whose batch has the chosen ones first, and a column more than log-probs."""
    trl = pytest.importorskip("trl")
    from accelerate import Accelerator

    logp, ref = numbers(0, 1.0) - 2, numbers(1, 1.0) - 2
    mask = torch.ones(B, L + 1, dtype=torch.int64)
    mask[1, 6:] = mask[:, :2] = 0
    on = mask[:, 1:]
    leaves = [logp.clone().requires_grad_() for _ in range(2)]

    class Scored:
        """A model whose log-probs are there already; those of masked tokens are 0, as TRL's are."""

        training = True

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(
                log_probs=leaves[0] * on, entropy=on.float(), mean_logits=on.float(),
                is_top1=on.bool(),
            )  # fmt: skip

    trainer = SimpleNamespace(
        model=Scored(), accelerator=Accelerator(cpu=True), aux_loss_enabled=False, ld_alpha=None,
        precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
        loss_weights=[1.0], beta=0.3, use_weighting=False, _tp_size=1, _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )  # fmt: skip
    chosen, rejected = (ref * on).sum(1).chunk(2)
    batch = {
        "input_ids": mask, "attention_mask": mask, "completion_mask": mask,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    theirs = trl.DPOTrainer._compute_loss(trainer, trainer.model, batch, False)
    # Neighbours are pairs here.
    order = torch.tensor([0, 2, 1, 3])
    ours, _ = rk.dpo_loss(
        leaves[1][order].flatten(), ref[order].flatten(), on[order].flatten(),
        cu_seqlens=CU, beta=0.3,
    )  # fmt: skip
    assert are_equal(theirs, ours, leaves)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("kind", OF_VERL)
def test_policy_losses_are_those_of_verl(kind: str, corrected: bool) -> None:
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    mode, average = OF_VERL[kind]
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
    assert are_equal(theirs, ours, leaves)
    assert (of_verl(0.02, logp) - ours).abs() > 1e-5


@pytest.mark.parametrize(("ours", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimates_are_those_of_verl(ours: str, theirs: str) -> None:
    pytest.importorskip("verl")
    from verl.trainer.ppo.core_algos import kl_penalty

    logp, _, _, mask = problem()
    ref = logp + numbers(4)
    _, metrics = rk.policy_loss(
        logp.flatten(), None, torch.zeros(B), mask.flatten(), cu_seqlens=CU, loss_type="dapo",
        ref_logp=ref.flatten(), beta=1.0, kl=ours,
    )  # fmt: skip
    expected = (kl_penalty(logp, ref, theirs) * mask).sum() / mask.sum()
    assert (metrics["kl"] - expected).abs() <= 1e-6
