"""Checkpoints of the embedded model for tests, with what was planted in their tensors."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlk_align.data import data_path
from rlk_align.weights.findings import Finding, WeightsReport

Tensors = dict[str, torch.Tensor]


def tensors() -> Tensors:
    return load_file(data_path("model") / "model.safetensors")


def q_proj(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.q_proj.weight"


def trained(values: Tensors, step: int) -> Tensors:
    """All of them as another step of training has them."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (v.float() + 1e-2 * torch.randn(v.shape, generator=generator)).to(v.dtype)
        for name, v in values.items()
    }


def save(folder: Path, values: Tensors, config: bool = True) -> str:
    folder.mkdir(parents=True)
    if config:
        shutil.copy(data_path("model") / "config.json", folder)
    save_file({n: v.contiguous() for n, v in values.items()}, folder / "model.safetensors")
    return str(folder)


def changed(values: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return values | {name: change(values[name].clone())}


def unequal(report: WeightsReport) -> dict[str, Finding]:
    """What is not equal, by name."""
    return {f.name: f for f in report.findings if f.status != "equal"}


def save_adapter(
    folder: Path, updates: dict[str, tuple[torch.Tensor, torch.Tensor]], **config: object
) -> str:
    """`updates`: module -> (lora_A, lora_B)."""
    folder.mkdir(parents=True)
    rank = next(iter(updates.values()))[0].shape[0]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 3 * rank, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    stored = {}
    for module, (a, b) in updates.items():
        stored[f"base_model.model.{module}.lora_A.weight"] = a
        stored[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(stored, folder / "adapter_model.safetensors")
    return str(folder)
