"""Checkpoints of fp8 in blocks, made from others, and what goes wrong with them."""

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from rlk_kernels.block_fp8 import quantise
from safetensors.torch import load_file, save_file

Quantiser = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
BLOCK = (64, 64)
"""Blocks that divide the sizes of the embedded model."""


def write_fp8(
    folder: Path,
    model: Path,
    quantiser: Quantiser = lambda w: quantise(w, BLOCK),
    left_out: Collection[str] = (),
    **settings: Any,
) -> Path:
    """A copy of a model whose projections are quantised, except those whose names contain one of
    `left_out`; `settings`: of its `quantization_config`."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, value in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and not any(part in module for part in left_out):
            values, scales = quantiser(value)
            tensors |= {name: values, f"{name}_scale_inv": scales}
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
        **{"weight_block_size": list(BLOCK)} | settings,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for file in model.glob("*token*"):
        shutil.copy(file, folder)
    return folder
