"""Measures what the kernels cost vLLM: tokens a second of one engine, by batch.

    python kernels/bench/serving.py --model M --engine own|rlk|invariant --out X.jsonl [--lock F]
                                    [--tp N] [--load-format auto]

vLLM has its defaults: compiled, CUDA graphs, the engine in its own process, the kernels as the
installed plugin. `invariant` is vLLM's VLLM_BATCH_INVARIANT=1. Weights are random, and differ with
--tp; only config.json is needed. With --load-format auto they are the checkpoint's. Rivals run at
the same time, each in its process. They measure in turns once --rivals processes have written to
--out that they started; the process that has locked --lock uses the GPU alone.

Prefill takes prompts that are not cached, with one new token each. Decode is the time of 1 + --new
tokens minus the median time of 1, over prompts whose prefix is cached. The temperature is 1, and
log-probs of the sampled tokens are requested, as in rollouts. Each batch gives a line of JSON.
"""

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BATCHES = (
    "decode:1x1024,decode:16x1024,decode:64x1024,decode:256x512,"
    "prefill:1x2048,prefill:16x1024,prefill:64x1024,prefill:256x512"
)
"""What, prompts, and tokens of each."""
NEW = 64
REPEATS = 5
TOKENS = 16384
"""Of prompts that one repetition of a prefill asks for at least, batch after batch."""


def tell(out: Path, **line: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line)[:600], flush=True)


def wait_for(out: Path, rivals: int) -> None:
    """Until so many have started, or for two minutes: one may have failed."""
    for _ in range(120):
        if out.read_text().count('"what": "start"') >= rivals:
            return
        time.sleep(1)


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


class Bench:
    def __init__(self, llm: Any, lock: Path, repeats: int = REPEATS, new: int = NEW) -> None:
        self.llm, self.lock, self.random = llm, lock, random.Random(0)
        self.repeats, self.new = repeats, new
        self.vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        return [
            {"prompt_token_ids": [self.random.randrange(2, self.vocabulary) for _ in range(length)]}
            for _ in range(count)
        ]

    def seconds(self, prompts: list[Any], tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    def prefill(self, count: int, length: int) -> list[float]:
        """Tokens a second of each repetition; the first, which warms up, is left out."""
        rates, asked = [], -(-TOKENS // (count * length))
        for _ in range(self.repeats + 1):
            batches = [self.prompts(count, length) for _ in range(asked)]
            with alone(self.lock):
                seconds = sum(self.seconds(prompts, 1) for prompts in batches)
            rates.append(asked * count * length / seconds)
        return rates[1:]

    def decode(self, count: int, length: int) -> list[float]:
        prompts = self.prompts(count, length)
        with alone(self.lock):
            self.seconds(prompts, 8)
        times = []
        for _ in range(self.repeats):
            with alone(self.lock):
                times.append((self.seconds(prompts, 1), self.seconds(prompts, 1 + self.new)))
        # Of all repetitions: the host may disturb one of them by more than the difference.
        first = statistics.median(one for one, _ in times)
        return [count * self.new / (whole - first) for _, whole in times]

    def bits(self) -> str:
        """A digest of what a few prompts are answered, greedily, log-probs included."""
        from vllm import SamplingParams

        self.random.seed(1)
        prompts = self.prompts(8, 200)
        params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, detokenize=False)
        said = [
            [sorted((t, p.logprob) for t, p in step.items()) for step in o.outputs[0].logprobs]
            for o in self.llm.generate(prompts, params, use_tqdm=False)
        ]
        return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def profile_of(folder: Path) -> dict[str, Any]:
    """What the newest profile says, times in milliseconds: from the first kernel to the end of the
    last, how long of that any kernel was on the GPU, and [name, in all, how many] of kernels and of
    what the host did, longest first. A kernel may start before the one whose results it awaits has
    ended: the times of all kernels may add up to more than `busy`."""
    newest = max(folder.glob("**/*.json.gz"), key=lambda path: path.stat().st_mtime)
    with gzip.open(newest) as file:
        events = [e for e in json.load(file)["traceEvents"] if "dur" in e]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    host = [e for e in events if e.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver")]
    end = max(e["ts"] + e["dur"] for e in kernels)
    return {
        "span": (end - min(e["ts"] for e in kernels)) / 1000,
        "busy": _covered((e["ts"], e["ts"] + e["dur"]) for e in kernels) / 1000,
        "kernels": _longest(kernels),
        "host": _longest(host),
    }


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of them lasts."""
    total, until = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _longest(events: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        times[event["name"][:70]] += event["dur"]
        counts[event["name"][:70]] += 1
    return [(name, round(us / 1000, 3), counts[name]) for name, us in times.most_common(20)]


def batches(text: str) -> list[tuple[str, int, int]]:
    """`decode:16x1024,prefill:1x2048`: what, prompts, tokens of each."""
    requests = []
    for item in filter(None, text.split(",")):
        what, _, size = item.partition(":")
        count, _, length = size.partition("x")
        requests.append((what, int(count), int(length)))
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=("own", "rlk", "invariant"), required=True)
    parser.add_argument("--name", help="of the engine in the lines; default: --engine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/serving.lock"))
    parser.add_argument("--rivals", type=int, default=1)
    parser.add_argument("--cache-gb", type=float, default=17.0, help="of keys and values")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--profile", type=Path, help="folder: also profile --profiled")
    parser.add_argument("--profiled", default="prefill:1x2048,prefill:16x1024,decode:16x1024")
    parser.add_argument("--graphs-to", type=int, help="vLLM's max_cudagraph_capture_size")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument(
        "--no-custom-all-reduce", action="store_true", help="ranks copy through NCCL alone"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each batch")
    parser.add_argument("--new", type=int, default=NEW, help="tokens that decode is timed by")
    parser.add_argument("--load-format", choices=("dummy", "auto"), default="dummy")
    args = parser.parse_args()
    name = args.name or args.engine
    options: dict[str, Any] = {}
    if args.engine == "rlk":
        os.environ["RLK_KERNELS"] = "1"
        options["attention_backend"] = "CUSTOM"
    if args.engine == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if args.profile:
        options["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(args.profile.resolve()),
            "torch_profiler_with_stack": False,
        }
    if args.no_custom_all_reduce:
        options["disable_custom_all_reduce"] = True
    if args.graphs_to:
        options["max_cudagraph_capture_size"] = args.graphs_to
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(
        model=str(args.model), load_format=args.load_format, skip_tokenizer_init=True,
        tensor_parallel_size=args.tp,
        disable_log_stats=True, max_model_len=40960, gpu_memory_utilization=0.01,
        kv_cache_memory_bytes=int(args.cache_gb * 1e9), **options,
    )  # fmt: skip
    bench = Bench(llm, args.lock, args.repeats, args.new)
    tell(args.out, engine=name, what="start", seconds=time.perf_counter() - started)
    wait_for(args.out, args.rivals)
    with alone(args.lock):
        tell(args.out, engine=name, what="bits", digest=bench.bits())
    for what, count, length in batches(args.batches):
        rates = getattr(bench, what)(count, length)
        tell(args.out, engine=name, what=what, batch=count, length=length, rates=rates)
    for what, count, length in batches(args.profiled) if args.profile else ():
        prompts, tokens = bench.prompts(count, length), 17 if what == "decode" else 1
        with alone(args.lock):
            if what == "decode":
                bench.seconds(prompts, 1)
            llm.start_profile()
            bench.seconds(prompts, tokens)
            llm.stop_profile()
        requests = profile_of(args.profile)
        tell(args.out, engine=name, what=f"profile {what}", batch=count, length=length, **requests)


if __name__ == "__main__":
    main()
