"""HF transformers and FSDP2: what is known without importing them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlk_align.engines.info import EngineInfo, Option, OptionValue, ReadOption
from rlk_align.errors import INSTALL_ENGINES, BadOption
from rlk_align.model.shape import ModelShape, cap_of
from rlk_align.model.truncation import truncation

HF_OPTIONS = {
    "attn": Option(
        default="sdpa",
        # the names that transformers registers
        choices=(
            *("eager", "sdpa", "flex_attention"),
            *("flash_attention_2", "flash_attention_3", "flash_attention_4"),
        ),
    ),
    "experts": Option(default="grouped_mm", choices=("eager", "batched_mm", "grouped_mm")),
    "batch": Option(int, default=1),
    "padding": Option(default="right", choices=("right", "left")),
    "temperature": Option(float, default=1.0),
    "top_p": Option(float, default=1.0),
    "top_k": Option(int),
    "min_p": Option(float),
}


def _conflict(options: Mapping[str, OptionValue]) -> str | None:
    excepted = str(options.get("except", "")).split("+")
    limits = list(truncation(options))
    if limits and (options.get("kernels") != "rlk" or "logprob" in excepted):
        return (
            f"{limits[0]}={options[limits[0]]} needs kernels=rlk and their logprob, which computes "
            "log-probs over the tokens that the kernels' sampler keeps"
        )
    if options.get("kernels") == "rlk" and "attn" in options and "attn" not in excepted:
        return (
            f"attn={options['attn']} with kernels=rlk, which has its own attention: add except=attn"
        )
    if options.get("kernels") == "rlk" and "experts" in options:
        return (
            f"experts={options['experts']} with kernels=rlk, which computes experts itself: "
            "leave experts out"
        )
    return None


WITHOUT_CAP = ("sdpa",)
"""The attentions of transformers 5.19 that ignore a cap of the scores, and sinks."""


def check_attention(option: ReadOption, config: dict[str, Any], shape: ModelShape) -> None:
    """Raises BadOption if the attention would ignore a setting of config.json."""
    key, attention = shape.family.score_cap, option("attn")
    if option("kernels") == "rlk" and "attn" not in str(option("except")).split("+"):
        return
    if attention in WITHOUT_CAP and shape.has("sink_attn"):
        raise BadOption(
            f"attn={attention} ignores the sinks of a {shape.model_type} model's attention: "
            "transformers refuses it for this family",
            "add attn=eager to the engine's spec",
        )
    if attention in WITHOUT_CAP and cap_of(config, key) is not None:
        raise BadOption(
            f"attn={attention} ignores {key}={cap_of(config, key):g} of config.json: transformers "
            "passes the cap to every attention, and that one has none",
            "add attn=eager to the engine's spec",
        )


HF = EngineInfo(
    "rlk_align.engines.hf.engine:HFEngine",
    "transformers",
    INSTALL_ENGINES,
    options=HF_OPTIONS,
    patch="rlk_align.engines.patch:HFPatch",
    planting="rlk_align.engines.hf.planting:plant_fault",
    modules="rlk_align.engines.hf.modules:HFModules",
    one_kernel=(frozenset({"q_rope", "k_rope"}),),
    tested=("transformers",),
    loads_lora=True,
    merges_lora=True,
    lora_package="peft",
    mixes_lora=True,
    reads_fp8=frozenset({"fp8-block"}),
    takes_decoder=True,
    conflict=_conflict,
    check=check_attention,
)

FSDP = replace(
    HF,
    target="rlk_align.engines.hf.fsdp:FSDPEngine",
    patch="rlk_align.engines.patch:FSDPPatch",
    planting="rlk_align.engines.hf.planting:plant_fault_in_shards",
    modules="",
    options={
        **HF_OPTIONS,
        "dp": Option(int, default=1),
        "mixed": Option(bool, default=True),
        "checkpointing": Option(bool, default=False),
        "port": Option(int, starts_only=True),
    },
    ranks=("dp",),
    samples=False,
    mixes_lora=False,
)
