"""What vLLM is given for an engine spec."""

from pathlib import Path

import pytest
from tiny import checkpoint

from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.engine import VLLMEngine
from rlk_align.model.families import read_shape


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        ("vllm", {}),
        (
            "vllm:kv_cache_gb=0.6",
            {"kv_cache_memory_bytes": 600_000_000, "gpu_memory_utilization": 0.01},
        ),
    ],
)
def test_the_cache_is_limited(tmp_path: Path, spec: str, given: dict[str, float]) -> None:
    model = checkpoint(tmp_path / "m", "qwen3")
    engine = VLLMEngine(EngineSpec.parse(spec), model, read_shape(model), False)
    assert engine._cache() == given
