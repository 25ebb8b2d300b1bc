"""The loss that a causal LM of transformers returns for `labels`, from the kernels' log-probs."""

from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile

NO_TOKEN = -1
"""A target whose log-prob is 0, without a gradient."""


def causal_lm_loss(
    logits: Tensor, labels: Tensor | None, vocab_size: int,
    num_items_in_batch: Tensor | int | None = None, ignore_index: int = -100,
    shift_labels: Tensor | None = None, **_unused: Any,
) -> Tensor:  # fmt: skip
    """The sum of the negative log-probs of logits[B, T, V] at the next label in labels[B, T] (or at
    shift_labels[B, T]), divided by num_items_in_batch or by the number of labels, in fp32. A label
    that is neither in the vocabulary nor ignore_index counts as a target beyond the vocabulary."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.flatten().to(logits.device)
    real = target != ignore_index
    # A negative label is outside the vocabulary, like one beyond its end.
    target = torch.where(real, torch.where(target < 0, vocab_size, target), NO_TOKEN)
    logprobs = profile.logp(logits.reshape(-1, vocab_size), target)
    items = real.sum() if num_items_in_batch is None else num_items_in_batch
    return -logprobs.sum() / (items.to(logprobs.device) if isinstance(items, Tensor) else items)
