"""CUDA graphs are counted where they are replayed: here those of a runner that replays on a CPU."""

from types import SimpleNamespace

import pytest
import torch
from command import require_engine


class Graph:
    replayed = 0

    def replay(self) -> None:
        type(self).replayed += 1


class Runner:
    """As vLLM's newer one: it holds the graphs of whole forwards."""

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
