"""Measures how much each fast path saves: times with all paths on, and without each of them.

    python kernels/bench/fast_paths.py eager --shape qwen3-0.6b --out X.jsonl
    python kernels/bench/fast_paths.py training --shape qwen3-0.6b --out X.jsonl
    python kernels/bench/fast_paths.py graphs --shape qwen3-0.6b --out X.jsonl
    python kernels/bench/fast_paths.py table --out X.jsonl

`eager` measures the decode of vLLM with enforce_eager, and `training` a step of HF transformers.
The settings take turns in one process, and each turn starts with empty launch caches. `graphs`
measures vLLM as it runs by default, where a step uses none of the host code's paths: two processes,
with the product in CUDA C++ and without it, take turns. Each measurement appends a line of JSON to
--out; `table` prints the lines as multiples of the time with all paths on.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from servers import VLLM
from serving import Bench, append_line, wait_for
from start import make_model

ALL_ON, ALL_OFF = "all on", "all off"
PRODUCT = "CUDA C++ product"
PATHS = (
    "replay", "direct launch", "launch cache", "direct dispatch", "direct allocation", PRODUCT
)  # fmt: skip
SETTINGS = (ALL_ON, *PATHS, ALL_OFF)
DECODE = ((1, 512), (32, 512), (128, 512))
"""(prompts, tokens of each)."""


@contextmanager
def without(setting: str) -> Iterator[None]:
    """A context in which one path, or all of them, are off."""
    from rlk_kernels import launching, private_api
    from rlk_kernels.matmul import plan

    off = {
        "replay": mock.patch.object(private_api, "REPLAY", False),
        "direct launch": mock.patch.object(private_api, "DIRECT_TRITON", ((99, 0), (99, 1))),
        # Without addresses every launch goes through Triton's dispatch.
        "launch cache": mock.patch.object(launching, "_addressed", return_value=None),
        "direct dispatch": mock.patch.object(private_api, "DIRECT_DISPATCH", False),
        "direct allocation": mock.patch.object(private_api, "allocate", None),
        PRODUCT: mock.patch.object(plan, "_specializes", return_value=False),
    }
    names = {ALL_ON: (), ALL_OFF: PATHS}.get(setting, (setting,))
    for name in names:
        off[name].start()
    clear_launch_caches()
    try:
        yield
    finally:
        for name in names:
            off[name].stop()
        clear_launch_caches()


def clear_launch_caches() -> None:
    from rlk_kernels import launching
    from rlk_kernels.matmul import plan

    plan.plan_product.cache_clear()
    launching.shape_cache.cache_clear()
    launching._replays.clear()


def measure(rounds: int, milliseconds: Callable[[], float]) -> dict[str, list[float]]:
    """Setting -> milliseconds of each round; the settings take turns."""
    times = defaultdict(list)
    for _ in range(rounds):
        for setting in SETTINGS:
            with without(setting):
                times[setting].append(milliseconds())
    return times


def write(args: argparse.Namespace, engine: str, level: str, times: dict[str, list[float]]) -> None:
    for path, ms in times.items():
        append_line(args.out, engine=engine, shape=args.shape, level=level, path=path, ms=ms)


def start(model: Path, new: int, **options: Any) -> Bench:
    """vLLM with the kernels, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from rlk_kernels.integrations import vllm

    vllm.register()
    from vllm import LLM

    llm = LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
        gpu_memory_utilization=0.01, kv_cache_memory_bytes=10 * 10**9, disable_log_stats=True,
        attention_backend="CUSTOM", **options,
    )  # fmt: skip
    return Bench(VLLM(llm), Path("/tmp/fast-paths.lock"), 1, new)


def graphs(args: argparse.Namespace, model: Path) -> None:
    """Starts this command twice, each time with one setting."""
    args.out.touch()
    command = [sys.executable, __file__, "graphs", "--shape", args.shape, "--out", str(args.out)]
    command += ["--rounds", str(args.rounds), "--model", str(model), "--setting"]
    running = [subprocess.Popen([*command, setting]) for setting in (ALL_ON, PRODUCT)]
    if failed := [process.args[-1] for process in running if process.wait()]:
        sys.exit(f"failed: {', '.join(failed)}")


def with_graphs(args: argparse.Namespace) -> None:
    """One of the two: decode and prefill, in turns with the other."""
    with without(args.setting):
        bench = start(args.model, 64)
        append_line(args.out, what="start", path=args.setting)
        wait_for(args.out, 2)
        bench.repeats = args.rounds
        for count, length in DECODE:
            ms = [1e3 * count / rate for rate in bench.decode(count, length)]
            write(args, "vLLM, CUDA graphs", f"decode, batch {count}", {args.setting: ms})
        ms = [1e3 * 16 * 1024 / rate for rate in bench.prefill(16, 1024)]
        write(args, "vLLM, CUDA graphs", "prefill of 16 x 1024", {args.setting: ms})


def eager(args: argparse.Namespace, model: Path) -> None:
    bench = start(model, 16, enforce_eager=True)
    for count, length in DECODE:

        def step_ms(count: int = count, length: int = length) -> float:
            [rate] = bench.decode(count, length)
            return 1e3 * count / rate

        write(args, "vLLM, eager", f"decode, batch {count}", measure(args.rounds, step_ms))


def training(args: argparse.Namespace, folder: Path) -> None:
    import torch
    from training import hf_model, kernel_loss, step

    model, run = hf_model(json.loads((folder / "config.json").read_text()), True, "")
    for rows, length in ((1, 512), (4, 2048)):
        ids = torch.randint(2, 30000, (1, rows, length), device="cuda")

        def step_ms(ids: Any = ids) -> float:
            step(model, run, kernel_loss, ids)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(3):
                step(model, run, kernel_loss, ids)
            torch.cuda.synchronize()
            return 1e3 * (time.perf_counter() - started) / 3

        write(args, "HF", f"step of {rows} x {length} tokens", measure(args.rounds, step_ms))
        gc.collect()


def table(args: argparse.Namespace, _: Path) -> None:
    """Prints medians: milliseconds with all paths on, and the ratio of each other setting's time to
    that of the same round, because the speed of a shared host changes from second to second."""
    times: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(dict)
    for text in args.out.read_text().splitlines():
        x = json.loads(text)
        if "ms" not in x:
            continue
        times[x["engine"], x["shape"], x["level"]][x["path"]] = x["ms"]
    off = SETTINGS[1:]
    print("| engine | shape | | ms | " + " | ".join(f"without {p}" for p in off) + " |")
    print("| --- | --- | --- |" + " ---: |" * (1 + len(off)))
    for names, ms in times.items():
        ratios = {p: [a / b for a, b in zip(x, ms[ALL_ON], strict=True)] for p, x in ms.items()}
        cells = [f"{statistics.median(ratios[p]):.3f}" if p in ms else "" for p in off]
        print(
            f"| {' | '.join(names)} | {statistics.median(ms[ALL_ON]):.2f} | {' | '.join(cells)} |"
        )


def main() -> None:
    levels = {"eager": eager, "training": training, "graphs": graphs, "table": table}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("level", choices=levels)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--setting", choices=(ALL_ON, PRODUCT), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.setting:
        with_graphs(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.level != "table":
            make_model(args.shape, Path(folder))
        levels[args.level](args, Path(folder))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
