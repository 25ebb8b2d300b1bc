"""LoRA adapters in vLLM: the settings that load them, their requests, and their live values."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rlk_align.engines.common.lora import LiveLora
from rlk_align.engines.common.places import Place
from rlk_align.engines.vllm.limits import LORA_RANKS
from rlk_align.engines.vllm.places import vllm_places
from rlk_align.model.adapter import AdapterFile, read_settings
from rlk_align.model.shape import ModelShape


def lora_settings(adapters: Sequence[AdapterFile | None]) -> dict[str, Any]:
    """The arguments of `LLM` for adapters."""
    known = [adapter for adapter in adapters if adapter is not None]
    if not known:
        return {}
    rank = max(adapter.settings.rank for adapter in known)
    return {
        "enable_lora": True,
        "max_loras": len(known),
        "max_lora_rank": next(r for r in LORA_RANKS if r >= rank),
        # Otherwise vLLM wraps the head as well, and 0.32 fails to score prompts on a CPU.
        "lora_target_modules": sorted({name for adapter in known for name in adapter.targets}),
    }


def lora_requests(adapters: Sequence[AdapterFile | None]) -> list[Any]:
    """What names each adapter in a request; None for none."""
    if not adapters:
        return []
    from vllm.lora.request import LoRARequest

    return [
        adapter and LoRARequest(f"rlk-align-{i}", i, str(adapter.folder.resolve()))
        for i, adapter in enumerate(adapters, 1)
    ]


def live_adapter(model: Any, shape: ModelShape, slot: int, path: str) -> Iterator[LiveLora]:
    """The adapter in one of vLLM's slots, whose B has the scale unless the kernels compute it;
    `path`: its folder, whose rank is that of the factors, to which vLLM adds zeros. A projection
    without one is left out."""
    rank = read_settings(path).rank
    for place in vllm_places(model, shape, 1):
        module = model.get_submodule(place.module)
        if place.end != "output" or "lora_a_stacked" not in module.__dict__:
            continue
        factors = zip(place.sites, module.lora_a_stacked, module.lora_b_stacked, strict=True)
        update = module.__dict__.get("rlk_update")
        for i, (site, a, b) in enumerate(factors):
            if bool(a[slot].any()):
                # The kernels keep the scale out of B.
                scale = 1.0 if update is None else update.scaling[i][slot]
                a_slot, b_slot = a[slot, 0, :rank], b[slot, 0, :, :rank]
                yield LiveLora(site, a_slot, b_slot, scale, kernels=update is not None)


def without_adapter(model: Any, place: Place) -> Place:
    """The place with the path of the projection inside of vLLM's wrapper, if it has one."""
    if place.end != "output":
        return place  # the parameters there are those of another operator
    inner = f"{place.holder}.base_layer"
    wrapped = "base_layer" in dict(model.get_submodule(place.holder).named_children())
    return replace(place, parameters_in=inner) if wrapped else place
