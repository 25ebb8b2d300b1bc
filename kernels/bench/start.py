"""Measures where the time of vLLM's start goes, without the kernels and with them, cold and warm.

    python kernels/bench/start.py --shape qwen3-30b-a3b:layers=6 --out X.json
        [--engines own rlk] [--starts 2] [--limit 520] [--profile]

vLLM has its defaults (compiled, CUDA graphs) and random weights of a shape of
fixtures/make_large_model.py, and starts in a fresh process each time. All starts of an engine share
their caches (vLLM's, Inductor's and Triton's), which are empty before the first: the first start is
cold, the others are warm. A phase within another phase is counted in both. Triton's seconds are the
sum over all kernels, of which several may be compiled at once. `--profile` also prints what the
host does while graphs are captured, and slows the capture. The table comes last.
"""

import argparse
import cProfile
import io
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENGINES = ("own", "rlk")
MARK = "start.py: "
CAPTURE = "capture graphs"
PHASES = (
    "imports",
    "whole start",
    "load model",
    "  compile products ahead",
    "  compile experts ahead",
    "  wait for compilers",
    "self-check of tiles",
    "profile run and torch.compile",
    "KV cache",
    "warm up and capture",
    "  compile attention ahead",
    f"  {CAPTURE}",
    "first request",
    "second request",
)


class Times:
    """Seconds by phase, and what Triton compiled in each of the innermost ones."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.running = ["outside"]
        self.kernels: dict[str, Counter[str]] = {}
        """Phase -> kernel -> how often it was compiled."""
        self.compiling: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        """Kernels that Triton found in its cache, by phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.running.append(name)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started
            self.running.pop()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        function = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        setattr(owner, name, timed)

    def listen(self) -> None:
        import triton

        def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
            phase = self.running[-1].strip()
            if cache_hit:
                self.read[phase] += 1
                return
            self.compiling[phase] += times.total / 1e6
            self.kernels.setdefault(phase, Counter())[getattr(src, "name", "?")] += 1

        triton.knobs.compilation.listener = compiled


def profiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Prints what the host does in a call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        profile = cProfile.Profile()
        try:
            return profile.runcall(function, *args, **kwargs)
        finally:
            for order in ("tottime", "cumulative"):
                text = io.StringIO()
                pstats.Stats(profile, stream=text).sort_stats(order).print_stats(45)
                print(text.getvalue()[:9000], flush=True)

    return call


def watch_kernels(times: Times) -> None:
    from rlk_kernels.integrations.vllm import attention_gpu, layers, sparse
    from rlk_kernels.matmul import self_check

    times.wrap(layers, "compile_products", "  compile products ahead")
    times.wrap(sparse, "compile_products", "  compile products ahead")
    times.wrap(attention_gpu, "compile_attention", "  compile attention ahead")
    times.wrap(self_check, "disagreements", "self-check of tiles")
    times.wrap(sparse, "compile_experts", "  compile experts ahead")
    times.wrap(layers, "finish", "  wait for compilers")


def watch_vllm(times: Times, profile: bool) -> None:
    from vllm.v1.worker import gpu_model_runner as older
    from vllm.v1.worker.gpu import model_runner as newer
    from vllm.v1.worker.gpu_worker import Worker

    times.wrap(Worker, "load_model", "load model")
    times.wrap(Worker, "determine_available_memory", "profile run and torch.compile")
    times.wrap(Worker, "initialize_from_config", "KV cache")
    times.wrap(Worker, "compile_or_warm_up_model", "warm up and capture")
    for runner in (older.GPUModelRunner, newer.GPUModelRunner):
        if profile:
            runner.capture_model = profiled(runner.capture_model)
        times.wrap(runner, "capture_model", f"  {CAPTURE}")


def start(engine: str, model: Path, profile: bool, born: float) -> dict[str, Any]:
    """One start in this process."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    options: dict[str, Any] = {}
    times = Times()
    import torch
    from vllm import LLM, SamplingParams

    times.listen()
    watch_vllm(times, profile)
    if engine == "rlk":
        from rlk_kernels.integrations import vllm

        vllm.register()
        watch_kernels(times)
        options["attention_backend"] = "CUSTOM"
    times.seconds["imports"] = time.time() - born
    with times.phase("whole start"):
        llm = LLM(
            model=str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
            gpu_memory_utilization=0.01, kv_cache_memory_bytes=4 * 10**9, disable_log_stats=True,
            **options,
        )  # fmt: skip
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    for name in ("first request", "second request"):
        with times.phase(name):
            prompts = [{"prompt_token_ids": list(range(2, 130))}] * 4
            llm.generate(prompts, params, use_tqdm=False)
    from vllm.compilation.counter import compilation_counter

    return {
        "seconds": dict(times.seconds),
        "triton_seconds": dict(times.compiling),
        "triton_kernels": {phase: dict(names) for phase, names in times.kernels.items()},
        "triton_read": dict(times.read),
        "graphs": compilation_counter.num_cudagraph_captured,
        "device": torch.cuda.get_device_name(),
    }


def make_model(shape: str, folder: Path) -> None:
    """A config alone: the weights are random."""
    sys.path.insert(0, str(ROOT / "fixtures"))
    from make_large_model import make_config
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(ROOT / "fixtures/model")
    config = make_config(shape, tokenizer)
    from transformers import AutoModelForCausalLM

    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def started(engine: str, args: argparse.Namespace, caches: Path, limit: float) -> dict[str, Any]:
    """One start in a process of its own; what it said, or how it ended."""
    command = [sys.executable, __file__, "--one", engine, "--model", str(args.model)]
    command += ["--born", str(time.time())] + (["--profile"] if args.profile else [])
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    names |= {"VLLM_CACHE_ROOT": "vllm", "CUDA_CACHE_PATH": "cuda"}
    environment = os.environ | {name: str(caches / folder) for name, folder in names.items()}
    try:
        done = subprocess.run(
            command, env=environment, text=True, timeout=max(1.0, limit),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {limit:.0f} s"}
    lines = done.stdout.splitlines()
    said = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not said:
        print("\n".join(lines[-40:]), flush=True)
        return {"failed": f"exit {done.returncode}"}
    if args.profile:
        print(f"== {engine}\n{done.stdout[-22000:]}", flush=True)
    return json.loads(said[-1])


def table(found: list[tuple[str, dict[str, Any]]]) -> str:
    """A row for each phase, a column for each start."""
    rows = [["seconds", *(name for name, _ in found)]]
    for phase in PHASES:
        cells = [f.get("seconds", {}).get(phase) for _, f in found]
        if any(c is not None for c in cells):
            rows.append([phase, *("" if c is None else f"{c:.1f}" for c in cells)])
    phases = sorted({p for _, f in found for p in f.get("triton_kernels", {})})
    for phase in phases:
        cells = []
        for _, f in found:
            count = sum(f.get("triton_kernels", {}).get(phase, {}).values())
            seconds = f.get("triton_seconds", {}).get(phase, 0.0)
            cells.append(f"{count} in {seconds:.1f} s" if count else "")
        rows.append([f"Triton compiles, {phase}", *cells])
    for phase in sorted({p for _, f in found for p in f.get("triton_read", {})}):
        cells = [str(f.get("triton_read", {}).get(phase, "")) for _, f in found]
        rows.append([f"Triton reads its cache, {phase}", *cells])
    rows.append(["graphs captured", *(str(f.get("graphs", f.get("failed"))) for _, f in found)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b:layers=6")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--starts", type=int, default=2, help="of each engine: cold, then warm")
    parser.add_argument("--limit", type=float, default=520, help="seconds, of all starts together")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--born", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(MARK + json.dumps(start(args.one, args.model, args.profile, args.born)), flush=True)
        sys.stdout.flush()
        os._exit(0)
    until = time.monotonic() + args.limit
    work = Path(tempfile.mkdtemp(prefix="start-"))
    args.model = work / "model"
    make_model(args.shape, args.model)
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(args.starts):
        for engine in args.engines:
            caches = work / engine
            result = started(engine, args, caches, until - time.monotonic())
            name = f"{engine}, {'warm' if number else 'cold'}"
            found.append((name, result))
            print(f"{name}: {json.dumps(result)[:1500]}", flush=True)
            if args.out:
                report = {"shape": args.shape, "starts": [{"name": n, **f} for n, f in found]}
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(work, ignore_errors=True)
    print(f"\n{args.shape}\n{table(found)}")
    return int(any("failed" in f for _, f in found))


if __name__ == "__main__":
    sys.exit(main())
