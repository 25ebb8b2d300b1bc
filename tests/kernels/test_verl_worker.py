"""The kernels' log-prob in verl's place, and what a run says at its end. Neither needs verl."""

from typing import Any

import pytest
import rlk_kernels as rk
import torch
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.verl.worker import TokenLogprobs, conclude


def rows(vocabulary: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, vocabulary, generator=generator)
    return logits, torch.randint(0, 250, (2, 5), generator=generator)


def test_the_log_prob_is_the_kernels() -> None:
    logits, labels = rows()
    logprobs = TokenLogprobs()
    found = logprobs(logits, labels, inplace_backward=False)
    assert torch.equal(found.flatten(), rk.logp(logits.flatten(0, 1), labels.flatten()))
    assert logprobs.rlk_calls == 1


@pytest.mark.parametrize("placeholders", [(), (7, 200)])
def test_what_verls_rollout_never_samples_has_no_probability(placeholders: tuple[int, ...]) -> None:
    """verl's rollout sets these logits to -inf; the bits and the gradients are those of that."""
    logits, labels = rows()
    labels[labels == 7] = 8
    labels[labels == 200] = 201
    masked = logits.clone()
    masked[..., 280:] = -torch.inf
    masked[..., list(placeholders)] = -torch.inf
    logprobs = TokenLogprobs()
    logprobs.vocabulary, logprobs.placeholders = 280, placeholders
    leaf, reference = logits.requires_grad_(), masked.requires_grad_()
    found = logprobs(leaf, labels)
    expected = rk.logp(reference.flatten(0, 1), labels.flatten())
    assert torch.equal(found.flatten(), expected)
    assert (found > rk.logp(logits.flatten(0, 1), labels.flatten()).view(2, 5)).all()
    found.sum().backward()
    expected.sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, reference.grad)


REPORT: dict[str, Any] = {
    "replaced": 63, "not_replaced": (), "uncalled": (), "logprobs": 4, "checked": 2, "steps": 2,
}  # fmt: skip


def test_a_run_ends_with_what_ran() -> None:
    assert conclude([REPORT]) == (
        "rlk_kernels in verl: 1 worker, 63 operators and the log-prob by the kernels, each called; "
        "the rollout held the trainer's weights, bit for bit, after 2 checked copies"
    )


def test_a_run_without_a_step_says_so() -> None:
    """Validation alone: the trainer computes nothing."""
    idle = REPORT | {"steps": 0, "uncalled": ("embed",), "logprobs": 0, "checked": 1}
    assert "no step was taken" in conclude([idle])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"uncalled": ("layers.0.act",)}, "never called the kernels of layers.0.act"),
        ({"not_replaced": ("layers.1.attn",)}, "lacks the kernels of layers.1.attn"),
        ({"logprobs": 0}, "never called the kernels' log-prob"),
        ({"checked": 0}, "no copy of weights"),
    ],
)
def test_a_run_in_which_a_kernel_is_missing_ends_with_an_error(
    wrong: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotSupported, match="worker 1") as raised:
        conclude([REPORT, REPORT | wrong])
    assert named in str(raised.value)
