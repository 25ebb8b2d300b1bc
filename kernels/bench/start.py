"""Measures how long vLLM takes to start, with the kernels and without, with empty caches and full.

    python kernels/bench/start.py --shape qwen3-30b-a3b:layers=6 [--out X.json]
        [--engines own rlk] [--starts 2] [--limit 520]

vLLM has its defaults (compiled, CUDA graphs) and random weights of a shape of
fixtures/make_large_model.py, and starts in a new process each time. All starts of an engine share
their caches (vLLM's, Inductor's and Triton's), which are empty before the first start. Triton's
seconds are the sum over all kernels, of which several may be compiled at once; they do not include
kernels that other processes compile.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENGINES = ("own", "rlk")
MARK = "start.py: "


def start(engine: str, model: Path, born: float) -> dict[str, Any]:
    """Starts vLLM in this process, which began at the time `born`, and answers a request twice."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    options: dict[str, Any] = {}
    import torch
    import triton
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter

    kernels: Counter[str] = Counter()

    def compiled(*, times: Any, cache_hit: bool, **_: Any) -> None:
        kernels["read from the cache" if cache_hit else "compiled"] += 1
        kernels["microseconds"] += 0 if cache_hit else times.total

    triton.knobs.compilation.listener = compiled
    if engine == "rlk":
        from rlk_kernels.integrations import vllm

        vllm.register()
        options["attention_backend"] = "CUSTOM"
    times = [time.time()]
    llm = LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192,
        gpu_memory_utilization=0.01, kv_cache_memory_bytes=4 * 10**9, disable_log_stats=True,
        **options,
    )  # fmt: skip
    times.append(time.time())
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
    for _ in range(2):
        prompts = [{"prompt_token_ids": list(range(2, 130))}] * 4
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.time())
    return {
        "imports, s": times[0] - born,
        "start, s": times[1] - times[0],
        "first request, s": times[2] - times[1],
        "second request, s": times[3] - times[2],
        "kernels that Triton compiled": kernels["compiled"],
        "Triton, s": kernels["microseconds"] / 1e6,
        "kernels that Triton read from its cache": kernels["read from the cache"],
        "CUDA graphs": compilation_counter.num_cudagraph_captured,
        "device": torch.cuda.get_device_name(),
    }


def make_model(shape: str, folder: Path) -> None:
    """Writes config.json alone, for random weights."""
    sys.path.insert(0, str(ROOT / "fixtures"))
    from make_large_model import make_config
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(ROOT / "fixtures/model")
    config = make_config(shape, tokenizer)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)


def start_in_process(engine: str, model: Path, caches: Path, limit: float) -> dict[str, Any]:
    """The result of `start` in a new process, or how that process failed."""
    command = [sys.executable, __file__, "--one", engine, "--model", str(model)]
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    names |= {"VLLM_CACHE_ROOT": "vllm", "CUDA_CACHE_PATH": "cuda"}
    try:
        done = subprocess.run(
            [*command, "--born", str(time.time())], text=True, timeout=max(1.0, limit),
            env=os.environ | {name: str(caches / folder) for name, folder in names.items()},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"longer than {limit:.0f} s"}
    lines = done.stdout.splitlines()
    results = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    if not results:
        print("\n".join(lines[-40:]), flush=True)
        return {"failed": f"exit {done.returncode}"}
    return json.loads(results[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-30b-a3b:layers=6")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--starts", type=int, default=2, help="of each engine: cold, then warm")
    parser.add_argument("--limit", type=float, default=520, help="seconds, of all starts together")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--born", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(MARK + json.dumps(start(args.one, args.model, args.born)), flush=True)
        os._exit(0)
    until = time.monotonic() + args.limit
    work = Path(tempfile.mkdtemp(prefix="start-"))
    model = work / "model"
    make_model(args.shape, model)
    results = []
    for number in range(args.starts):
        for engine in args.engines:
            name = f"{engine}, {'warm' if number else 'cold'}"
            result = start_in_process(engine, model, work / engine, until - time.monotonic())
            results.append({"name": name, **result})
            print(json.dumps(results[-1], indent=1), flush=True)
            if args.out:
                report = {"shape": args.shape, "starts": results}
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(work, ignore_errors=True)
    return int(any("failed" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
