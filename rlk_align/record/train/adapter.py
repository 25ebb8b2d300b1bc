"""The LoRA adapter of a live model of transformers, in PEFT's layers around its projections."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from rlk_align.engines.common.lora import LiveLora
from rlk_align.errors import BadOption
from rlk_align.model.adapter import CONFIG, PREFIX, TENSORS
from rlk_align.model.checkpoint import tensor_name
from rlk_align.trace.records import writing

_INSTEAD = "merge it into the weights (merge_and_unload) and record the merged model"


@dataclass(frozen=True, slots=True)
class ActiveAdapter:
    """The adapter that every projection with one computes with."""

    name: str
    """PEFT's name of it."""
    rank: int
    alpha: float
    rslora: bool
    """Whether its scale is alpha / √rank, and not alpha / rank."""


def inside_peft(model: Any) -> Any:
    """The model that PEFT's wrapper is around, or the model itself."""
    return model.get_base_model() if "PeftModel" in _classes(model) else model


def active_names(model: Any) -> set[str]:
    """PEFT's names of the adapters that the next forward computes with."""
    return {name for layer in _layers(model) for name in _active(layer)}


def active_adapter(model: Any) -> ActiveAdapter | None:
    """The adapter that the model computes with; None for none. Raises BadOption for what PEFT does
    beyond one LoRA of one rank and scale."""
    others = sorted(
        {
            type(module).__name__
            for module in model.modules()
            if type(module).__module__.partition(".")[0] == "peft"
            and "LoraLayer" not in _classes(module)
        }
    )
    names, layers = sorted(active_names(model)), list(_layers(model))
    adapted = [layer for layer in layers if _active(layer)]
    found = {(x.r[n], x.lora_alpha[n], x.use_rslora[n]) for x in adapted for n in _active(x)}
    scales = {x.scaling[n] for x in adapted for n in _active(x)}
    refused = {
        "DoRA, or another variant of LoRA": any(layer.lora_variant for layer in layers),
        f"PEFT's {', '.join(others)}": bool(others),
        "an adapter that is merged into the weights of PEFT's layers": any(
            layer.merged for layer in layers
        ),
        f"several active adapters ({', '.join(names)})": len(names) > 1,
        "an adapter with biases": any(any(layer.lora_bias.values()) for layer in layers),
        "an adapter of the embedding": any(len(layer.lora_embedding_A) for layer in layers),
        "an adapter of several ranks or scales": len(found) > 1 or len(scales) > 1,
    }
    for what, is_so in refused.items():
        if is_so:
            raise BadOption(f"{what} is not recorded", _INSTEAD)
    if not names:
        return None
    [(rank, alpha, rslora)], [name] = found, names
    if scales != {alpha / (rank**0.5 if rslora else rank)}:
        raise BadOption(
            f"an adapter whose scale was set to {max(scales):g} is not recorded",
            "undo PEFT's set_scale or scale_layer, or merge the adapter",
        )
    return ActiveAdapter(name, rank, float(alpha), bool(rslora))


def write_adapter(
    folder: Path, adapter: ActiveAdapter, live: Sequence[LiveLora], modules: Mapping[str, str]
) -> None:
    """Writes live factors in PEFT's layout. `modules`: as for `tensor_name`."""
    tensors, targets = {}, set()
    for each in live:
        module = tensor_name(each.site, modules).removesuffix(".weight")
        targets.add(module.rpartition(".")[2])
        for letter, value in (("A", each.a), ("B", each.b)):
            tensors[f"{PREFIX}{module}.lora_{letter}.weight"] = value.to("cpu").contiguous()
    config = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"},
        **{"r": adapter.rank, "lora_alpha": adapter.alpha, "use_rslora": adapter.rslora},
        "target_modules": sorted(targets),
    }
    with writing(folder):
        folder.mkdir()
        save_file(tensors, folder / TENSORS)
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def _layers(model: Any) -> Iterator[Any]:
    return (module for module in model.modules() if "LoraLayer" in _classes(module))


def _active(layer: Any) -> list[str]:
    """The adapters that a layer computes with."""
    if layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _classes(module: Any) -> set[str]:
    return {kind.__name__ for kind in type(module).__mro__}
