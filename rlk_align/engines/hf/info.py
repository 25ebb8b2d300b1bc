"""HF transformers and FSDP2: what is known without importing them."""

from collections.abc import Mapping
from dataclasses import replace

from rlk_align.engines.info import EngineInfo, Option, OptionValue
from rlk_align.errors import INSTALL_ENGINES

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
}


def _conflict(options: Mapping[str, OptionValue]) -> str | None:
    excepted = str(options.get("except", "")).split("+")
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


HF = EngineInfo(
    "rlk_align.engines.hf.engine:HFEngine",
    "transformers",
    INSTALL_ENGINES,
    options=HF_OPTIONS,
    patch="rlk_align.engines.patch:HFPatch",
    planting="rlk_align.engines.hf.planting:plant_fault",
    one_kernel=(frozenset({"q_rope", "k_rope"}),),
    tested=("transformers",),
    conflict=_conflict,
)

FSDP = replace(
    HF,
    target="rlk_align.engines.hf.fsdp:FSDPEngine",
    patch="rlk_align.engines.patch:FSDPPatch",
    planting="",
    options={
        **HF_OPTIONS,
        "dp": Option(int, default=1),
        "mixed": Option(bool, default=True),
        "checkpointing": Option(bool, default=False),
        "port": Option(int, starts_only=True),
    },
    ranks=("dp",),
    samples=False,
)
