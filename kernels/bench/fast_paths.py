"""Measures what each fast path of the kernels is worth to an engine: with all, and without each.

    python kernels/bench/fast_paths.py graphs --shape llama-3-8b:layers=8 --out X.jsonl
    python kernels/bench/fast_paths.py eager --shape qwen3-0.6b --out X.jsonl
    python kernels/bench/fast_paths.py training --shape qwen3-0.6b --out X.jsonl
    python kernels/bench/fast_paths.py loop --out X.jsonl
    python kernels/bench/fast_paths.py table --out X.jsonl

`graphs` is vLLM as it is: compiled, with CUDA graphs, one start with and one without the product in
CUDA C++ (the host's paths do not run in a graph). `eager` is vLLM with enforce_eager, and
`training` a step of HF transformers: the paths take turns in one process, each time with all caches
of launches emptied. `loop` is examples/grpo/train.py with the embedded model, a process for each.
Each measurement adds a line of JSON to --out; `table` prints them as shares of `all on`.
"""

import argparse
import gc
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from serving import Bench, tell

ROOT = Path(__file__).parents[2]
ON = "all on"
HOST = ("replay", "direct launch", "launch cache", "direct dispatch", "direct allocation")
PRODUCT = "product in CUDA C++"
DECODE = ((1, 512), (32, 512), (128, 512))
"""Prompts, and tokens of each."""


@contextmanager
def without(path: str) -> Iterator[None]:
    """Switches a path off; `host` stands for all of HOST."""
    from rlk_kernels import device, launching, nvrtc, private_api

    off = {
        "replay": mock.patch.object(private_api, "REPLAY", False),
        "direct launch": mock.patch.object(private_api, "DIRECT_TRITON", ((99, 0), (99, 1))),
        "launch cache": mock.patch.object(launching, "_addressed", no_addresses),
        "direct dispatch": mock.patch.object(private_api, "DIRECT_DISPATCH", False),
        "direct allocation": mock.patch.object(private_api, "allocate", None),
        PRODUCT: mock.patch.object(nvrtc, "is_available", no_nvrtc),
    }
    names = {ON: (), "host": HOST}.get(path, (path,))
    for name in names:
        off[name].start()
    forget(device, launching)
    try:
        yield
    finally:
        for name in names:
            off[name].stop()
        forget(device, launching)


def no_addresses(*_: Any) -> None:
    """Instead of `launching._addressed`: every launch goes through Triton's dispatch."""


def no_nvrtc() -> bool:
    return False


def forget(device: Any, launching: Any) -> None:
    """Empties what remembers how calls were launched."""
    device.facts.cache_clear()
    launching.shape_cache.cache_clear()
    launching._replays.clear()


def make_model(shape: str, folder: Path) -> dict[str, Any]:
    """A config alone, with random weights; returns it."""
    sys.path.insert(0, str(ROOT / "kernels/bench"))
    from start import make_model as write

    write(shape, folder)
    return json.loads((folder / "config.json").read_text())


def serve(args: argparse.Namespace, folder: Path, eager: bool) -> Any:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RLK_KERNELS": "1"}
    make_model(args.shape, folder)
    from vllm import LLM

    return LLM(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
        gpu_memory_utilization=0.01, kv_cache_memory_bytes=10 * 10**9, disable_log_stats=True,
        attention_backend="CUSTOM", enforce_eager=eager,
    )  # fmt: skip


def graphs(args: argparse.Namespace, folder: Path) -> None:
    if not args.off:
        for path in paths(args, ON, PRODUCT):
            again(args, "--off", path)
        return
    with without(args.off):
        bench = Bench(serve(args, folder, eager=False), Path("/tmp/fast-paths.lock"), args.rounds)
        for count, length in DECODE:
            ms = [1e3 * count / rate for rate in bench.decode(count, length)]
            line = {"level": f"decode, batch {count}", "path": args.off, "ms": ms}
            tell(args.out, engine="vLLM, graphs", shape=args.shape, **line)
        for count, length in ((1, 2048), (16, 1024)):
            ms = [1e3 * count * length / rate for rate in bench.prefill(count, length)]
            line = {"level": f"prefill, {count} x {length}", "path": args.off, "ms": ms}
            tell(args.out, engine="vLLM, graphs", shape=args.shape, **line)


def eager(args: argparse.Namespace, folder: Path) -> None:
    bench = Bench(serve(args, folder, eager=True), Path("/tmp/fast-paths.lock"), 1, new=16)
    for count, length in DECODE:
        times = defaultdict(list)
        for _ in range(args.rounds):
            for path in paths(args, ON, *HOST, "host", PRODUCT):
                with without(path):
                    [rate] = bench.decode(count, length)
                    times[path].append(1e3 * count / rate)
        for path, ms in times.items():
            line = {"level": f"decode, batch {count}", "path": path, "ms": ms}
            tell(args.out, engine="vLLM, eager", shape=args.shape, **line)


def training(args: argparse.Namespace, folder: Path) -> None:
    import torch
    from training import hf_model, kernel_loss, step

    model, run = hf_model(make_model(args.shape, folder), True, "")
    for rows, length in ((1, 512), (4, 2048)):
        ids = torch.randint(2, 30000, (1, rows, length), device="cuda")
        times = defaultdict(list)
        for _ in range(args.rounds):
            for path in paths(args, ON, *HOST, "host", PRODUCT):
                with without(path):
                    step(model, run, kernel_loss, ids)
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                    for _ in range(3):
                        step(model, run, kernel_loss, ids)
                    torch.cuda.synchronize()
                    times[path].append(1e3 * (time.perf_counter() - started) / 3)
        gc.collect()
        for path, ms in times.items():
            line = {"level": f"step of {rows} x {length} tokens", "path": path, "ms": ms}
            tell(args.out, engine="HF", shape=args.shape, **line)


def loop(args: argparse.Namespace, folder: Path) -> None:
    if not args.off:
        for path in paths(args, ON, "replay", "host", PRODUCT):
            again(args, "--off", path)
        return
    sys.path.insert(0, str(ROOT / "examples/grpo"))
    run = folder / "run"
    sys.argv = ["train.py", "--run", str(run), "--steps", str(args.steps)]
    with without(args.off), suppress(SystemExit):
        runpy.run_path(str(ROOT / "examples/grpo/train.py"), run_name="__main__")
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    for stage in ("step", "rollout", "update"):
        ms = [1e3 * x["seconds"][stage] for x in lines[2:] if stage in x["seconds"]]
        if ms:
            line = {"level": f"loop, {stage}", "path": args.off, "ms": ms}
            tell(args.out, engine="GRPO", shape="embedded model", **line)


def paths(args: argparse.Namespace, *names: str) -> list[str]:
    """Those of the names that --paths asks for, and ON."""
    return [n for n in names if n == ON or n in (args.paths or names)]


def again(args: argparse.Namespace, *more: str) -> None:
    """This level in a process of its own."""
    options = [args.level, "--shape", args.shape, "--out", str(args.out)]
    options += ["--steps", str(args.steps), "--rounds", str(args.rounds), *more]
    subprocess.run([sys.executable, __file__, *options], check=True)


def table(args: argparse.Namespace, _: Path) -> None:
    """Medians: of milliseconds with all paths on, and of the others' times over those of the same
    round, because the speed of a shared host changes from second to second."""
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(dict)
    for text in args.out.read_text().splitlines():
        x = json.loads(text)
        found[x["engine"], x["shape"], x["level"]][x["path"]] = x["ms"]
    off = [*HOST, "host", PRODUCT]
    print("| engine | shape | | ms | " + " | ".join(f"no {p}" for p in off) + " |")
    print("| --- | --- | --- |" + " ---: |" * (1 + len(off)))
    for names, ms in found.items():
        ratios = {p: [a / b for a, b in zip(x, ms[ON], strict=True)] for p, x in ms.items()}
        cells = [f"{statistics.median(ratios[p]):.3f}" if p in ms else "" for p in off]
        print(f"| {' | '.join(names)} | {statistics.median(ms[ON]):.2f} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("level", choices=("graphs", "eager", "training", "loop", "table"))
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--paths", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=8, help="of the loop")
    parser.add_argument("--off", help=argparse.SUPPRESS)
    args = parser.parse_args()
    levels = {"graphs": graphs, "eager": eager, "training": training, "loop": loop, "table": table}
    with tempfile.TemporaryDirectory() as folder:
        levels[args.level](args, Path(folder))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
