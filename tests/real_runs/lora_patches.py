"""What goes wrong with an adapter in a live engine, as `patch=lora_patches:NAME`."""

from typing import Any


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
    """In vLLM's stacked projections of the first layer."""
    wrapped = model.model.layers[0].self_attn.qkv_proj
    for factors in (wrapped.lora_a_stacked, wrapped.lora_b_stacked):
        k, v = factors[1].clone(), factors[2].clone()
        factors[1].copy_(v)
        factors[2].copy_(k)


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
