"""Advantages of a group of rewards."""

import rlk_kernels as rk
import torch
from linear_logp_suite import error


def test_group_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    scaled = rk.group_advantages(rewards, 4)
    group = rewards[:4].double()
    expected = (group - group.mean()) / (group.std() + 1e-6)
    assert error(scaled[:4], expected) < 1e-6
    assert bool((scaled[4:] == 0).all())
    plain_ = rk.group_advantages(rewards, 4, scale="none")
    assert torch.equal(plain_[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    many = torch.randn(64, generator=torch.Generator().manual_seed(1))
    whole = rk.group_advantages(many, 16)
    assert torch.equal(rk.group_advantages(many[16:32], 16), whole[16:32])


def test_equal_rewards_teach_nothing_though_their_mean_is_rounded():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7, 0.7, 0.7], dtype=torch.float64)
    assert (rewards[:3].sum() / 3 != rewards[0]).item()
    for scale in ("std", "none"):
        assert not rk.group_advantages(rewards, 3, scale=scale).any()
    # What is not a number does not pass for an equal one.
    for bad in ("nan", "inf"):
        wrong = torch.tensor([float(bad)] * 3 + [1.0, 0.0, 1.0])
        assert rk.group_advantages(wrong, 3)[:3].isnan().all()
        assert rk.group_advantages(wrong, 3)[3:].isfinite().all()
