"""What GRPOTrainer with the kernels refuses before it loads a model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.trl import settings, with_kernels
from torch import nn

trl = pytest.importorskip("trl")

WRONG = {
    "use_vllm=False": {"use_vllm": False},
    "vllm_mode='server'": {"vllm_mode": "server"},
    "vllm_tensor_parallel_size=2": {"vllm_tensor_parallel_size": 2},
    "vllm_model_impl='transformers'": {"vllm_model_impl": "transformers"},
    "vllm_structured_outputs_regex": {"vllm_structured_outputs_regex": "[ab]"},
    "use_liger_kernel=True": {"use_liger_kernel": True},
    "cast_lm_head_to_fp32=True": {"cast_lm_head_to_fp32": True},
    "torch_compile=True": {"torch_compile": True},
    "top_p=0.9": {"top_p": 0.9},
    "top_k=20": {"top_k": 20},
    "min_p=0.1": {"min_p": 0.1},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "generation_kwargs presence_penalty=0.5": {"generation_kwargs": {"presence_penalty": 0.5}},
    "generation_kwargs temperature=0.7": {"generation_kwargs": {"temperature": 0.7}},
    "generation_kwargs nobody_knows=1": {"generation_kwargs": {"nobody_knows": 1}},
    "model_init_kwargs use_kernels=True": {"model_init_kwargs": {"use_kernels": True}},
    "temperature=0.0": {"temperature": 0.0},
}


def args(folder: Path, **changed: Any) -> Any:
    return trl.GRPOConfig(
        str(folder), **{"use_vllm": True, "use_cpu": True, "report_to": "none"} | changed
    )


@pytest.mark.parametrize("words", WRONG)
def test_a_setting_is_refused_by_name(tmp_path: Path, words: str) -> None:
    (said,) = settings.refused({"args": args(tmp_path, **WRONG[words])})
    assert said.startswith(words)


@pytest.mark.parametrize("name", ["peft_config", "quantization_config", "rollout_func"])
def test_an_argument_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (said,) = settings.refused({"args": args(tmp_path), name: object()})
    assert said.startswith(name)


def test_defaults_and_harmless_settings_are_accepted(tmp_path: Path) -> None:
    kwargs = {"generation_kwargs": {"stop_token_ids": [3], "temperature": 0.7, "seed": 1}}
    loading = {"model_init_kwargs": {"dtype": "float32", "attn_implementation": "eager"}}
    assert settings.refused({"args": args(tmp_path)}) == []
    assert settings.refused({"args": args(tmp_path, temperature=0.7, **kwargs, **loading)}) == []


def test_all_are_named_at_once_before_a_model_is_loaded(tmp_path: Path) -> None:
    wrong = args(tmp_path, top_p=0.9, use_liger_kernel=True)
    with pytest.raises(NotSupported) as raised:
        with_kernels(trl.GRPOTrainer)(model=str(tmp_path / "nowhere"), args=wrong)
    listed = str(raised.value).splitlines()[1:]
    assert [x.split(":")[0] for x in listed] == ["  - use_liger_kernel=True", "  - top_p=0.9"]


def test_only_a_grpo_trainer_gets_the_kernels() -> None:
    with pytest.raises(TypeError, match=r"is not derived from trl\.GRPOTrainer"):
        with_kernels(trl.SFTTrainer)


def test_weights_in_another_dtype_than_autocast_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).half()
    model.dtype, model.config = torch.float16, None
    (said,) = settings.of_model(model, args(tmp_path, bf16=True))
    assert said.startswith("weights in float16 under autocast to bfloat16")


def test_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = small_model(rope_parameters=None, pad_token_id=None)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    (said,) = settings.of_model(model, args(tmp_path, bf16=True))
    assert said.startswith("adapters, which TRL merges for vLLM")


def test_a_family_whose_copies_cannot_be_checked_is_refused(tmp_path: Path) -> None:
    plain = {"rope_parameters": None, "pad_token_id": None}
    models = (small_model(family, **plain) for family in ("Phi3", "Llama"))
    fused, split = (settings.of_model(model, args(tmp_path, bf16=True)) for model in models)
    assert [reason.partition(":")[0] for reason in fused] == ["model_type=phi3"]
    assert split == []
