"""SGLang: what is known without importing it."""

from collections.abc import Mapping

from rlk_align.engines.info import EngineInfo, Option, OptionValue
from rlk_align.engines.sglang.limits import ATTENTION, check_sglang


def _conflict(options: Mapping[str, OptionValue]) -> str | None:
    if options.get("sampler") == "rlk" and options.get("kernels") != "rlk":
        return "sampler=rlk needs kernels=rlk as well"
    return None


SGLANG = EngineInfo(
    "rlk_align.engines.sglang.engine:SGLangEngine",
    "sglang",
    "'rlk-align[sglang]' needs an environment of its own, which `make sglang-env` makes in a "
    "checkout; then sglang:python=.venv-sglang/bin/python (docs/sglang.md)",
    patch="rlk_align.engines.patch:SGLangPatch",
    options={
        "attention_backend": Option(
            choices=tuple(x for names in ATTENTION.values() for x in names)
        ),
        "chunked_prefill_size": Option(int),
        "max_running_requests": Option(int),
        "page_size": Option(int),
        "tp": Option(int, default=1),
        "ep": Option(int, default=1),
        "port": Option(int, starts_only=True),
        "radix_cache": Option(bool, default=False),
        "prefill_graphs": Option(bool, default=False),
        "mem_fraction": Option(float),
        "temperature": Option(float, default=1.0),
        "top_p": Option(float, default=1.0),
        "top_k": Option(int),
        "min_p": Option(float),
        "sampler": Option(default="own", choices=("own", "rlk")),
        "logprobs": Option(default="raw", choices=("raw", "processed")),
    },
    compiles=True,
    ranks=("tp",),
    spare_positions=7,
    fused=(
        ("attn_residual", "mlp_norm"),
        ("mlp_residual", "attn_norm"),
        ("mlp_residual", "final_norm"),
    ),
    planting="rlk_align.engines.sglang.planting:plant_fault",
    one_kernel=(
        frozenset({"q_proj", "k_proj", "v_proj"}),
        frozenset({"q_rope", "k_rope"}),
        frozenset({"gate_proj", "up_proj"}),
    ),
    tested=("sglang",),
    lacks_lora="on a CPU SGLang 0.5.23 cannot serve one, because all its LoRA backends allocate "
    "pinned memory, which needs a GPU; on a GPU it was never compared",
    # What SGLang 0.5.17, the version for GPUs, pins.
    worker_needs=("transformers>=5.12.1,<6", "tokenizers>=0.22"),
    stand_ins=("torchvision", "sgl_kernel"),
    conflict=_conflict,
    check=check_sglang,
)
