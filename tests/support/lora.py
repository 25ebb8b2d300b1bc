"""LoRA adapters of any model, and what goes wrong with them."""

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from rlk_align.model.adapter import CONFIG, PREFIX, TENSORS
from rlk_align.model.checkpoint import weight_files
from rlk_align.model.stored import file_tensors

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Factors = dict[str, torch.Tensor]


def write_adapter(
    folder: Path,
    model: Path,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Collection[str] = PROJECTIONS,
    std: float = 0.1,
    **settings: object,
) -> Path:
    """A random adapter of every projection of a model that `targets` names."""
    generator = torch.Generator().manual_seed(5)
    factors: Factors = {}
    stored = [t for file in weight_files(model) for t in file_tensors(file)]
    for tensor in sorted(stored, key=lambda t: t.name):
        module = tensor.name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            rows, columns = tensor.shape
            a = torch.randn(rank, columns, generator=generator) * std
            b = torch.randn(rows, rank, generator=generator) * std
            factors |= {f"{module}.lora_A": a, f"{module}.lora_B": b}
    folder.mkdir(parents=True)
    named = {f"{PREFIX}{name}.weight": value for name, value in factors.items()}
    save_file(named, folder / TENSORS)
    config = {
        **{"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets)},
        **{"bias": "none", "task_type": "CAUSAL_LM", "lora_dropout": 0.0} | settings,
    }
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def changed_adapter(
    folder: Path, adapter: Path, change: Callable[[Factors], Factors], **settings: object
) -> Path:
    """A copy with other factors and settings."""
    shutil.copytree(adapter, folder)
    save_file(change(load_file(adapter / TENSORS)), folder / TENSORS)
    config = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps(config | settings), encoding="utf-8")
    return folder


def exchanged(one: str, other: str) -> Callable[[Factors], Factors]:
    """Exchanges the factors of two projections of the first layer."""

    def change(factors: Factors) -> Factors:
        names = {n: n.replace(one, other) for n in factors if f"layers.0.self_attn.{one}" in n}
        names |= {new: old for old, new in names.items()}
        return {name: factors[names.get(name, name)] for name in factors}

    return change


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """A copy of a model with an adapter merged by PEFT, as trainers give it to a rollout engine."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    PeftModel.from_pretrained(loaded, adapter).merge_and_unload().save_pretrained(folder)
    for file in model.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder
