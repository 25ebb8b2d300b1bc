"""Counts the CUDA graphs that SGLang replays."""

from typing import Any

from rlk_align.engines.common.hooks import Hooks
from rlk_align.results import GraphReplays

MODES = {"decode": "full", "prefill": "breakable"}
"""Phase -> the mode of its graphs: a step of decode is one graph; a prefill is several, between
which attention is launched by the host."""


def _pieces(graph: Any) -> int:
    return len(getattr(graph, "_segments", (graph,)))


class GraphCounter(Hooks):
    """Counts the graphs that a model runner's forwards replay, until it is closed."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._steps = self._replayed = 0
        self._replays: dict[str, int] = {}
        self._captured: dict[str, int] = {}
        for phase, mode in MODES.items():
            # A phase without graphs has a runner without them.
            graphs = getattr(getattr(runner, f"{phase}_cuda_graph_runner"), "backend", None)
            if graphs is not None:
                self._count(graphs, mode)
        forward = runner.forward

        def counted_forward(*args: Any, **more: Any) -> Any:
            result = forward(*args, **more)
            self._steps += 1
            return result

        self.replace(runner, "forward", counted_forward)

    def _count(self, graphs: Any, mode: str) -> None:
        self._replays[mode] = 0
        self._captured[mode] = sum(_pieces(graph) for graph in graphs._graphs.values())
        replay = graphs.replay

        def counted_replay(shape_key: Any, *args: Any, **more: Any) -> Any:
            result = replay(shape_key, *args, **more)
            self._replayed += 1
            self._replays[mode] += _pieces(graphs._graphs[shape_key])
            return result

        self.replace(graphs, "replay", counted_replay)

    def counted(self) -> GraphReplays:
        return GraphReplays(
            steps=self._steps,
            replayed_steps=self._replayed,
            replays=self._replays,
            captured=self._captured,
        )
