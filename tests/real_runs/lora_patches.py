"""What goes wrong with an adapter in a live engine, as `patch=lora_patches:NAME`."""

from typing import Any

import torch


def _layers(model: Any) -> list[Any]:
    """The projections of a model of transformers that PEFT wrapped."""
    return [m for m in model.modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")]


def merged_and_unmerged(model: Any) -> None:
    """What TRL does at each synchronisation, with a base in the model's dtype."""
    for layer in _layers(model):
        layer.merge()
        layer.unmerge()


def scaled_twice(model: Any) -> None:
    for layer in _layers(model):
        layer.scaling["default"] *= layer.scaling["default"]


def never_scaled(model: Any) -> None:
    for layer in _layers(model):
        layer.scaling["default"] = 1.0


def b_of_an_earlier_step(model: Any) -> None:
    """An optimiser has moved B since it was synchronised."""
    for layer in _layers(model):
        b = layer.lora_B["default"].weight.data
        b += 0.01 * b.sign()


def a_in_float16(model: Any) -> None:
    for layer in _layers(model):
        a = layer.lora_A["default"].weight
        a.data = a.data.to(torch.float16).to(a.dtype)


def dropout_on(model: Any) -> None:
    """As while PEFT trains."""
    for layer in _layers(model):
        layer.lora_dropout["default"] = torch.nn.Dropout(0.1).train()


def half_of_the_layers(model: Any) -> None:
    layers = model.model.layers
    for layer in layers[: len(layers) // 2]:
        for wrapped in _layers(layer):
            wrapped.enable_adapters(False)


def counted_twice(model: Any) -> None:
    """Merged into the weights, and applied beside them as well."""
    for layer in _layers(model):
        layer.merge()
        layer.merged_adapters.clear()


def k_and_v_exchanged(model: Any) -> None:
    _exchange(model.model.layers[0].self_attn.qkv_proj, 1, 2)


def gate_and_up_exchanged(model: Any) -> None:
    _exchange(model.model.layers[0].mlp.gate_up_proj, 0, 1)


def _exchange(wrapped: Any, i: int, j: int) -> None:
    """Two of vLLM's stacked projections."""
    for factors in (wrapped.lora_a_stacked, wrapped.lora_b_stacked):
        first, second = factors[i].clone(), factors[j].clone()
        factors[i].copy_(second)
        factors[j].copy_(first)


def withheld(model: Any) -> None:
    """An adapter that vLLM never got."""
    for module in model.modules():
        if "lora_a_stacked" in module.__dict__:
            for factor in (*module.lora_a_stacked, *module.lora_b_stacked):
                factor.zero_()


def bypassed(model: Any) -> None:
    """Another function computes the first projection's adapter, as PEFT does."""
    layer = model.model.layers[0].self_attn.q_proj
    a, b = (factors["default"].weight for factors in (layer.lora_A, layer.lora_B))

    def forward(x: Any) -> Any:
        base = layer.base_layer(x)
        update = x.to(a.dtype) @ a.T @ b.T * layer.scaling["default"]
        return (base + update).to(base.dtype)

    layer.forward = forward
