"""A plug-in of SGLang whose model computes a product that is not that of its weights: down_proj of
layer 1 is too large."""

from typing import Any


def plugin() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    load = ModelRunner.load_model

    def load_model(self: Any, *args: Any, **more: Any) -> Any:
        loaded = load(self, *args, **more)
        product = self.model.model.layers[1].mlp.down_proj
        product.register_forward_hook(lambda _module, _inputs, output: (output[0] * 1.03125, None))
        return loaded

    ModelRunner.load_model = load_model
