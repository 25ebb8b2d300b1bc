"""LoRA adapters in a model of transformers, by PEFT."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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


def add_adapters(model: Any, paths: Sequence[str], in_float32: bool) -> None:
    """Puts PEFT's layers around the projections of a model, which keep their places. All forwards
    have the first adapter until `use_adapter` chooses another.

    `in_float32`: whether A and B are float32 also where the model is not, as PEFT loads them by
    default. Raises ModelError.
    """
    from peft import PeftModel

    how = {"is_trainable": True, "autocast_adapter_dtype": in_float32}
    path, *others = paths
    try:
        adapted = PeftModel.from_pretrained(model, path, NAME, **how)
        for number, path in enumerate(others, 1):
            adapted.load_adapter(path, name_of(number), **how)
    except (ValueError, RuntimeError, KeyError, OSError, TypeError) as error:
        raise ModelError(f"peft could not load {path}: {one_line(error)}") from error
    if not in_float32:
        for name, factor in model.named_parameters():
            if ".lora_" in name:
                factor.data = factor.data.to(model.dtype)


def name_of(number: int) -> str:
    """PEFT's name of an adapter of several."""
    return f"{NAME}-{number}" if number else NAME


def use_adapter(model: Any, name: str | None) -> None:
    """Gives the following forwards one adapter; None for none."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.enable_adapters(name is not None)
            if name is not None:
                module.set_adapter(name, inference_mode=True)


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
    name: str = NAME,
) -> Iterator[LiveLora]:
    """The adapter of each projection that computes with one, `name`; all ranks call this. Within
    `gathered(parameters)` these parameters are whole."""
    for place in places:
        module = model.get_submodule(place.module)
        factors = getattr(module, "lora_A", None)
        computes = place.end == "output" and factors is not None and name in factors
        if not computes or name not in module.active_adapters or module.disable_adapters:
            continue
        both = [getattr(module, factor)[name].weight for factor in ("lora_A", "lora_B")]
        with gathered(both):
            a, b = map(_whole, both)
            yield LiveLora(place.sites[0], a, b, float(module.scaling[name]))


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach()
