"""DeepSpeed around HF transformers, as known without importing it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlk_align.engines.hf.info import FSDP, HF_OPTIONS, check_attention
from rlk_align.engines.info import Option, OptionValue, ReadOption
from rlk_align.errors import BadOption
from rlk_align.model.shape import ModelShape


def _conflict(options: Mapping[str, OptionValue]) -> str | None:
    if options.get("buffers") == "bf16" and options.get("mixed") == "autocast":
        return "buffers=bf16 with mixed=autocast, which casts neither parameters nor buffers"
    if options.get("zero_init") and str(options.get("stage", "3")) != "3":
        return f"zero_init=1 with stage={options['stage']}: only stage 3 shards parameters"
    if options.get("zero_init") and "lora" in options:
        return "zero_init=1 with lora=PATH: PEFT adds layers to a model that is not sharded yet"
    if options.get("offload") == "params" and str(options.get("stage", "3")) != "3":
        return f"offload=params with stage={options['stage']}: only stage 3 shards parameters"
    return FSDP.conflict(options)


def _check(option: ReadOption, config: dict[str, Any], shape: ModelShape) -> None:
    check_attention(option, config, shape)
    shape.family.check("deepspeed", shape.model_type)
    dtype = str(option("dtype"))
    dtype = shape.dtype if dtype == "auto" else dtype
    if dtype == "float16":
        raise BadOption(
            "engine 'deepspeed': float16 was not tested, and DeepSpeed does not support it on CPUs",
            "add dtype=bf16 or dtype=fp32",
        )
    for name, value in (("mixed", "autocast"), ("buffers", "bf16")):
        if option(name) == value and dtype != "bfloat16":
            raise BadOption(
                f"engine 'deepspeed': {name}={value} is for bfloat16, and this is {dtype}",
                f"add dtype=bf16, or leave {name} out",
            )


DEEPSPEED = replace(
    FSDP,
    target="rlk_align.engines.deepspeed.engine:DeepSpeedEngine",
    planting="rlk_align.engines.deepspeed.planting:plant_fault",
    builds_on=("hf",),
    package="deepspeed",
    install="DS_BUILD_OPS=0 pip install --no-build-isolation 'rlk-align[deepspeed]'",
    tested=("deepspeed", "transformers"),
    options={
        **HF_OPTIONS,
        "dp": Option(int, default=1),
        "stage": Option(default="3", choices=("0", "1", "2", "3")),
        "mixed": Option(default="bf16", choices=("bf16", "autocast")),
        "buffers": Option(default="own", choices=("own", "bf16")),
        "checkpointing": Option(bool, default=False),
        "offload": Option(default="none", choices=("none", "params")),
        "zero_init": Option(bool, default=False),
        "port": Option(int, starts_only=True),
    },
    conflict=_conflict,
    check=_check,
)
