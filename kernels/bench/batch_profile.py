"""Profiles a batch in vLLM with the kernels or without: launches, time on the GPU, and gaps.

    python kernels/bench/batch_profile.py --model M --engine own|rlk [--batch decode:64x1024]
                                          [--lock F]

Weights are random; only config.json is needed. The engine is in this process, with its defaults.
Batches are those of `serving.py`: a prefill's prompts are new in each repetition; decode answers
cached prompts with --new tokens each. Printed: the median time of a repetition as the caller sees
it; then, of one under torch's profiler, the number of kernels, the time in which at least one runs,
and the time between the first and the last in which none runs, with the kernels that take most of
the former and stand around most of the latter. --lock is for several engines on one GPU, which must
start one after another otherwise.
"""

import argparse
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from servers import Settings, start_vllm
from serving import Bench, alone, batches

WARM_UP = 6
LINES = 16
"""Lines of each table."""


class Ran(NamedTuple):
    """A kernel on the GPU, in microseconds."""

    start: float
    end: float
    name: str


def profiled(repetition: Callable[[], float]) -> list[Ran]:
    """The kernels of a repetition, in the order of their starts."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        repetition()
    return sorted(
        Ran(e.time_range.start, e.time_range.end, e.name)
        for e in seen.events()
        if e.device_type == DeviceType.CUDA and not e.name.startswith(("Memcpy", "Memset"))
    )


def summary(ran: list[Ran]) -> tuple[float, dict[str, list[float]], dict[str, list[float]]]:
    """(busy milliseconds, kernel -> its milliseconds, pair of kernels -> the gaps between them)."""
    busy, end, before = 0.0, ran[0].start, ""
    kernels, gaps = defaultdict(list), defaultdict(list)
    for each in ran:
        if each.start > end and before:
            gaps[f"{before[:36]} -> {each.name[:36]}"].append((each.start - end) / 1e3)
        busy += max(0.0, each.end - max(each.start, end)) / 1e3
        kernels[each.name[:76]].append((each.end - each.start) / 1e3)
        end, before = max(end, each.end), each.name
    return busy, kernels, gaps


def table(title: str, rows: dict[str, list[float]]) -> None:
    print(f"\n{title}: number, milliseconds")
    for name, times in sorted(rows.items(), key=lambda row: -sum(row[1]))[:LINES]:
        print(f"{len(times):6d} {sum(times):8.3f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=("own", "rlk"), required=True)
    parser.add_argument("--batch", default="prefill:1x2048")
    parser.add_argument("--new", type=int, default=32, help="tokens of a prompt in decode")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--cache-gb", type=float, default=8.0, help="of keys and values")
    parser.add_argument("--lock", type=Path, default=Path("/tmp/serving.lock"))
    args = parser.parse_args()
    requested = batches(args.batch)
    if len(requested) != 1 or requested[0][0] not in ("prefill", "decode"):
        parser.error("--batch: one batch is needed, prefill:NxT or decode:NxT")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the profiler sees this process alone
    if args.engine == "rlk":
        os.environ["RLK_KERNELS"] = "1"
    cache = int(args.cache_gb * 1e9)
    server = start_vllm(Settings(args.model, args.engine, "dummy", cache, 1, True, 0, {}))
    bench = Bench(server, args.lock)
    what, count, length = requested[0]
    cached = bench.prompts(count, length)

    def repetition() -> float:
        if what == "decode":
            return bench.seconds(cached, args.new)
        return bench.seconds(bench.prompts(count, length), 1)

    with alone(args.lock):
        times = [1e3 * repetition() for _ in range(WARM_UP + args.repeats)][WARM_UP:]
        ran = profiled(repetition)
    if not ran:
        raise SystemExit("the profiler saw no kernel: it needs an NVIDIA GPU and CUPTI")
    busy, kernels, gaps = summary(ran)
    span = (max(each.end for each in ran) - ran[0].start) / 1e3
    low, middle, high = min(times), statistics.median(times), max(times)
    print(f"{args.engine}, {args.batch}: {middle:.2f} ms ({low:.2f} to {high:.2f})")
    print(f"profiled: {len(ran)} kernels, {busy:.2f} ms busy of {span:.2f} ms")
    table("kernels", kernels)
    table("gaps", gaps)


if __name__ == "__main__":
    main()
