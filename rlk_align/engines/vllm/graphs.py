"""Counts the CUDA graphs that vLLM replays, in the process that replays them.

Both of its runners replay through `torch.cuda.CUDAGraph.replay`, whose calls are counted; only the
mode of each graph is read from vLLM.
"""

from collections import Counter
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.results import GraphReplays

OTHER = "other"
"""The mode of a graph that vLLM's model runner does not list."""


class GraphCounter(Hooks):
    """Counts the graphs that a runner's steps replay, until it is closed."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._modes = captured_graphs(runner)
        self._replays: Counter[str] = Counter()
        self._steps = self._replayed_steps = 0
        replay, execute = torch.cuda.CUDAGraph.replay, runner.execute_model

        def counted_replay(graph: Any) -> None:
            replay(graph)
            self._replays[self._modes.get(id(graph), OTHER)] += 1

        def counted_step(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._replays.total()
            result = execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                self._steps += 1
                self._replayed_steps += self._replays.total() > before
            return result

        self.replace(torch.cuda.CUDAGraph, "replay", counted_replay)
        self.replace(runner, "execute_model", counted_step)

    def counted(self) -> GraphReplays:
        return GraphReplays(
            steps=self._steps,
            replayed_steps=self._replayed_steps,
            replays=dict(self._replays),
            captured=dict(Counter(self._modes.values())),
        )


def captured_graphs(runner: Any) -> dict[int, str]:
    """Id of each graph that a runner has captured -> `full` or `piecewise`."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    modes = {
        id(entry.cudagraph): wrapper.runtime_mode.name.lower()
        for wrapper in CUDAGraphWrapper._all_instances
        for entry in wrapper.concrete_cudagraph_entries.values()
    }
    # The newer runner keeps the graphs of whole forwards itself.
    manager = getattr(runner, "cudagraph_manager", None)
    return modes | {id(g): "full" for g in (manager.graphs.values() if manager else ())}
