"""What GRPOTrainer with the kernels refuses at once, and how it compares weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.trl import settings, with_kernels
from rlk_kernels.integrations.trl.weights import differing_weights
from torch import Tensor, nn

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
    numbered = str(raised.value).splitlines()[1:]
    assert [line.split(":")[0] for line in numbered] == [
        "  1. use_liger_kernel=True",
        "  2. top_p=0.9",
    ]


def test_only_a_grpo_trainer_gets_the_kernels() -> None:
    with pytest.raises(TypeError, match=r"is not derived from trl\.GRPOTrainer"):
        with_kernels(trl.SFTTrainer)


def test_weights_in_another_dtype_than_autocast_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2).half()
    model.dtype, model.config = torch.float16, None
    (said,) = settings.of_model(model, args(tmp_path, bf16=True))
    assert said.startswith("weights in float16 under autocast to bfloat16")


class Live(nn.Module):
    """The parameters that vLLM has of one layer, with an embedding padded by two rows."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        self.qkv_proj = nn.Module()
        self.norm = nn.Module()
        padded = torch.cat([given["embed_tokens.weight"], torch.zeros(2, 4)])
        rows = torch.cat([given[f"{name}_proj.weight"] for name in "qkv"])
        for module, value in (
            (self.embed_tokens, padded), (self.qkv_proj, rows), (self.norm, given["norm.weight"])
        ):  # fmt: skip
            module.weight = nn.Parameter(value.bfloat16())


@pytest.fixture
def given() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = {"v_proj": (2, 4), "embed_tokens": (5, 4), "q_proj": (4, 4), "k_proj": (2, 4)}
    weights = {f"{name}.weight": torch.randn(*x, generator=draw) for name, x in shapes.items()}
    return weights | {"norm.weight": torch.randn(4, generator=draw)}


def test_rounded_weights_are_equal(given: dict[str, Tensor]) -> None:
    assert differing_weights(given.items(), Live(given)) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("embed_tokens.weight", ["embed_tokens.weight"]),
        ("k_proj.weight", ["qkv_proj.weight"]),
        ("norm.weight", ["norm.weight"]),
    ],
)
def test_a_parameter_with_other_bits_is_named(
    given: dict[str, Tensor], changed: str, named: list[str]
) -> None:
    live = Live(given)
    given[changed] = given[changed] * 1.01
    assert differing_weights(given.items(), live) == named


def test_a_parameter_of_one_side_is_named(given: dict[str, Tensor]) -> None:
    live = Live(given)
    del given["v_proj.weight"], given["norm.weight"]
    given["more.weight"] = torch.zeros(3)
    assert differing_weights(given.items(), live) == [
        "more.weight", "norm.weight", "qkv_proj.weight"
    ]  # fmt: skip
