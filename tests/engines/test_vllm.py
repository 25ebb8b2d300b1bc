"""The vLLM engine without a model: its options, the chunks of its prefill, and its CUDA graphs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import require_engine
from tiny import checkpoint

from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.vllm.engine import VLLMEngine
from rlk_align.model.shape import read_shape

STARTS = {"gpu_memory_utilization": 0.01}
"""The share of the memory that must be free."""


def cache(tmp_path: Path, spec: str, device: str, **config: int) -> dict[str, float]:
    """The limits of the cache of an engine on that device."""
    model = checkpoint(tmp_path / "m", "qwen3", **config)
    return VLLMEngine(EngineSpec.parse(spec), model, read_shape(model), False)._cache(device)


def test_the_cache_is_limited(tmp_path: Path) -> None:
    assert cache(tmp_path, "vllm", "cuda") == {}
    for device in ("cuda", "cpu"):
        limited = cache(tmp_path, "vllm:kv_cache_gb=0.6", device)
        assert limited == {"kv_cache_memory_bytes": 600_000_000} | STARTS


def test_the_cache_of_a_cpu_is_as_large_as_the_model_needs(tmp_path: Path) -> None:
    shape = read_shape(checkpoint(tmp_path / "m", "qwen3"))
    token = 2 * 4 * shape.layers * shape.kv_heads * shape.head_dim
    small = cache(tmp_path, "vllm", "cpu")
    assert small == {"kv_cache_memory_bytes": 64 * shape.context * token} | STARTS
    large = cache(tmp_path, "vllm", "cpu", max_position_embeddings=1 << 20)
    assert large == {"kv_cache_memory_bytes": 1_000_000_000} | STARTS


def engine_of(core: Any) -> Any:
    require_engine("vllm")
    engine = VLLMEngine.__new__(VLLMEngine)
    client = SimpleNamespace() if core is None else SimpleNamespace(engine_core=core)
    engine.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    return engine


def core_of(largest: int | None, tokens: int = 8192, chunked: bool = True) -> Any:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=largest),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
    )
    scheduler = SimpleNamespace(max_num_scheduled_tokens=tokens)
    return SimpleNamespace(vllm_config=config, scheduler=scheduler)


@pytest.mark.parametrize(
    ("core", "within"),
    [
        (core_of(512), 512),
        (core_of(512, tokens=64), 64),
        (core_of(0), 8192),
        (core_of(None), 8192),
        # vLLM would never schedule a prompt that it does not chunk.
        (core_of(512, chunked=False), 8192),
    ],
)
def test_no_step_is_larger_than_the_largest_graph(core: Any, within: int) -> None:
    engine, usual = engine_of(core), core.scheduler.max_num_scheduled_tokens

    def fails() -> None:
        with engine._small_batches():
            assert core.scheduler.max_num_scheduled_tokens == within
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert core.scheduler.max_num_scheduled_tokens == usual


def test_a_scheduler_in_another_process_keeps_its_steps() -> None:
    with engine_of(None)._small_batches():
        pass


class Graph:
    replayed = 0

    def replay(self) -> None:
        type(self).replayed += 1


class Runner:
    """Like vLLM's newer runner, which keeps the graphs of whole forwards."""

    def __init__(self) -> None:
        self.whole, self.part = Graph(), Graph()
        self.cudagraph_manager = SimpleNamespace(graphs={"1 token": self.whole})

    def execute_model(self, scheduled: SimpleNamespace) -> str:
        for graph in scheduled.graphs:
            graph.replay()
        return "done"


def step(tokens: int, *graphs: Graph) -> SimpleNamespace:
    return SimpleNamespace(total_num_scheduled_tokens=tokens, graphs=graphs)


def test_replays_are_counted_by_step_and_by_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    require_engine("vllm")
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    from rlk_align.engines.vllm.graphs import GraphCounter

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    runner, unknown, own = Runner(), Graph(), Graph.replay
    entries = {"8 tokens": SimpleNamespace(cudagraph=runner.part)}
    mode = SimpleNamespace(name="PIECEWISE")
    wrapper = SimpleNamespace(runtime_mode=mode, concrete_cudagraph_entries=entries)
    monkeypatch.setattr(CUDAGraphWrapper, "_all_instances", [wrapper])

    with GraphCounter(runner) as counter:
        assert runner.execute_model(step(1, runner.whole)) == "done"
        runner.execute_model(step(8, runner.part, runner.part, unknown))
        runner.execute_model(step(900))
        runner.execute_model(step(0))
    found = counter.counted()
    assert found.replays == {"full": 1, "piecewise": 2, "other": 1}
    assert (found.total, found.steps, found.replayed_steps) == (4, 3, 2)
    assert found.captured == {"full": 1, "piecewise": 1}

    # Afterwards nothing is counted, and everything still runs.
    assert Graph.replay is own
    assert "execute_model" not in vars(runner)
    before = Graph.replayed
    runner.execute_model(step(1, runner.whole))
    assert Graph.replayed == before + 1
    assert counter.counted() == found
