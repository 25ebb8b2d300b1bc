"""Measures what vLLM or SGLang serves with the kernels and without: tokens a second, by batch.

    python kernels/bench/serving.py --model M --engine own|rlk|invariant --out X.jsonl [--lock F]
                                    [--server sglang] [--tp N] [--load-format auto] [--adapters N]

Both run with their defaults: vLLM compiled, with CUDA graphs; SGLang with CUDA graphs. The engine
is in a process of its own, and the kernels are an installed plugin. `invariant` sets vLLM's
VLLM_BATCH_INVARIANT=1. Weights are random and depend on --tp; only config.json is needed.
--load-format auto loads the checkpoint's weights. --adapters N gives vLLM N random LoRA adapters,
which the requests of a batch ask for in turn.
Rivals run at the same time, each in a process of its own. They measure in turns once --rivals
processes have written to --out that they started; the process that holds --lock uses the GPU alone.

Prefill takes prompts that are not cached and samples one token after each. Decode is the time of
1 + --new tokens minus the median time of 1, over prompts whose prefix is cached. The temperature is
1, and the log-probs of the sampled tokens are requested, as in rollouts. Each batch appends a line
of JSON to --out.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servers import SERVERS, Server, Settings

BATCHES = (
    "decode:1x1024,decode:16x1024,decode:64x1024,decode:256x512,"
    "prefill:1x2048,prefill:16x1024,prefill:64x1024,prefill:256x512"
)
"""Items `phase:prompts x tokens of each`."""
NEW = 64
REPEATS = 5
PREFILL_TOKENS = 16384
"""The least number of prompt tokens in one repetition of a prefill, batch after batch."""


def append_line(out: Path, **line: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line)[:600], flush=True)


def wait_for(out: Path, rivals: int) -> None:
    """Waits until `rivals` processes have started; two minutes at most, as one may have failed."""
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
    def __init__(self, server: Server, lock: Path, repeats: int = REPEATS, new: int = NEW) -> None:
        self.server, self.lock, self.random = server, lock, random.Random(0)
        self.repeats, self.new = repeats, new

    def prompts(self, count: int, length: int) -> list[list[int]]:
        most = self.server.vocabulary
        return [[self.random.randrange(2, most) for _ in range(length)] for _ in range(count)]

    def seconds(self, prompts: list[list[int]], tokens: int) -> float:
        started = time.perf_counter()
        self.server.answer(prompts, tokens, temperature=1.0)
        return time.perf_counter() - started

    def prefill(self, count: int, length: int) -> list[float]:
        """Tokens a second of each repetition, without the first one, which warms up."""
        rates, asked = [], -(-PREFILL_TOKENS // (count * length))
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
        # The median of all repetitions: the host may disturb one by more than the difference.
        first = statistics.median(one for one, _ in times)
        return [count * self.new / (whole - first) for _, whole in times]

    def bits(self) -> str:
        """A digest of the greedy answers to a few prompts, log-probs included."""
        self.random.seed(1)
        answers = self.server.answer(self.prompts(8, 200), 16, temperature=0.0)
        return hashlib.sha256(repr(answers).encode()).hexdigest()[:16]


def batches(text: str) -> list[tuple[str, int, int]]:
    """(phase, prompts, tokens of each) for each item of `decode:16x1024,prefill:1x2048`."""
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
    parser.add_argument("--server", choices=SERVERS, default="vllm")
    parser.add_argument("--name", help="of the engine in the lines; default: --engine")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/serving.lock"))
    parser.add_argument("--rivals", type=int, default=1)
    parser.add_argument("--cache-gb", type=float, default=17.0, help="of keys and values")
    parser.add_argument("--batches", default=BATCHES)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument(
        "--no-custom-all-reduce", action="store_true", help="ranks copy through NCCL alone"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="of each batch")
    parser.add_argument("--new", type=int, default=NEW, help="tokens that decode is timed by")
    parser.add_argument("--load-format", choices=("dummy", "auto"), default="dummy")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=TEXT", help="of the engine's class"
    )
    parser.add_argument("--adapters", type=int, default=0, help="LoRA adapters of rank 16")
    args = parser.parse_args()
    name = args.name or args.engine
    if args.engine == "rlk":
        os.environ["RLK_KERNELS"] = "1"
    started = time.perf_counter()
    settings = Settings(
        args.model, args.engine, args.load_format, int(args.cache_gb * 1e9), args.tp,
        not args.no_custom_all_reduce, args.adapters,
        dict(option.split("=", 1) for option in args.option),
    )  # fmt: skip
    server = SERVERS[args.server](settings)
    bench = Bench(server, args.lock, args.repeats, args.new)
    append_line(args.out, engine=name, what="start", seconds=time.perf_counter() - started)
    wait_for(args.out, args.rivals)
    with alone(args.lock):
        append_line(args.out, engine=name, what="bits", digest=bench.bits())
    for what, count, length in batches(args.batches):
        rates = getattr(bench, what)(count, length)
        append_line(args.out, engine=name, what=what, batch=count, length=length, rates=rates)


if __name__ == "__main__":
    main()
