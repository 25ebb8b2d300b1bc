"""Patches that the tests put into the engine from outside."""

from typing import Any


def scaled_down_proj(model: Any) -> None:
    """Layer 1 gives a twentieth too much."""
    model.layers[1].down_proj.register_forward_hook(lambda _module, _inputs, out: out * 1.05)
