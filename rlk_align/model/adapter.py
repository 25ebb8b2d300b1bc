"""A LoRA adapter in PEFT's layout, by its config and the header of its file. Nothing here imports
torch, so that an adapter that cannot be used is refused before an engine starts."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites
from rlk_align.model.stored import file_tensors
from rlk_align.model.tensors import expected_tensors
from rlk_align.text import one_line, short_printable

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""The start of PEFT's names, before the name in the model."""

_UNREAD = (
    *("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("lora_bias", "trainable_token_indices", "target_parameters", "layer_replication"),
)
"""Settings by which an adapter does more than add scale · B · A, or not with one rank and scale."""


NONE = "none"
"""What `lora=A+none` has in the place of an adapter for requests without one."""


def adapter_paths(option: object) -> list[str | None]:
    """The adapters that `lora=A+B+none` names: request i has that of the place i modulo their
    number; None for none. A folder whose name has a + is one adapter."""
    text = str(option)
    if Path(text).expanduser().is_dir():
        return [text]
    return [None if part == NONE else part for part in text.split("+")]


class LoraSettings(NamedTuple):
    """What adapter_config.json says."""

    rank: int
    scale: float
    """alpha / rank, or alpha / √rank for rsLoRA."""


def read_settings(path: str) -> LoraSettings:
    """Raises ModelError, which names the file and the field, for a folder without an adapter and
    for an adapter that does more than add scale · B · A."""
    folder = Path(path).expanduser()
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ModelError(
                f"{path} is not an adapter: {name} does not exist",
                f"give the folder in PEFT's layout, with {CONFIG} and {TENSORS}",
            )
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config.get("peft_type")
        alpha, rank = float(config["lora_alpha"]), int(config["r"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} does not describe a LoRA: {one_line(error)}") from error
    refused = {name: config[name] for name in _UNREAD if config.get(name)}
    if config.get("bias") not in (None, "none"):
        refused["bias"] = config["bias"]
    if kind != "LORA":
        refused["peft_type"] = kind
    if rank <= 0:
        refused["r"] = rank
    for name, value in refused.items():
        raise ModelError(
            f"{file}: {name}={short_printable(value, 60)} is not supported",
            "LoRA and rsLoRA of one rank are supported",
        )
    return LoraSettings(rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter that fits a model."""

    folder: Path
    settings: LoraSettings
    modules: Mapping[str, str]
    """Site -> the module of the model of transformers, e.g. `layers.0.q_proj` ->
    `model.layers.0.self_attn.q_proj`."""

    @property
    def targets(self) -> list[str]:
        """The last part of each module's name, each once."""
        return sorted({module.rpartition(".")[2] for module in self.modules.values()})

    def tensors(self, site: str) -> tuple[str, str]:
        """The names of A and B in the adapter's file."""
        start = f"{PREFIX}{self.modules[site]}"
        return f"{start}.lora_A.weight", f"{start}.lora_B.weight"


def fitting_adapter(path: str, config: dict[str, Any], shape: ModelShape) -> AdapterFile:
    """The adapter in a folder. Raises ModelError, which names the file and the tensor, if it does
    not fit the model."""
    settings = read_settings(path)
    file = Path(path).expanduser() / TENSORS
    stored = {t.name: t.shape for t in file_tensors(file)}
    weights, expected = _products(shape), expected_tensors(config, shape)
    modules: dict[str, str] = {}
    for name, size in stored.items():
        module, _, factor = name.removeprefix(PREFIX).rpartition(".lora_")
        if factor not in ("A.weight", "B.weight"):
            raise ModelError(
                f"{file}: {name} is neither a lora_A nor a lora_B of a linear layer",
                "embeddings and saved modules are not supported in an adapter",
            )
        if module not in weights:
            raise ModelError(
                f"{file}: {name}: the model has no projection {module} that an adapter is "
                "supported for",
                f"its projections are named like {next(iter(weights))}",
            )
        rows, columns = expected[f"{module}.weight"]
        wanted = (settings.rank, columns) if factor[0] == "A" else (rows, settings.rank)
        if size != wanted:
            raise ModelError(
                f"{file}: {name} is {list(size)} instead of {list(wanted)}: {CONFIG} has "
                f"r={settings.rank}, and the model's {module} is {[rows, columns]}"
            )
        other = f"{PREFIX}{module}.lora_{'B' if factor[0] == 'A' else 'A'}.weight"
        if other not in stored:
            raise ModelError(f"{file} has {name} without {other}")
        modules[weights[module]] = module
    if not modules:
        raise ModelError(f"{file} has no lora_A and lora_B")
    order = [site.name for site in model_sites(shape)]
    in_order = sorted(modules, key=order.index)
    return AdapterFile(file.parent, settings, {site: modules[site] for site in in_order})


def _products(shape: ModelShape) -> dict[str, str]:
    """Module of transformers -> site, for each product that has a module of its own."""
    return {
        tensor_name(site.parameter, shape.family.modules).removesuffix(".weight"): site.name
        for site in model_sites(shape)
        if site.layer is not None
        and site.operator.formula == "linear"
        and site.operator.tensor == "weight"
        and not site.operator.of_expert
        and not any(site.op in ops for ops in shape.family.fused.values())
    }
