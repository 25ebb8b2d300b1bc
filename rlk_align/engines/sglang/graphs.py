"""Counts the CUDA graphs that SGLang replays."""

from typing import Any

from rlk_align.engines.common.hooks import Hooks
from rlk_align.results import GraphReplays

FULL = "full"
"""The mode of SGLang's graphs of decode steps, each of which is a whole forward."""


class GraphCounter(Hooks):
    """Counts the graphs that a model runner's forwards replay, until it is closed."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._graphs = runner.decode_cuda_graph_runner.backend
        self._steps = self._replays = 0
        replay, forward = self._graphs.replay, runner.forward

        def counted_replay(*args: Any, **more: Any) -> Any:
            result = replay(*args, **more)
            self._replays += 1
            return result

        def counted_forward(*args: Any, **more: Any) -> Any:
            result = forward(*args, **more)
            self._steps += 1
            return result

        self.replace(self._graphs, "replay", counted_replay)
        self.replace(runner, "forward", counted_forward)

    def counted(self) -> GraphReplays:
        return GraphReplays(
            steps=self._steps,
            replayed_steps=self._replays,
            replays={FULL: self._replays},
            captured={FULL: len(self._graphs._graphs)},
        )
