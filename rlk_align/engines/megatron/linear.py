"""Which linears of a layer have a bias, if megatron-core's settings cannot express it."""

from typing import Any


def choose_biases(layer: Any, biased: frozenset[str]) -> None:
    """Removes the bias of those linears of a layer's spec that are not in `biased`.

    TransformerConfig has one setting for all linears and one for q, k and v, so it may add a bias
    that the checkpoint lacks. A bias of zeros would be an additional parameter, which is trained.
    """
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    for owner, name, op in (
        (attention, "linear_qkv", "q_proj"),
        (attention, "linear_proj", "o_proj"),
        (mlp, "linear_fc1", "gate_proj"),
        (mlp, "linear_fc2", "down_proj"),
    ):
        # The experts of a sparse layer have no bias.
        if op not in biased and hasattr(owner, name):
            setattr(owner, name, _without_bias(getattr(owner, name)))


def _without_bias(linear: Any) -> Any:
    """A subclass without bias, because megatron-core's specs accept only classes here."""

    class WithoutBias(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"bias": False})

    return WithoutBias
