"""A LoRA adapter in vLLM: the settings that load it, its request, and its live values."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlk_align.engines.common.lora import LiveLora
from rlk_align.engines.common.places import Place
from rlk_align.engines.vllm.limits import LORA_RANKS
from rlk_align.engines.vllm.places import vllm_places
from rlk_align.model.adapter import AdapterFile
from rlk_align.model.shape import ModelShape


def lora_settings(adapter: AdapterFile | None) -> dict[str, Any]:
    """The arguments of `LLM` for an adapter."""
    if adapter is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(r for r in LORA_RANKS if r >= adapter.settings.rank),
        # Otherwise vLLM wraps the head as well, and 0.32 fails to score prompts on a CPU.
        "lora_target_modules": adapter.targets,
    }


def lora_request(adapter: AdapterFile) -> Any:
    """What names the adapter in a request."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("rlk-align", 1, str(adapter.folder.resolve()))


def live_adapter(model: Any, shape: ModelShape, rank: int) -> Iterator[LiveLora]:
    """The adapter in vLLM's first slot, whose B has the scale unless the kernels compute it;
    `rank`: its rank, to which vLLM adds zeros. A projection without one is left out."""
    for place in vllm_places(model, shape, 1):
        module = model.get_submodule(place.module)
        if place.end != "output" or "lora_a_stacked" not in module.__dict__:
            continue
        factors = zip(place.sites, module.lora_a_stacked, module.lora_b_stacked, strict=True)
        update = module.__dict__.get("rlk_update")
        for i, (site, a, b) in enumerate(factors):
            if bool(a[0].any()):
                # The kernels keep the scale out of B.
                scale = 1.0 if update is None else update.scaling[i][0]
                yield LiveLora(
                    site, a[0, 0, :rank], b[0, 0, :, :rank], scale, kernels=update is not None
                )


def without_adapter(model: Any, place: Place) -> Place:
    """The place with the path of the projection inside of vLLM's wrapper, if it has one."""
    inner = f"{place.holder}.base_layer"
    wrapped = "base_layer" in dict(model.get_submodule(place.holder).named_children())
    return replace(place, parameters_in=inner) if wrapped else place
