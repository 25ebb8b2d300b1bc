"""What vLLM does not compute in fp8 is refused by name, before it starts."""

from pathlib import Path
from typing import Any

import pytest
from block_fp8 import BLOCK

from rlk_align.capture.check import check_stored_format
from rlk_align.data import data_path
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm import limits
from rlk_align.errors import BadOption, ModelError
from rlk_align.model.checkpoint import read_config
from rlk_align.model.shape import read_shape

MODEL = data_path("model")
SPARSE = Path(__file__).parents[2] / "fixtures" / "sparse"
TENSOR: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = TENSOR | {"weight_block_size": list(BLOCK)}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM's build for GPUs is installed."""
    monkeypatch.setattr(limits, "_on_cpu", lambda option: False)


def options(spec: str, model: Path = MODEL) -> None:
    limits.check_vllm(EngineSpec.parse(spec).option, read_config(model), read_shape(model))


def stored(spec: str, settings: dict[str, Any], model: Path = MODEL) -> None:
    config = read_config(model) | {"quantization_config": settings}
    check_stored_format(EngineSpec.parse(spec), model, config, read_shape(model))


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_vllms_own_fp8_is_compared() -> None:
    for value in ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"):
        options(f"vllm:quantization={value}")
    options("vllm:kv_cache_dtype=fp8_e4m3")
    for settings in (TENSOR, BLOCKS, TENSOR | {"activation_scheme": "static"}):
        stored("vllm", settings)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("option", ["quantization=fp8", "kv_cache_dtype=fp8"])
@pytest.mark.parametrize("more", ["kernels=rlk", "tp=2", "lora=DIR"])
def test_what_no_test_has_compared_is_refused(option: str, more: str) -> None:
    name = option.partition("=")[0]
    with pytest.raises(BadOption, match=f"{option} does not support {more}") as refused:
        options(f"vllm:{option},{more}")
    assert refused.value.fix == f"leave {name} out"


@pytest.mark.usefixtures("on_gpu")
def test_experts_in_fp8_are_refused() -> None:
    with pytest.raises(BadOption, match="quantization=fp8 does not support a model with sparse"):
        options("vllm:quantization=fp8", SPARSE)
    with pytest.raises(ModelError, match="does not support experts stored as fp8 e4m3 in blocks"):
        stored("vllm", BLOCKS, SPARSE)


@pytest.mark.usefixtures("on_gpu")
def test_weights_are_not_quantised_twice() -> None:
    with pytest.raises(BadOption, match="they are quantised already"):
        stored("vllm:quantization=fp8", TENSOR)


def test_the_kernels_read_blocks_alone() -> None:
    stored("vllm:kernels=rlk", BLOCKS)
    with pytest.raises(ModelError, match="kernels=rlk does not support weights stored as fp8 e4m3"):
        stored("vllm:kernels=rlk", TENSOR)


def test_on_a_cpu_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_on_cpu", lambda option: True)
    with pytest.raises(BadOption, match="on a CPU does not support quantization=fp8: vLLM"):
        options("vllm:quantization=fp8")
    for settings, why in ((TENSOR, "no kernel that quantises"), (BLOCKS, "need AMX")):
        with pytest.raises(ModelError, match=why):
            stored("vllm", settings)
    options("vllm:kv_cache_dtype=fp8")


@pytest.mark.parametrize("engine", ["hf", "fsdp", "deepspeed"])
def test_transformers_reads_blocks_alone(engine: str) -> None:
    stored(engine, BLOCKS)
    with pytest.raises(ModelError, match="with one scale for each tensor"):
        stored(engine, TENSOR)
