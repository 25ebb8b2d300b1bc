"""Random tensors and times on a GPU.

CUDA graphs are replayed over rotated inputs, so that neither launches nor L2 hits are measured.
"""

import statistics
from collections.abc import Callable

import torch


def rand(*shape: int, scale: float = 1.0, grad: bool = False) -> torch.Tensor:
    """A normal bf16 tensor on the GPU with this standard deviation."""
    x = (torch.randn(*shape, device="cuda") * scale).bfloat16()
    return x.requires_grad_() if grad else x


def graphs_ms(
    rivals: dict[str, list[Callable[[], object]]], *, repeat: int = 5, target_ms: float = 4.0
) -> dict[str, float]:
    """Median milliseconds of one call of each rival. rivals: name -> calls that do the same work on
    different inputs.

    Every rival is captured before any is replayed, and the replays take turns, so that a change of
    the clock or of a neighbour's load affects all of them.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs = {}
    for name, calls in rivals.items():
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
            torch.cuda.synchronize()
            start.record()
            for call in calls:
                call()
            end.record()
            torch.cuda.synchronize()
        once = max(start.elapsed_time(end) / len(calls), 1e-3)
        rounds = max(1, min(20, int(target_ms / (once * len(calls)))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(rounds):
                for call in calls:
                    call()
        graphs[name] = graph, rounds * len(calls)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(repeat + 1):
        for name, (graph, count) in graphs.items():
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn:  # the first warms up
                times[name].append(start.elapsed_time(end) / count)
    return {name: statistics.median(of) for name, of in times.items()}


def event_ms(call: Callable[[], object], *, repeat: int = 7, inner: int = 4) -> float:
    """Median milliseconds of a call that cannot be captured; `inner` calls lie between events."""
    call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeat):
        start.record()
        for _ in range(inner):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times)


def copies(nbytes: int, *, over: int = 300 << 20, most: int = 24) -> int:
    """The number of input sets of `nbytes` that together are several times as large as the L2."""
    return max(1, min(most, over // max(nbytes, 1) + 1))
