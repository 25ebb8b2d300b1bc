"""Which linears of a layer have a bias, where megatron-core's switches cannot say it."""

from typing import Any


def choose_biases(layer: Any, biased: frozenset[str]) -> None:
    """Has the linears of a layer's spec made with a bias or without one, as `biased` says.

    TransformerConfig has one switch for all linears and one for q, k and v. What it would give a
    bias that the checkpoint lacks is made without: a bias of zeros would be a parameter too many,
    and would be trained.
    """
    attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
    for owner, name, op in (
        (attention, "linear_qkv", "q_proj"),
        (attention, "linear_proj", "o_proj"),
        (mlp, "linear_fc1", "gate_proj"),
        (mlp, "linear_fc2", "down_proj"),
    ):
        # The experts of a sparse layer have none.
        if op not in biased and hasattr(owner, name):
            setattr(owner, name, _without_bias(getattr(owner, name)))


def _without_bias(linear: Any) -> Any:
    """A subclass, because megatron-core takes nothing else for a module that it makes."""

    class WithoutBias(linear):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"bias": False})

    return WithoutBias
