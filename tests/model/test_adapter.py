"""Adapters that cannot be used are refused before an engine starts, by file and field."""

import json
from pathlib import Path

import pytest
import torch
from lora import changed_adapter, write_adapter

from rlk_align.data import data_path
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.adapter import CONFIG, TENSORS, adapter_paths, fitting_adapter
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape

MODEL = data_path("model")
FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


def fitting(adapter: Path):  # type: ignore[no-untyped-def]
    return fitting_adapter(str(adapter), read_config(MODEL), read_shape(MODEL))


def test_the_projections_scale_and_tensors_of_an_adapter(tmp_path: Path) -> None:
    adapter = fitting(write_adapter(tmp_path / "a", MODEL, targets=("q_proj", "down_proj")))
    layers = read_shape(MODEL).layers
    assert len(adapter.modules) == 2 * layers
    assert list(adapter.modules)[:2] == ["layers.0.q_proj", "layers.0.down_proj"]
    assert adapter.targets == ["down_proj", "q_proj"]
    assert adapter.tensors("layers.0.q_proj")[1] == f"{FIRST}.lora_B.weight"
    assert adapter.settings == (4, 2.0)
    of_rslora = write_adapter(tmp_path / "b", MODEL, alpha=3.0, use_rslora=True)
    assert fitting(of_rslora).settings.scale == 1.5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "adapter_config.json: use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern={'q_proj': 4} is not supported"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is not supported"),
        ({"r": 5}, r"lora_A.weight is \[4, \d+\] instead of \[5, \d+\]: .*has r=5"),
        ({"lora_alpha": None}, "does not describe a LoRA"),
    ],
)
def test_a_setting_that_is_not_supported_is_named(
    tmp_path: Path, settings: dict, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        fitting(write_adapter(tmp_path / "a", MODEL, **settings))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", MODEL)
    other = {
        "renamed": lambda f: {n.replace("q_proj", "qq_proj"): v for n, v in f.items()},
        "narrow": lambda f: {n: v[:, 1:].contiguous() for n, v in f.items()},
        "alone": lambda f: {n: v for n, v in f.items() if "lora_A" in n},
        "embedding": lambda f: f | {"base_model.model.lm_head.weight": torch.ones(2, 2)},
        "empty": lambda f: {},
    }
    words = {
        "renamed": r"the model has no projection model.layers.\d.self_attn.qq_proj",
        "narrow": r"is \[\d+, 3\] instead of \[\d+, 4\]|is \[4, \d+\] instead of \[4, \d+\]",
        "alone": r"has base_model.model.*lora_A.weight without base_model.model.*lora_B.weight",
        "embedding": "lm_head.weight is neither a lora_A nor a lora_B",
        "empty": "has no lora_A and lora_B",
    }
    for name, change in other.items():
        with pytest.raises(ModelError, match=words[name]) as refused:
            fitting(changed_adapter(tmp_path / name, adapter, change))
        assert TENSORS in refused.value.message


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"is not an adapter: {CONFIG} does not exist"):
        fitting(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({}))
    with pytest.raises(ModelError, match=f"is not an adapter: {TENSORS} does not exist"):
        fitting(tmp_path)


@pytest.mark.parametrize("engine", ["megatron", "sglang"])
def test_an_engine_without_adapters_says_so(engine: str) -> None:
    with pytest.raises(BadOption, match=f"engine '{engine}' does not support lora=DIR") as refused:
        EngineSpec.parse(f"{engine}:lora=DIR")
    assert "hf, fsdp, deepspeed, vllm" in str(refused.value.fix)


def test_several_adapters_are_named_in_turn(tmp_path: Path) -> None:
    assert adapter_paths("a") == ["a"]
    assert adapter_paths("a+none+runs/b") == ["a", None, "runs/b"]
    whole = tmp_path / "step+1"
    whole.mkdir()
    assert adapter_paths(str(whole)) == [str(whole)]
