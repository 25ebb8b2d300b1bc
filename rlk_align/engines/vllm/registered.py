"""The classes of decoders that vLLM has to be given, because its module or its class for them is
also one for images."""

from rlk_align.engines.common.stand_ins import TORCHVISION, stand_in
from rlk_align.model.vision import TOWER

_WITH_IMAGES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Architectures whose module imports torchvision."""


def register_without_torchvision() -> None:
    """Registers the classes for Qwen3.5 that vLLM would load, its own or those of the kernels:
    vLLM's module imports torchvision for images, and vLLM would import it in another process first,
    where no stand-in is."""
    if not stand_in({"torchvision": TORCHVISION}):
        return
    from vllm import ModelRegistry

    for architecture in _WITH_IMAGES:
        known = ModelRegistry.models[architecture]
        ModelRegistry.register_model(architecture, known.load_model_cls())


def register_without_tower(architecture: str) -> None:
    """Registers a class of vLLM's that ignores the weights of the part for images: vLLM's own
    refuses them, as its class for images has the decoder inside."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.utils import WeightsMapper

    known = ModelRegistry.models[architecture].load_model_cls()
    mapper = known.hf_to_vllm_mapper | WeightsMapper(orig_to_new_prefix={TOWER: None})
    alone = type(known.__name__, (known,), {"hf_to_vllm_mapper": mapper})
    ModelRegistry.register_model(architecture, alone)
