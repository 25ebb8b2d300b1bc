"""What vLLM is given for an engine spec."""

from pathlib import Path

from tiny import checkpoint

from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.engine import VLLMEngine
from rlk_align.model.families import read_shape

LITTLE = {"gpu_memory_utilization": 0.01}


def cache(tmp_path: Path, spec: str, device: str, **config: int) -> dict[str, float]:
    """What limits the cache of an engine on that device."""
    model = checkpoint(tmp_path / "m", "qwen3", **config)
    return VLLMEngine(EngineSpec.parse(spec), model, read_shape(model), False)._cache(device)


def test_the_cache_is_limited(tmp_path: Path) -> None:
    assert cache(tmp_path, "vllm", "cuda") == {}
    for device in ("cuda", "cpu"):
        given = cache(tmp_path, "vllm:kv_cache_gb=0.6", device)
        assert given == {"kv_cache_memory_bytes": 600_000_000} | LITTLE


def test_the_cache_of_a_cpu_is_as_large_as_the_model_needs(tmp_path: Path) -> None:
    shape = read_shape(checkpoint(tmp_path / "m", "qwen3"))
    token = 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim
    few = cache(tmp_path, "vllm", "cpu")
    assert few == {"kv_cache_memory_bytes": 64 * shape.context * token} | LITTLE
    large = cache(tmp_path, "vllm", "cpu", max_position_embeddings=1 << 20)
    assert large == {"kv_cache_memory_bytes": 1_000_000_000} | LITTLE
