"""Ties between experts that a live engine breaks otherwise, as `patch=sparse_faults:NAME`, in a way
that leaves a replay of routing room to overwrite them, as `fault=expert-tie` does not."""

from typing import Any

import torch


def last_of_ties_by_top_k(model: Any) -> None:
    """The process's `torch.topk` takes the last of equal values."""
    del model
    original = torch.topk

    def topk(scores: torch.Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        if scores.dim() != 2 or dim not in (-1, 1):
            return original(scores, k, dim, **more)
        order = scores.flip(1).sort(dim=1, descending=True, stable=True).indices
        ids = scores.shape[1] - 1 - order[:, :k]
        return scores.gather(1, ids), ids

    torch.topk = topk  # type: ignore[assignment]
