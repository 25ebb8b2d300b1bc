"""A first comparison of each engine, as a newcomer types it: the command, the engines' workers and
their ranks all start cold, with the kernels that torch and oneDNN have for lesser processors.

Other tests fork the command and its engines from processes that have imported their packages
(`tests/support/warm.py`).
"""

from pathlib import Path

import pytest
from command import Cli, require_engine

PROCESSORS = {
    "scalar": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
PROMPTS = """The capital of France is
def fibonacci(n):
Once upon a time there was a
The quick brown fox jumps over the lazy dog. The quick brown fox
In 1905 Albert Einstein
To be, or not to be, that is
import numpy as np
Dear Sir or Madam,
"""
DEFAULT = {("vllm", "megatron", "scalar"), ("hf", "fsdp:dp=2", "avx2")}
"""Each engine once."""


@pytest.mark.parametrize(
    ("rollout", "train", "processor"),
    [
        pytest.param(*sides, p, marks=() if (*sides, p) in DEFAULT else pytest.mark.whole_matrix)
        for sides in (("vllm", "megatron"), ("hf", "fsdp:dp=2"))
        for p in PROCESSORS
    ],
)
def test_eight_ordinary_prompts_pass(
    cli: Cli, tmp_path: Path, rollout: str, train: str, processor: str
) -> None:
    for engine in (rollout, train):
        require_engine(engine.partition(":")[0])
    prompts = tmp_path / "p.txt"
    prompts.write_text(PROMPTS)
    # vLLM against Megatron-core is what the command compares without these flags.
    sides = () if rollout == "vllm" else ("--rollout", rollout, "--train", train)
    env = dict(PROCESSORS[processor])
    if rollout == "vllm":
        # On a processor with AMX vLLM's packed products end with SIGABRT under such a limit.
        del env["ONEDNN_MAX_CPU_ISA"]
    done = cli("compare", "--prompts", prompts, *sides, env=env, real=True)
    assert done.code == 0, done.out + done.err
    assert done.verdict is not None
    names = [done.verdict["engines"][role]["name"] for role in ("rollout", "train")]
    assert names == [rollout, train.partition(":")[0]]
    used = done.verdict["engines"]["train"]["environment"]["capability"]
    assert used == PROCESSORS[processor]["ATEN_CPU_CAPABILITY"].upper()
    assert done.verdict["breaches"] == []
