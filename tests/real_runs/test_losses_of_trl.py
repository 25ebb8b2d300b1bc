"""`policy_loss` against the function of TRL that users train with."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import rlk_kernels as rk
import torch

trl = pytest.importorskip("trl")
from accelerate import Accelerator  # noqa: E402

B, L = 4, 9
SETTINGS: dict[str, dict[str, Any]] = {
    # Ours -> what TRL is given for it.
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo"},
    "ppo": {"loss_type": "bnpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo"},
}


def numbers(seed: int, scale: float = 0.3) -> torch.Tensor:
    return torch.randn(B, L, generator=torch.Generator().manual_seed(seed)) * scale


def of_trl(
    kind: str, logp: torch.Tensor, batch: dict[str, Any], clip: tuple[float, float], beta: float,
    corrected: bool,
) -> torch.Tensor:  # fmt: skip
    """GRPOTrainer's own loss, of log-probs that are there already."""
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
    vars(trainer).update(SETTINGS[kind])
    return trl.GRPOTrainer._compute_loss(trainer, None, batch)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("kind", SETTINGS)
def test_policy_losses_are_those_of_grpo_trainer(kind: str, beta: float, corrected: bool) -> None:
    logp, mask = numbers(0, 1.0) - 2, torch.ones(B, L, dtype=torch.int64)
    mask[1, 5:] = mask[3, 8:] = 0
    old, ref, rollout = (logp + numbers(seed) for seed in (1, 2, 3))
    advantages = torch.tensor([1.3, -0.4, 0.9, -1.1])
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
    flat = {"old": old, "ref": ref, "rollout": rollout}
    flat = {name: x.flatten() for name, x in flat.items()}
    ours, _ = rk.policy_loss(
        leaves[1].flatten(), flat["old"], advantages, mask.flatten(),
        cu_seqlens=torch.arange(0, B * L + 1, L), loss_type=kind, clip=clip, max_tokens=12,
        rollout_logp=flat["rollout"], correction="token_truncate" if corrected else None,
        limits=(0.0, 1.1), ref_logp=flat["ref"], beta=beta,
    )  # fmt: skip
    theirs.backward()
    ours.backward()
    assert (theirs - ours).abs() <= 1e-6
    assert ((leaves[0].grad - leaves[1].grad).abs() <= 1e-6).all()
    assert bool(leaves[0].grad.any())
    other = of_trl(kind, leaves[0].detach(), batch, (clip[0], 0.02), beta, corrected)
    assert (other - ours).abs() > 1e-5


def test_preferred_pairs_are_those_of_dpo_trainer() -> None:
    """Whose batch has the chosen ones first, and a column more than log-probs."""
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
        cu_seqlens=torch.arange(0, B * L + 1, L), beta=0.3,
    )  # fmt: skip
    theirs.backward()
    ours.backward()
    assert (theirs - ours).abs() <= 1e-6
    assert ((leaves[0].grad - leaves[1].grad).abs() <= 1e-6).all()
    assert bool(leaves[0].grad.any())
