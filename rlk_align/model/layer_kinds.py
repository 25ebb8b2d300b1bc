"""The kinds of layers in a config.json that writes them otherwise than `layer_types`."""

from typing import Any

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The letters of `hybrid_override_pattern`, in which Nemotron-H is published."""


def with_layer_types(config: dict[str, Any]) -> dict[str, Any]:
    """The config with `layer_types` and `num_hidden_layers`, which Nemotron-H states as
    `layers_block_type` or, as it was published, as `hybrid_override_pattern`."""
    kinds, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if config.get("model_type") != "nemotron_h":
        return config
    if kinds is None and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list):
        return config
    return config | {"layer_types": kinds, "num_hidden_layers": len(kinds)}
