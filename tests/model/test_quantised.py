"""Formats of quantised weights: fp8 in blocks is read, all others are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_fp8 import BLOCK, write_fp8
from family_models import family_model, with_vision
from rlk_kernels.block_fp8 import dequantise, quantise
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rlk_align.capture.check import check_stored_format
from rlk_align.data import data_path
from rlk_align.engines.common.quantised import record_quantised
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.quantised import FP8Weights, check_not_quantized, stored_format
from rlk_align.model.shape import read_shape
from rlk_align.model.stored import stored_tensors
from rlk_align.model.tensors import check_tensors

MODEL = data_path("model")
USUAL: dict[str, Any] = {
    **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
    "weight_block_size": [128, 128],
}


_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": _E4M3 | {"strategy": "channel", "dynamic": False},
    "input_activations": _E4M3 | {"strategy": "token", "dynamic": True},
}
COMPRESSED: dict[str, Any] = {
    **{"quant_method": "compressed-tensors", "format": "float-quantized"},
    **{"ignore": ["lm_head"], "config_groups": {"group_0": GROUP}},
}


def compressed(**changed: Any) -> dict[str, Any]:
    """The settings of compressed-tensors with other values in its group."""
    group = {
        key: GROUP[key] | value if isinstance(value, dict) else value
        for key, value in changed.items()
    }
    return COMPRESSED | {"config_groups": {"group_0": GROUP | group}}


def stored(settings: Any, key: str = "quantization_config") -> FP8Weights | None:
    return stored_format(Path("model"), {key: settings})


def test_blocks_of_fp8_are_read_as_deepseek_and_qwen_publish_them() -> None:
    assert stored_format(Path("model"), {"quantization_config": None}) is None
    assert stored(USUAL) == FP8Weights((128, 128))
    qwen = stored(USUAL | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]})
    assert qwen is not None
    assert qwen.ignored == ("lm_head", "model.layers.0.mlp.gate")
    listed = stored(USUAL | {"ignored_layers": ["lm_head"], "scale_fmt": "ue8m0"})
    assert listed == FP8Weights((128, 128), True, ("lm_head",))


def test_scales_of_tensors_and_of_rows_are_read() -> None:
    tensor = stored({"quant_method": "fp8", "activation_scheme": "dynamic"})
    assert tensor == FP8Weights((0, 0), scale="_scale")
    static = stored({"quant_method": "fp8", "activation_scheme": "static"})
    assert static == FP8Weights((0, 0), scale="_scale", static=True)
    channel = stored(COMPRESSED)
    assert channel == FP8Weights((1, 0), ignored=("lm_head",), scale="_scale")
    blocks = {"strategy": "block", "block_structure": [128, 128]}
    block = stored(compressed(weights=blocks, input_activations={"strategy": "group"}))
    assert block == FP8Weights((128, 128), ignored=("lm_head",), scale="_scale")
    formats = [x.name for x in (tensor, static, channel, block) if x is not None]
    assert formats == ["fp8-tensor", "fp8-tensor", "fp8-channel", "fp8-block"]
    assert [x.blocks((96, 40)) for x in (tensor, channel, block) if x is not None] == [
        *((96, 40), (1, 40), (128, 128)),
    ]


def test_a_list_may_have_regular_expressions() -> None:
    of = stored(COMPRESSED | {"ignore": ["re:.*mlp.gate$"]})
    assert of is not None
    assert of.lists("model.layers.0.mlp.gate")
    assert not of.lists("model.layers.0.mlp.gate_proj")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (COMPRESSED | {"format": "pack-quantized"}, "compressed-tensors with pack-quantized"),
        (compressed(weights={"num_bits": 4, "type": "int"}), "compressed-tensors with weights"),
        (compressed(weights={"symmetric": False}), "compressed-tensors with weights"),
        (compressed(input_activations=None), "compressed-tensors with weights"),
        (compressed(targets=["re:.*down_proj"]), "compressed-tensors with targets"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "with kv_cache_scheme"),
        ({"quant_method": "mxfp4"}, "quantisation by mxfp4"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors with 0 groups"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantisation by bitsandbytes"),
        ({}, "quantisation by None"),
        ("int8", "quantisation by 'int8'"),
        (USUAL | {"activation_scheme": "static"}, "fp8 with activation_scheme = 'static'"),
        (USUAL | {"fmt": "e5m2"}, "fp8 with fmt = 'e5m2'"),
        (USUAL | {"scale_fmt": "e5m3"}, "fp8 with scale_fmt = 'e5m3'"),
        (USUAL | {"kv_cache_scheme": {"num_bits": 8}}, "fp8 with kv_cache_scheme"),
        (USUAL | {"modules_to_convert": ["embed_tokens"]}, "with modules_to_convert"),
    ],
)
def test_another_format_is_refused_by_its_name(settings: Any, said: str) -> None:
    for key in ("quantization_config", "compression_config"):
        with pytest.raises(ModelError, match=said):
            stored(settings, key)


def test_blocks_have_two_sizes() -> None:
    for block in ([128], [128, 0], [128, True], "128"):
        with pytest.raises(ModelError, match="weight_block_size"):
            stored(USUAL | {"weight_block_size": block})


def test_compare_by_modules_refuses_blocks_as_well() -> None:
    with pytest.raises(ModelError, match="fp8 e4m3 in blocks of 128 x 128"):
        check_not_quantized(Path("model"), {"quantization_config": USUAL})


def test_a_list_names_whole_modules() -> None:
    of = stored(USUAL | {"modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.3"]})
    assert of is not None
    for module in ("lm_head", "model.layers.0.mlp.gate", "model.layers.3.self_attn.q_proj"):
        assert of.lists(module)
        assert not of.substring(module)
    for module in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_up_proj"):
        assert not of.lists(module)
        assert of.substring(module) == "mlp.gate"
    assert not of.lists("model.layers.30.self_attn.q_proj")
    assert not of.substring("model.layers.0.mlp.down_proj")


def test_a_weight_is_read_with_its_scales(tmp_path: Path) -> None:
    model = write_fp8(tmp_path / "fp8", MODEL)
    check_tensors(model, read_shape(model))
    tensors, truth = stored_tensors(model, {}), load_file(MODEL / "model.safetensors")
    assert tensors.keys() == truth.keys()
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name, value in truth.items():
            read = tensors[name].read(file)
            if name.endswith("_proj.weight"):
                wide = dequantise(*quantise(value, BLOCK), torch.float32, BLOCK)
                assert torch.equal(read, wide), name
                assert torch.equal(tensors[name].part(file, 0, 3, 70), wide[3:70]), name
                assert torch.equal(tensors[name].part(file, 1, 3, 70), wide[:, 3:70]), name
            else:
                assert torch.equal(read, value), name


def edited(model: Path, name: str, value: torch.Tensor | None) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(name)
    save_file(tensors if value is None else tensors | {name: value}, path)


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    model = write_fp8(tmp_path / "fp8", MODEL)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    edited(model, name, torch.ones(4, 3))
    with pytest.raises(ModelError, match=rf"{name} has \[4, 3\] scales, .*64 x 64 has \[8, 3\]"):
        check_tensors(model, read_shape(model))
    edited(model, name, torch.ones(8, 3, dtype=torch.uint8))
    with pytest.raises(ModelError, match=f"{name} is stored as U8"):
        check_tensors(model, read_shape(model))


def test_values_without_scales_are_refused(tmp_path: Path) -> None:
    model = write_fp8(tmp_path / "fp8", MODEL)
    edited(model, "model.layers.1.mlp.up_proj.weight_scale_inv", None)
    with pytest.raises(ModelError, match=r"up_proj\.weight is stored as F8_E4M3, without scales"):
        check_tensors(model, read_shape(model))


def test_the_record_names_what_is_quantised_and_what_is_not(tmp_path: Path) -> None:
    model = write_fp8(
        *(tmp_path / "fp8", MODEL),
        left_out=("layers.0.mlp.gate_proj", "layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"),
        modules_to_not_convert=["mlp.gate", "model.layers.1.mlp.down_proj", "layers.2.mlp.up_proj"],
    )
    record = record_quantised(model, read_shape(model), "bfloat16")
    assert record is not None
    assert record.unquantised == [
        *("layers.0.o_proj", "layers.0.gate_proj", "layers.1.down_proj"),
    ]
    assert record.left_out == {"layers.0.o_proj": "", "layers.0.gate_proj": "mlp.gate"}
    assert record.listed == ["layers.2.up_proj"]
    assert len(record.weights) == 7 * 4 - 3
    assert record.format == "fp8 e4m3 in blocks of 64 x 64, float32 scales"
    assert record_quantised(MODEL, read_shape(MODEL), "bfloat16") is None


def test_config_json_states_the_format(tmp_path: Path) -> None:
    model = write_fp8(tmp_path / "fp8", MODEL, scale_fmt="ue8m0")
    assert json.loads((model / "config.json").read_text())["quantization_config"]
    assert stored_format(model, read_config(model)) == FP8Weights(BLOCK, True)


@pytest.mark.parametrize("whole", [False, True])
def test_a_hybrid_and_a_checkpoint_with_images_are_refused(tmp_path: Path, whole: bool) -> None:
    family = "gemma3_text" if whole else "qwen3_5_text"
    model = family_model(tmp_path, family)
    folder = with_vision(tmp_path / "whole", model) if whole else model
    config, shape = read_config(folder), read_shape(folder)
    asked = EngineSpec.parse("hf"), folder, config | {"quantization_config": USUAL}, shape
    with pytest.raises(ModelError, match="also sees images or is a hybrid"):
        check_stored_format(*asked)
    check_stored_format(EngineSpec.parse("hf"), MODEL, asked[2], read_shape(MODEL))
