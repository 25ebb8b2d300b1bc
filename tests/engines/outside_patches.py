"""Patches that the tests install in the third-party engine."""

from typing import Any


def scaled_down_proj(model: Any) -> None:
    """Scales the output of layer 1's down_proj by 1.05."""
    model.layers[1].down_proj.register_forward_hook(lambda _module, _inputs, out: out * 1.05)
