"""What goes wrong with quantised weights in a live engine, as `patch=fp8_patches:NAME`."""

from typing import Any


def one_weight_moved(model: Any) -> None:
    """As an optimiser leaves it that steps on dequantised weights."""
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight *= 1.01
