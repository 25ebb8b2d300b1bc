"""What the kernels cost vLLM: tokens a second of one engine, by batch.

    python kernels/bench/serving.py --model M --engine own|rlk|invariant --out X.jsonl [--lock F]

As default users run it: compiled, CUDA graphs, the engine in a process of its own, the kernels as
the installed plugin. `invariant` is vLLM's VLLM_BATCH_INVARIANT=1. Weights are random (only
config.json is needed). Rivals run at the same time, each in its process, and measure in turns from
when --rivals of them have told --out that they started: whoever holds --lock has the GPU alone.

Prefill: prompts that nobody has seen, one token each. Decode: the time of 1 + NEW tokens less that
of 1, over prompts whose prefix is cached. Temperature 1, log-probs of the sampled tokens, as
rollouts ask for. A line of JSON for each batch, as it comes.
"""

import argparse
import contextlib
import fcntl
import gzip
import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PREFILL = ((1, 2048), (16, 1024), (64, 1024))
DECODE = ((1, 1024), (16, 1024), (64, 1024), (256, 512))
"""Prompts, and tokens of each."""
NEW = 64
REPEATS = 3
VOCABULARY = 150_000


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
    def __init__(self, llm: Any, lock: Path) -> None:
        self.llm, self.lock, self.random = llm, lock, random.Random(0)

    def prompts(self, count: int, length: int) -> list[dict[str, list[int]]]:
        return [
            {"prompt_token_ids": [self.random.randrange(2, VOCABULARY) for _ in range(length)]}
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
        rates = []
        for _ in range(REPEATS + 1):
            prompts = self.prompts(count, length)
            with alone(self.lock):
                rates.append(count * length / self.seconds(prompts, 1))
        return rates[1:]

    def decode(self, count: int, length: int) -> list[float]:
        prompts = self.prompts(count, length)
        with alone(self.lock):
            self.seconds(prompts, 8)
        rates = []
        for _ in range(REPEATS):
            with alone(self.lock):
                first, all_of_them = self.seconds(prompts, 1), self.seconds(prompts, 1 + NEW)
            rates.append(count * NEW / (all_of_them - first))
        return rates

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


def kernels_of(folder: Path) -> list[tuple[str, float, int]]:
    """(kernel, milliseconds, launches) of the newest profile, longest first."""
    newest = max(folder.glob("**/*.json.gz"), key=lambda p: p.stat().st_size)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    with gzip.open(newest) as file:
        events = json.load(file)["traceEvents"]
    for event in events:
        if event.get("cat") == "kernel":
            times[event["name"][:90]] += event["dur"]
            counts[event["name"][:90]] += 1
    return [(name, us / 1000, counts[name]) for name, us in times.most_common(24)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine", choices=("own", "rlk", "invariant"), required=True)
    parser.add_argument("--name", help="of the engine in the lines; default: --engine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/serving.lock"))
    parser.add_argument("--rivals", type=int, default=1)
    parser.add_argument("--cache-gb", type=float, default=17.0, help="of keys and values")
    parser.add_argument("--profile", type=Path, help="folder: also profile two batches")
    args = parser.parse_args()
    name = args.name or args.engine
    own: dict[str, Any] = {}
    if args.engine == "rlk":
        os.environ["RLK_KERNELS"] = "1"
        own["attention_backend"] = "CUSTOM"
    if args.engine == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    if args.profile:
        own["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": str(args.profile.resolve()),
            "torch_profiler_with_stack": False,
        }
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(
        model=str(args.model), load_format="dummy", skip_tokenizer_init=True,
        disable_log_stats=True, max_model_len=40960, gpu_memory_utilization=0.01,
        kv_cache_memory_bytes=int(args.cache_gb * 1e9), **own,
    )  # fmt: skip
    bench = Bench(llm, args.lock)
    tell(args.out, engine=name, what="start", seconds=time.perf_counter() - started)
    wait_for(args.out, args.rivals)
    with alone(args.lock):
        tell(args.out, engine=name, what="bits", digest=bench.bits())
    for what, batches in (("decode", DECODE), ("prefill", PREFILL)):
        for count, length in batches:
            rates = getattr(bench, what)(count, length)
            tell(args.out, engine=name, what=what, batch=count, length=length, rates=rates)
    if args.profile:
        for what, count, length, tokens in (("decode", 16, 1024, 17), ("prefill", 16, 1024, 1)):
            prompts = bench.prompts(count, length)
            with alone(args.lock):
                if what == "decode":
                    bench.seconds(prompts, 1)
                llm.start_profile(what)
                bench.seconds(prompts, tokens)
                llm.stop_profile()
            tell(args.out, engine=name, what=f"profile {what}", times=kernels_of(args.profile))


if __name__ == "__main__":
    main()
