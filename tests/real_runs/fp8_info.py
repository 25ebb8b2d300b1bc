"""The engine `vllm_fp8`: vLLM's own fp8 on a CPU."""

from dataclasses import replace

from rlk_align.engines.vllm.info import VLLM

INFO = replace(
    VLLM,
    target="fp8_engine:FP8Engine",
    planting="",
    check=lambda *_: None,
    check_fp8=lambda *_: None,
)
