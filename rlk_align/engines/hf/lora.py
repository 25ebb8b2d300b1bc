"""A LoRA adapter in a model of transformers, by PEFT."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rlk_align.engines.common.lora import LiveLora
from rlk_align.engines.common.places import Place
from rlk_align.errors import ModelError
from rlk_align.text import one_line

NAME = "default"
"""PEFT's name of an adapter that has none."""


MERGED = "PEFT's merge_and_unload"
"""What merges an adapter: scale · B · A in the adapter's dtype, and one rounding of the sum."""


def add_adapter(model: Any, path: str, in_float32: bool) -> None:
    """Puts PEFT's layers around the projections of a model, which keep their places.

    `in_float32`: whether A and B are float32 also where the model is not, as PEFT loads them by
    default. Raises ModelError.
    """
    from peft import PeftModel

    try:
        PeftModel.from_pretrained(
            model, path, NAME, is_trainable=True, autocast_adapter_dtype=in_float32
        )
    except (ValueError, RuntimeError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"peft could not load {path}: {one_line(error)}") from error
    if not in_float32:
        for name, factor in model.named_parameters():
            if ".lora_" in name:
                factor.data = factor.data.to(model.dtype)


def merge_adapter(model: Any) -> None:
    """Adds the adapter to the weights and takes PEFT's layers out, as `merge_and_unload`. The
    weights, which PEFT froze, can be trained again."""
    from peft.tuners.lora import LoraLayer

    for path, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(path, module.get_base_layer())
    model.requires_grad_(True)


def live_adapter(
    model: Any,
    places: Iterable[Place],
    gathered: Callable[..., AbstractContextManager[Any]] = nullcontext,
) -> Iterator[LiveLora]:
    """The adapter of each projection that computes with one; all ranks call this. Within
    `gathered(parameters)` these parameters are whole."""
    for place in places:
        module = model.get_submodule(place.module)
        factors = getattr(module, "lora_A", None)
        computes = place.end == "output" and factors is not None
        if not computes or NAME not in module.active_adapters or module.disable_adapters:
            continue
        both = [getattr(module, name)[NAME].weight for name in ("lora_A", "lora_B")]
        with gathered(both):
            a, b = map(_whole, both)
            yield LiveLora(place.sites[0], a, b, float(module.scaling[NAME]))


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
