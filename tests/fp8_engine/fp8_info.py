"""vLLM's own fp8 on a CPU, as the engine `vllm_fp8`: vLLM's layers and quantisers, whose kernels for
GPUs are replaced by the same arithmetic in PyTorch."""

from dataclasses import replace

from rlk_align.engines.vllm.info import VLLM

INFO = replace(
    VLLM,
    target="fp8_engine:FP8Engine",
    planting="",
    check=lambda *_: None,
    check_fp8=lambda *_: None,
)
