"""Megatron-core: what is known without importing it."""

from collections.abc import Mapping

from rlk_align.engines.info import EngineInfo, Option, OptionValue
from rlk_align.engines.megatron.limits import check_megatron


def _conflict(options: Mapping[str, OptionValue]) -> str | None:
    if options.get("input") == "packed" and "padding" in options:
        return (
            f"padding={options['padding']} with input=packed, which has no padding: leave one out"
        )
    if options.get("sp") and options.get("tp", 1) == 1:
        return "sp=1 divides the sequence among ranks, and tp=1 has only one: give tp=2 or more"
    for key in ("cp", "pp"):
        if options.get(key, 1) != 1 and options.get("spec") == "te":
            return f"spec=te with {key}={options[key]}, which needs the local spec: leave spec out"
    if options.get("cp", 1) != 1 and options.get("padding") == "left":
        return (
            f"padding=left with cp={options['cp']}: ranks share sequences that begin at position "
            "0: leave padding out, or pack (input=packed)"
        )
    if options.get("kernels") == "rlk" and options.get("spec") == "te":
        return "spec=te with kernels=rlk, which has its own spec: leave spec out"
    return None


MEGATRON = EngineInfo(
    "rlk_align.engines.megatron.engine:MegatronEngine",
    "megatron.core",
    "pip install 'rlk-align[megatron]'",
    options={
        "tp": Option(int, default=1),
        "sp": Option(bool, default=False),
        "cp": Option(int, default=1),
        "pp": Option(int, default=1),
        "ep": Option(int, default=1),
        "spec": Option(default="local", choices=("local", "te")),
        "input": Option(default="padded", choices=("padded", "packed")),
        "batch": Option(int, default=8),
        "dispatcher": Option(default="allgather", choices=("allgather", "alltoall")),
        "padding": Option(default="right", choices=("right", "left")),
        "temperature": Option(float, default=1.0),
        "port": Option(int, starts_only=True),
    },
    ranks=("tp", "cp", "pp", "ep"),
    samples=False,
    patch="rlk_align.engines.patch:MegatronPatch",
    planting="rlk_align.engines.megatron.planting:plant_fault",
    one_kernel=(
        frozenset({"q_proj", "k_proj", "v_proj"}),
        frozenset({"q_rope", "k_rope"}),
        frozenset({"gate_proj", "up_proj"}),
    ),
    tested=("megatron-core",),
    takes_decoder=True,
    conflict=_conflict,
    check=check_megatron,
)
