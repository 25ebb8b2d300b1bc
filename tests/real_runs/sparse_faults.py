"""Ties between experts that live engines break otherwise, as `patch=sparse_faults:NAME`."""

from typing import Any

import torch

LAYER = 2


def last_of_ties(model: Any) -> None:
    """Of equal logits the highest ids are chosen."""

    def change(logits: torch.Tensor, weights: torch.Tensor, _ids: torch.Tensor) -> Any:
        order = logits.flip(1).sort(dim=1, descending=True, stable=True).indices
        ids = logits.shape[1] - 1 - order[:, : weights.shape[1]]
        return logits.gather(1, ids).softmax(1, torch.float32).to(weights.dtype), ids

    def see(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0], *change(*output))

    model.model.layers[LAYER].mlp.gate.register_forward_hook(see)


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
