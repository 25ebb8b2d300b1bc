"""Patches of a live SGLang model, as users write them."""

from typing import Any


def at_most_32_rows(model: Any) -> None:
    """Fails in a forward of more rows."""

    def check(_module: Any, inputs: Any) -> None:
        assert len(inputs[0]) <= 32, len(inputs[0])

    model.model.register_forward_pre_hook(check)


def louder_value(model: Any) -> None:
    """Changes a live weight: rows of v, in the product that q and k share."""
    model.model.layers[2].self_attn.qkv_proj.weight.data[-1] *= 1.5


def narrower_attention(model: Any) -> None:
    model.model.layers[1].self_attn.attn.scaling *= 0.5
