"""A patch that ZeRO does not make."""

from typing import Any


def doubled(_module: Any, _inputs: Any, output: Any) -> Any:
    return 2 * output


def hook_on_an_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn.register_forward_hook(doubled)
