"""A first comparison, as a newcomer types it, with torch's and oneDNN's kernels for less of a
processor than this one may be."""

from pathlib import Path

import pytest
from command import Cli, require_engine

PROMPTS = """The capital of France is
def fibonacci(n):
Once upon a time there was a
The quick brown fox jumps over the lazy dog. The quick brown fox
In 1905 Albert Einstein
To be, or not to be, that is
import numpy as np
Dear Sir or Madam,
"""
PROCESSORS = {
    "scalar": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


@pytest.mark.parametrize(
    "processor", ["scalar", pytest.param("avx2", marks=pytest.mark.whole_matrix)]
)
def test_eight_ordinary_prompts_pass(cli: Cli, tmp_path: Path, processor: str) -> None:
    """All defaults: vLLM against Megatron-core."""
    require_engine("vllm")
    require_engine("megatron")
    prompts = tmp_path / "p.txt"
    prompts.write_text(PROMPTS)
    done = cli("compare", "--prompts", prompts, env=PROCESSORS[processor], real=True)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    used = done.verdict["engines"]["train"]["environment"]["capability"]
    assert used == PROCESSORS[processor]["ATEN_CPU_CAPABILITY"].upper()
    assert done.verdict["breaches"] == []
