"""The classes of decoders that vLLM has to be given, because its module or its class for them is
also one for images."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rlk_align.engines.common.stand_ins import TORCHVISION, stand_in
from rlk_align.model.checkpoint import decoder, transformers_config
from rlk_align.model.vision import decoder_tensor, is_of_decoder

_WITH_IMAGES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Architectures whose module imports torchvision."""


def register_without_torchvision() -> None:
    """Registers the classes for Qwen3.5 that vLLM would load, its own or those of the kernels:
    vLLM's module imports torchvision for images, and vLLM would import it in another process first,
    where no stand-in is."""
    if not stand_in({"torchvision": TORCHVISION}):
        return
    from vllm import ModelRegistry

    # vLLM 0.26 has them with the kernels alone.
    for architecture in ModelRegistry.models.keys() & set(_WITH_IMAGES):
        known = ModelRegistry.models[architecture]
        ModelRegistry.register_model(architecture, known.load_model_cls())


def decoder_alone(model: Path) -> dict[str, Any]:
    """The arguments of vLLM's `LLM` for a checkpoint that also sees images: its decoder's config
    and class. The class is registered here. It ignores the weights of the part for images, which
    vLLM's own refuses, as its class for images has the decoder inside. Raises ModelError."""
    found = decoder(model)
    if found is None:
        return {}
    from vllm import ModelRegistry

    known = ModelRegistry.models[found.cls].load_model_cls()

    def load_weights(self: Any, weights: Iterable[tuple[str, Any]]) -> set[str]:
        named = ((decoder_tensor(name), value) for name, value in weights if is_of_decoder(name))
        loaded: set[str] = known.load_weights(self, named)
        return loaded

    alone = type(known.__name__, (known,), {"load_weights": load_weights})
    ModelRegistry.register_model(found.cls, alone)
    return {"hf_overrides": partial(_config, model, found.cls)}


def _config(model: Path, architecture: str, _of_images: Any) -> Any:
    """The decoder's config, in place of the config that vLLM has read."""
    return transformers_config(model, architectures=[architecture])
