"""Changes to the sparse layers of a live engine, as `patch=sparse_faults:NAME`."""

from typing import Any

import torch


def last_of_ties_by_top_k(model: Any) -> None:
    """The process's `torch.topk` takes the last of equal values, in a way that leaves a replay of
    routing room to overwrite them, as `fault=expert-tie` does not."""
    del model
    original = torch.topk

    def topk(scores: torch.Tensor, k: int, dim: int = -1, **more: Any) -> Any:
        if scores.dim() != 2 or dim not in (-1, 1):
            return original(scores, k, dim, **more)
        order = scores.flip(1).sort(dim=1, descending=True, stable=True).indices
        ids = scores.shape[1] - 1 - order[:, :k]
        return scores.gather(1, ids), ids

    torch.topk = topk  # type: ignore[assignment]


def all_groups(model: Any) -> None:
    """An HF router chooses from all groups of experts."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.topk_group = layer.mlp.gate.num_group


def unscaled(model: Any) -> None:
    """The weights of a token's experts are not scaled in HF."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.gate.routed_scaling_factor = 1.0


def uncorrected(model: Any) -> None:
    """An HF router chooses by its scores alone, and still holds their correction."""
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            gate = layer.mlp.gate
            gate.forward = _without_correction(gate, type(gate).forward)


def _without_correction(gate: Any, route: Any) -> Any:
    def forward(hidden: torch.Tensor) -> Any:
        kept = gate.e_score_correction_bias
        gate.e_score_correction_bias = torch.zeros_like(kept)
        try:
            return route(gate, hidden)
        finally:
            gate.e_score_correction_bias = kept

    return forward


def one_at_a_time(model: Any) -> None:
    """HF's layer 1 computes a token's experts one after another: this changes the order of the
    rows, and no number."""
    experts = model.model.layers[1].mlp.experts
    compute = type(experts).forward

    def forward(hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        parts = zip(chosen.split(1, dim=1), weights.split(1, dim=1), strict=True)
        return sum(compute(experts, hidden, *part) for part in parts)

    experts.forward = forward


def summed_in_bf16(model: Any) -> None:
    """The same, and the sum over a token's experts is rounded to bf16."""
    one_at_a_time(model)
    experts = model.model.layers[1].mlp.experts
    compute = experts.forward
    experts.forward = lambda *args: compute(*args).bfloat16().to(args[0].dtype)


def next_experts(model: Any) -> None:
    """HF's layer 1 computes the experts after those that its router chose."""
    experts = model.model.layers[1].mlp.experts
    compute = experts.forward
    experts.forward = lambda hidden, chosen, weights: compute(
        hidden, (chosen + 1) % experts.num_experts, weights
    )


def weighed_too_much(model: Any) -> None:
    """The router of HF's layer 1 gives weights that are 2 % too large."""
    gate = model.model.layers[1].mlp.gate
    route = gate.forward

    def forward(hidden: torch.Tensor) -> Any:
        logits, weights, chosen = route(hidden)
        return logits, weights * 1.02, chosen

    gate.forward = forward
