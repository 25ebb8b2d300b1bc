"""Checkpoints in MXFP4: the remedy that their refusal names, in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import family_model
from safetensors.torch import load_file, save_file

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.quantised import check_not_quantized
from rlk_align.model.shape import read_shape
from rlk_align.model.tensors import check_tensors


def in_mxfp4(folder: Path) -> Path:
    """A small GPT-OSS with random experts in MXFP4: blocks of 32 values, which share a scale."""
    source, made = family_model(folder, "gpt_oss", num_hidden_layers=2), folder / "mxfp4"
    tensors: dict[str, torch.Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape
        blocks = (count, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 124, blocks, dtype=torch.uint8)
    made.mkdir()
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = read_config(source) | {"quantization_config": {"quant_method": "mxfp4"}}
    (made / "config.json").write_text(json.dumps(config))
    return made


def test_transformers_writes_what_can_be_compared(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    packed = in_mxfp4(tmp_path)
    with pytest.raises(ModelError, match="quantisation by mxfp4"):
        check_not_quantized(packed, read_config(packed))
    model: Any = AutoModelForCausalLM.from_pretrained(
        packed, dtype="bfloat16", quantization_config=Mxfp4Config(dequantize=True)
    )
    whole, usual = tmp_path / "whole", tmp_path / "usual"
    model.save_pretrained(whole, save_original_format=False)
    check_not_quantized(whole, read_config(whole))
    check_tensors(whole, read_shape(whole))
    # By default every layer's stack gets the same name, and one of them is left.
    model.save_pretrained(usual)
    with pytest.raises(ModelError, match=r"lacks .*experts.* does not ask for, down_proj\$"):
        check_tensors(usual, read_shape(usual))
