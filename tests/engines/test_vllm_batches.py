"""Prefill in production goes through vLLM's scheduler in chunks that CUDA graphs are there for."""

from types import SimpleNamespace
from typing import Any

import pytest
from command import require_engine


def engine_of(core: Any) -> Any:
    require_engine("vllm")
    from rlk_align.engines.vllm.engine import VLLMEngine

    made = VLLMEngine.__new__(VLLMEngine)
    client = SimpleNamespace() if core is None else SimpleNamespace(engine_core=core)
    made.llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    return made


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
        # A prompt that is taken whole would never be scheduled.
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
