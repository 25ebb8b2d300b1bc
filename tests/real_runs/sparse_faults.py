"""Planted faults of sparse layers in live engines, as `patch=sparse_faults:NAME`."""

from typing import Any

import torch

LAYER = 2


def _block(model: Any) -> Any:
    return model.model.layers[LAYER].mlp


def _on_gate(model: Any, change: Any) -> None:
    """`change(logits, weights, ids)` -> weights, ids."""

    def see(_module: Any, _inputs: Any, output: Any) -> Any:
        return (output[0], *change(*output))

    _block(model).gate.register_forward_hook(see)


def flipped_expert(model: Any) -> None:
    """Every fifth token's second expert is the one that is liked least."""

    def change(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
        ids = ids.clone()
        ids[::5, 1] = logits[::5].argmin(1)
        return logits.gather(1, ids).softmax(1, torch.float32).to(weights.dtype), ids

    _on_gate(model, change)


def last_of_ties(model: Any) -> None:
    """Of equal logits the highest ids are chosen."""

    def change(logits: torch.Tensor, weights: torch.Tensor, _ids: torch.Tensor) -> Any:
        order = logits.flip(1).sort(dim=1, descending=True, stable=True).indices
        ids = logits.shape[1] - 1 - order[:, : weights.shape[1]]
        return logits.gather(1, ids).softmax(1, torch.float32).to(weights.dtype), ids

    _on_gate(model, change)


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


def unnormalised(model: Any) -> None:
    """The weights of the chosen experts do not add up to 1."""

    def change(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
        return logits.softmax(1, torch.float32).gather(1, ids).to(weights.dtype), ids

    _on_gate(model, change)


def router_in_bf16(model: Any) -> None:
    """The router's product is rounded to bf16."""
    gate = _block(model).gate

    def see(_module: Any, inputs: Any, output: Any) -> Any:
        hidden = inputs[0].reshape(-1, gate.weight.shape[1])
        logits = torch.nn.functional.linear(hidden.bfloat16(), gate.weight.bfloat16()).float()
        picked, ids = logits.topk(output[1].shape[1])
        return logits, picked.softmax(1), ids

    gate.register_forward_hook(see)


def weight_before_activation(model: Any) -> None:
    """A token's weight multiplies the gate, and not the expert's row."""
    experts = _block(model).experts

    def note(_module: Any, inputs: Any) -> Any:
        hidden, ids, weights = inputs
        order = torch.sort(ids.reshape(-1))[1]
        experts.weights = weights.reshape(-1)[order, None]
        return hidden, ids, torch.ones_like(weights)

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return experts.act_fn(gate * experts.weights) * up

    experts.register_forward_pre_hook(note)
    experts._apply_gate = apply


def dropped_token(model: Any) -> None:
    """Experts that are full drop every seventh token."""

    def see(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[::7] = 0
        return output

    _block(model).experts.register_forward_hook(see)


def shuffled_experts(model: Any) -> None:
    """Two experts have each other's first weights, as after a sync in another order."""
    weight = _block(model).experts.gate_up_proj
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]].clone()


def dropped_token_in_megatron(model: Any) -> None:
    def see(_module: Any, _inputs: Any, output: Any) -> Any:
        out = output[0].clone()
        out[::7] = 0
        return (out, *output[1:])

    model.decoder.layers[LAYER].mlp.register_forward_hook(see)


def flipped_expert_in_vllm(model: Any) -> None:
    router = model.model.layers[LAYER].mlp.experts.router
    select = router.select_experts

    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, ids = select(*args, **kwargs)
        ids, logits = ids.clone(), kwargs["router_logits"]
        ids[::5, 1] = logits[::5].argmin(1).to(ids.dtype)
        return logits.gather(1, ids.long()).softmax(1, torch.float32).to(weights.dtype), ids

    router.select_experts = select_experts
