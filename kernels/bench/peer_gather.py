"""Checks and times the gather by stores into peers' memory (`rlk_kernels.parallel.peer`).

    PYTHONPATH=kernels python kernels/bench/peer_gather.py [--seconds 220] [--out FILE.json]

The checks run with two processes on one GPU, and on two GPUs if there are two:
    bits      calls and captured graphs of random shapes have the bits of torch's all_gather
    streams   two gathers run on two streams at once
    missing   a rank is killed: the other rank names it, in a call and in a graph, and returns NaN
On two GPUs the script also times one collective in a CUDA graph, beside NCCL's all-gather and
all-reduce, for decode and prefill at tp=2. The exit code is 1 if a check failed or did not end.

R = ranks   M = rows   F = columns of a rank
"""

import argparse
import faulthandler
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rlk_kernels.errors import RankMissing
from rlk_kernels.parallel.peer.gather import POLLS_PER_SECOND, PeerGather, peer_gather
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CALLS = 10_000
GRAPHS, PER_GRAPH, REPLAYS = 100, 100, 3
FEW_BYTES, MANY_BYTES = 4 << 20, 24 << 20
"""Limits of a rank's shard. One shape in a hundred may have MANY_BYTES, more than all slots
hold."""
ROWS = (1, 16, 64, 256, 4096, 16384)
WIDTHS = (2048, 4096, 7168)
"""Columns of a rank at tp=2: outputs of Llama-3-8B and 70B, and the input of 8B's down_proj."""
HIDDEN = 4096
REPEATS, REPEATS_OF_MANY = 100, 10
"""Collectives in a graph that is timed: with up to 256 rows, and with more."""

LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


class Ranks:
    """This process and its groups."""

    def __init__(self, rank: int, gpus: int, folder: Path, ends: float) -> None:
        self.rank, self.other, self.gpus, self.ends = rank, 1 - rank, gpus, ends
        self.device = torch.device("cuda", rank % gpus)
        torch.cuda.set_device(self.device)
        store = dist.FileStore(str(folder / "store"), 2)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
        self.host = dist.group.WORLD
        self.nccl = None
        if gpus == 2:
            self.nccl = dist.new_group(backend="nccl", timeout=limit)

    def left(self) -> float:
        """Seconds until the run ends, by rank 0's clock."""
        mine = [self.ends - time.time()]
        dist.broadcast_object_list(mine, 0, group=self.host)
        return mine[0]

    def gathered(self, x: Tensor) -> Tensor:
        """int16 [R, ...] of x[...] by torch's all_gather, on the GPU."""
        flat = x.contiguous().view(torch.int16).flatten()
        if self.nccl is not None:
            out = flat.new_empty(2 * len(flat))
            dist.all_gather_into_tensor(
                out.view(torch.bfloat16), flat.view(torch.bfloat16), self.nccl
            )
        else:
            parts = [torch.empty(flat.nbytes, dtype=torch.uint8) for _ in range(2)]
            dist.all_gather(parts, flat.cpu().view(torch.uint8), group=self.host)
            out = torch.cat(parts).to(self.device).view(torch.int16)
        return out.view(2, -1)


def shapes(seed: int) -> Iterator[tuple[int, int, torch.dtype]]:
    """(M, F, dtype), the same on all ranks."""
    draw = random.Random(seed)
    while True:
        dtype = draw.choice(DTYPES)
        f = draw.choice([1, 3, 128, 896, 1536, 2048, 6144, round(2 ** draw.uniform(0, 13))])
        if draw.random() < 0.01:
            yield max(1, round(MANY_BYTES * draw.random() / (f * dtype.itemsize))), f, dtype
            continue
        most = max(1, min(300, FEW_BYTES // (f * dtype.itemsize)))
        yield min(most, round(2 ** draw.uniform(0, 8.3))), f, dtype


def noise(m: int, f: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """x[M, F] of random bits, NaN and infinities included."""
    words = torch.randint(
        -(2**15), 2**15, (m, f * dtype.itemsize // 2), generator=generator, device=generator.device
    )
    return words.short().view(dtype)


def generator_of(ranks: Ranks, seed: int) -> torch.Generator:
    return torch.Generator(ranks.device).manual_seed(seed * 2 + ranks.rank)


def wrong(y: Tensor, parts: Tensor, m: int) -> Tensor:
    """The number of 16-bit words of y[M, R F] that differ from parts[R, M F], on the GPU."""
    expected = parts.view(2, m, -1).transpose(0, 1).flatten(1)
    return (y.view(torch.int16) != expected).sum()


def test_calls(ranks: Ranks, gather: PeerGather, seconds: float) -> dict[str, int]:
    generator, draw = generator_of(ranks, 1), shapes(1)
    bad, done, until = 0, 0, time.time() + min(seconds, ranks.left())
    while done < CALLS:
        sums, xs, ys = [], [], []
        for m, f, dtype in (next(draw) for _ in range(100)):
            xs.append((noise(m, f, dtype, generator), m))
            ys.append(gather.columns(xs[-1][0]))
        flat = torch.cat([x.view(torch.int16).flatten() for x, _ in xs])
        parts = ranks.gathered(flat).split([x.nbytes // 2 for x, _ in xs], 1)
        sums = [wrong(y, p, m) for y, p, (_, m) in zip(ys, parts, xs, strict=True)]
        bad, done = bad + int(torch.stack(sums).sum()), done + 100
        if agreed(ranks, time.time() > until):
            break
    gather.check()
    return {"calls": done, "wrong words": bad}


def agreed(ranks: Ranks, what: bool) -> bool:
    """Rank 0's `what`."""
    values = [what]
    dist.broadcast_object_list(values, 0, group=ranks.host)
    return values[0]


def test_graphs(ranks: Ranks, gather: PeerGather, seconds: float) -> dict[str, int]:
    generator, draw = generator_of(ranks, 2), shapes(2)
    bad, done, until = 0, 0, time.time() + min(seconds, ranks.left())
    for _ in range(GRAPHS):
        sizes = [next(draw) for _ in range(PER_GRAPH)]
        xs = [noise(*size, generator) for size in sizes]
        # The kernels are compiled before the capture.
        for x in xs:
            gather.columns(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [gather.columns(x) for x in xs]
        for _ in range(REPLAYS):
            for x, size in zip(xs, sizes, strict=True):
                x.view(torch.int16).copy_(noise(*size, generator).view(torch.int16))
            graph.replay()
            flat = torch.cat([x.view(torch.int16).flatten() for x in xs])
            parts = ranks.gathered(flat).split([x.nbytes // 2 for x in xs], 1)
            sums = [wrong(y, p, s[0]) for y, p, s in zip(ys, parts, sizes, strict=True)]
            bad += int(torch.stack(sums).sum())
        done += PER_GRAPH
        if agreed(ranks, time.time() > until):
            break
    gather.check()
    return {"captured calls": done, "replays of each": REPLAYS, "wrong words": bad}


def test_streams(ranks: Ranks, gathers: list[PeerGather], count: int) -> dict[str, int]:
    """The ranks enqueue on the two streams in opposite orders."""
    streams = [torch.cuda.Stream() for _ in gathers]
    draw = shapes(3)
    sizes = [next(draw) for _ in range(count)]
    generator = generator_of(ranks, 3)
    xs = [[noise(*size, generator) for size in sizes] for _ in gathers]
    torch.cuda.synchronize()
    ys: dict[int, list[Tensor]] = {0: [], 1: []}
    for i in range(0, count, 20):
        for s in (0, 1) if ranks.rank == 0 else (1, 0):
            with torch.cuda.stream(streams[s]):
                ys[s] += [gathers[s].columns(x) for x in xs[s][i : i + 20]]
    torch.cuda.synchronize()
    bad = 0
    for s in (0, 1):
        flat = torch.cat([x.view(torch.int16).flatten() for x in xs[s]])
        parts = ranks.gathered(flat).split([x.nbytes // 2 for x in xs[s]], 1)
        bad += sum(
            int(wrong(y, p, size[0])) for y, p, size in zip(ys[s], parts, sizes, strict=True)
        )
        gathers[s].check()
    return {"calls": 2 * count, "wrong words": bad}


def test_missing(ranks: Ranks, gathers: list[PeerGather]) -> dict[str, Any]:
    """Rank 1 is killed. Both gathers wait 2 s: one is called, and the other is in a graph."""
    x = torch.ones(16, 2048, dtype=torch.bfloat16, device=ranks.device)
    graph = torch.cuda.CUDAGraph()
    dist.barrier()
    for gather in gathers:
        gather.columns(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = gathers[1].columns(x)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2)
    found: dict[str, Any] = {}
    for name, gather, run in (
        ("call", gathers[0], lambda: gathers[0].columns(x)),
        ("graph", gathers[1], lambda: (graph.replay(), captured)[1]),
    ):
        began = time.time()
        y = run()
        torch.cuda.synchronize()
        waited = time.time() - began
        message = "no rank was named"
        try:
            gather.check()
        except RankMissing as error:
            message = str(error)
        began = time.time()
        if name == "graph":
            graph.replay()
        torch.cuda.synchronize()
        nan = bool(y[:, 2048:].isnan().all()) and not bool(y[:, :2048].isnan().any())
        found[name] = {
            "seconds waited": round(waited, 2),
            "the next one": round(time.time() - began, 4),
            "NaN": nan,
            "named": "waited for rank 1," in message,
            "message": message,
        }
    return found


def microseconds(run: Callable[[], Any], repeats: int) -> float:
    """Microseconds of one call in a graph of `repeats` calls; the median of 15 replays."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    times = []
    for i in range(18):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end) * 1000 / repeats)
    return statistics.median(times)


def timed(ranks: Ranks, gather: PeerGather) -> list[dict[str, Any]]:
    rows = []
    for batch in ROWS:
        repeats = REPEATS if batch <= 256 else REPEATS_OF_MANY
        for f in WIDTHS:
            x = torch.randn(batch, f, device=ranks.device).bfloat16()
            out = x.new_empty(2, batch, f)
            whole = torch.randn(batch, HIDDEN, device=ranks.device).bfloat16()

            def nccl(x: Tensor = x, out: Tensor = out) -> Tensor:
                dist.all_gather_into_tensor(out, x, group=ranks.nccl)
                return out

            def columns(x: Tensor = x, out: Tensor = out) -> Tensor:
                dist.all_gather_into_tensor(out, x, group=ranks.nccl)
                return out.movedim(0, -2).flatten(-2)

            def reduce(whole: Tensor = whole) -> None:
                dist.all_reduce(whole, group=ranks.nccl)

            row = {"rows": batch, "F": f, "KiB a rank": batch * f * 2 / 1024}
            row["peer us"] = microseconds(lambda x=x: gather.columns(x), repeats)
            row["peer GB/s received"] = batch * f * 2e-3 / row["peer us"]
            row["nccl gather us"] = microseconds(nccl, repeats)
            row["nccl gather, columns us"] = microseconds(columns, repeats)
            row["nccl all-reduce of 4096 us"] = microseconds(reduce, repeats)
            rows.append(row)
    return rows


def run_rank(rank: int, gpus: int, folder: Path, ends: float) -> None:
    faulthandler.dump_traceback_later(max(1.0, ends + 5 - time.time()), exit=True)
    result: dict[str, Any] = {"gpus": gpus, "gpu": torch.cuda.get_device_name()}

    def write() -> None:
        if rank == 0:
            (folder / "part").write_text(json.dumps(result))
            (folder / "part").rename(folder / "result")

    began = time.time()
    ranks = Ranks(rank, gpus, folder, ends)
    gather = peer_gather(ranks.host, ranks.device, 30)
    second = peer_gather(ranks.host, ranks.device, 30)
    brief = [peer_gather(ranks.host, ranks.device, 2) for _ in range(2)]
    result["seconds to make"] = round(time.time() - began, 1)
    budget = 0.3 * (ends - began)
    for name, test in {
        "bits of calls": lambda: test_calls(ranks, gather, budget),
        "bits of graphs": lambda: test_graphs(ranks, gather, budget),
        "streams": lambda: test_streams(ranks, [gather, second], 200),
        **({"times": lambda: timed(ranks, gather)} if gpus == 2 else {}),
        "missing": lambda: test_missing(ranks, brief),
    }.items():
        began = time.time()
        result[name] = test()
        result[f"{name}, seconds"] = round(time.time() - began, 1)
        write()
    os._exit(0)  # the other rank is gone


def run(gpus: int, ends: float) -> dict[str, Any]:
    """The result of both ranks, which run in processes of their own and are killed at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logs = [(folder / f"log{rank}").open("w+") for rank in range(2)]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--gpus", str(gpus), "--folder",
                 name, "--ends", str(ends)],
                stdout=logs[rank], stderr=subprocess.STDOUT, env=LOCAL | os.environ,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            processes[0].wait(max(1.0, ends + 10 - time.time()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in processes:
                process.kill()
                process.wait()
        path = folder / "result"
        result = json.loads(path.read_text()) if path.exists() else {"gpus": gpus}
        result["exit code"] = processes[0].returncode
        for rank, log in enumerate(logs):
            log.seek(0)
            text = log.read()
            if processes[0].returncode != 0:
                print(f"--- what rank {rank} wrote:\n{text[-4000:]}")
    return result


def faults(result: dict[str, Any]) -> list[str]:
    """The checks that failed or did not run."""
    wrong_ones = [] if result["exit code"] == 0 else ["it did not end by itself"]
    for name in ("bits of calls", "bits of graphs", "streams"):
        if name not in result:
            wrong_ones.append(f"{name}: not tested")
        elif result[name]["wrong words"] != 0:
            wrong_ones.append(f"{name}: {result[name]['wrong words']} words differ")
    for name in ("call", "graph"):
        found = result.get("missing", {}).get(name, {})
        if not (found.get("named") and found.get("NaN")):
            wrong_ones.append(f"a killed rank was not named in a {name}")
    return [f"{result['gpus']} GPU: {what}" for what in wrong_ones]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=220, help="the whole run ends by then")
    parser.add_argument("--out", type=Path)
    for name, kind in (("rank", int), ("gpus", int), ("folder", Path), ("ends", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.gpus, args.folder, args.ends)
    began, results = time.time(), []
    for gpus in range(1, min(2, torch.cuda.device_count()) + 1):
        # One GPU gets about half of the time, and two GPUs the rest.
        share = 0.45 if gpus == 1 and torch.cuda.device_count() > 1 else 1.0
        results.append(run(gpus, began + args.seconds * share - 15))
        print(json.dumps(results[-1], indent=1), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(f"polls assumed a second: {POLLS_PER_SECOND}")
    for row in results[-1].get("times", []) if results else []:
        print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{v}" for k, v in row.items()))
    wrong_ones = [fault for result in results for fault in faults(result)]
    if not results:
        wrong_ones.append("no GPU was found")
    print(
        "\n".join(wrong_ones) if wrong_ones else f"all checks passed in {time.time() - began:.0f} s"
    )
    return int(bool(wrong_ones))


if __name__ == "__main__":
    sys.exit(main())
