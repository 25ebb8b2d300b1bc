"""Checks the bits of Megatron-core's gradients on two GPUs in every layout, and times a step.

    PYTHONPATH=kernels python kernels/bench/training_ranks.py [--seconds 240] [--out FILE.json]
                                                    [--layers 2,8]

Needs two GPUs and megatron-core. The model has Qwen3-8B's shape and random weights. The reference
gradients are the fp32 sum of two micro-batches on one rank, without any wrapper. With the kernels,
three layouts are compared with the reference at that global batch: tp=2, and tp=2 with sequence
parallelism, both through megatron-core's DistributedDataParallel and finalize_model_grads; and dp=2
with one micro-batch a rank, added up in the kernels' order. The norm of the gradients is compared
too. Plain megatron-core shows the drift. Then a step (forward, loss and backward) at tp=2 is timed,
plain and with the kernels in turns, and the memory of each is measured.

The exit code is 1 if a gradient with the kernels has another bit, or if a part did not run.
"""

import argparse
import faulthandler
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import megatron_models
import torch
import torch.distributed as dist
from megatron_models import causal_mask, cut, fill, gpt_model, parallel
from torch import Tensor

QWEN3_8B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 40960,
    "tie_word_embeddings": False, "initializer_range": 0.02,
    "model_type": "qwen3", "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}  # fmt: skip
LENGTH, TOGETHER = 2048, 4
"""Positions of a sequence, and sequences of a forward, in a step that is timed."""
BITS_LENGTH = 512
"""Positions of a sequence whose gradient is compared."""
STEPS = 5
LOCAL = {
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as megatron-core asks for
}  # fmt: skip

Gradients = dict[str, Tensor]
"""Parameter -> this rank's gradient, fp32."""


def loss(model: Any, ids: Tensor) -> Tensor:
    """The sum over positions that have a next token."""
    length = ids.shape[1]
    at = torch.arange(length, device=ids.device).expand_as(ids)
    return model(ids, at, causal_mask(length), labels=ids.roll(-1, 1))[:, :-1].sum()


def reference(shape: dict[str, Any], ids: Tensor, kernels: bool, rank: int) -> Any:
    """(gradients of one rank, their norm or None)."""
    with parallel(1):
        model = gpt_model(shape, ids.shape[1], kernels)
        fill(model, rank, 1)
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        for some in ids.split(1):
            loss(model, some).backward()
            for parameter in model.parameters():
                parameter.main_grad += parameter.grad
                parameter.grad = None
        return found_in(model, kernels)


def found_in(model: Any, kernels: bool) -> tuple[Gradients, float | None]:
    from rlk_kernels.integrations import megatron

    norm = megatron.gradient_norm(model).item() if kernels else None
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}, norm


def of_ranks(
    shape: dict[str, Any], ids: Tensor, kernels: bool, rank: int, whole: Gradients,
    tp: int, sequence: bool,
) -> dict[str, Any]:  # fmt: skip
    """The gradients of two ranks, finished by megatron-core, that differ from `whole`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from rlk_kernels.integrations import megatron

    data = RANKS // tp
    asked = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=data > 1,
        reduce_scatter_with_fp32_accumulation=data > 1,
    )
    with parallel(tp), megatron.ordered_reduce_scatter() if kernels else nullcontext():
        bare = gpt_model(shape, ids.shape[1], kernels, tp=tp, sequence=sequence)
        fill(bare, rank, tp)
        model = DistributedDataParallel(bare.config, asked, bare)
        own = ids.chunk(data)[rank % data].split(1)
        for i, some in enumerate(own):
            with nullcontext() if i == len(own) - 1 else model.no_sync():
                loss(model, some).backward()
        finalize_model_grads([model])
        for buffer in model.buffers if data > 1 else ():
            share = buffer.grad_data.chunk(data)[rank].clone()
            dist.all_gather_into_tensor(buffer.grad_data, share)
            buffer.grad_data *= data  # megatron-core has averaged over ranks
        found, norm = found_in(bare, kernels)
        differ = [
            name
            for name, parameter in bare.named_parameters()
            if not torch.equal(found[name], cut(whole[name], parameter, rank, tp))
        ]
        zero = [name for name, gradient in found.items() if not bool(gradient.any())]
    return {
        "of": len(found),
        "differ": len(differ),
        "names": differ[:6],
        "zero": zero,
        "norm": norm,
    }


LAYOUTS = {"tp=2": (2, False), "tp=2, sequence parallel": (2, True), "dp=2": (1, False)}


def gradients(shape: dict[str, Any], rank: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(1)
    size = (RANKS, BITS_LENGTH)
    ids = torch.randint(2, shape["vocab_size"], size, generator=draw).to(megatron_models.DEVICE)
    found: dict[str, Any] = {}
    for kernels in (True, False):
        whole, norm = reference(shape, ids, kernels, rank)
        for layout, (tp, sequence) in LAYOUTS.items():
            if sequence and not kernels:
                continue  # megatron-core's local norm does not take it
            name = f"{layout}, {'kernels' if kernels else 'plain'}"
            found[name] = tried(
                lambda how=(tp, sequence), k=kernels, w=whole: of_ranks(
                    shape, ids, k, rank, w, *how
                )
            )
            found[name]["norm of one rank"] = norm
            if rank == 0:
                print(name, json.dumps(found[name]), flush=True)
    return found


def tried(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return run()
    except Exception:  # the other layouts still run
        traceback.print_exc()
        return {"failed": traceback.format_exc()[-1500:]}
    finally:
        gc.collect()  # a model and its hooks refer to each other
        torch.cuda.empty_cache()


def steps(shape: dict[str, Any], rank: int) -> dict[str, Any]:
    """Seconds of each step, in turns, and the GB that a step takes beyond the weights."""
    kinds = {
        "plain": (False, False),
        "kernels": (True, False),
        "kernels, sequence parallel": (True, True),
    }
    ids = torch.randint(2, shape["vocab_size"], (TOGETHER, LENGTH), device=megatron_models.DEVICE)
    dist.broadcast(ids, 0)
    with parallel(RANKS):
        models = {
            name: gpt_model(shape, LENGTH, kernels, tp=RANKS, sequence=sequence)
            for name, (kernels, sequence) in kinds.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in models}
        peak = dict.fromkeys(models, 0.0)
        for turn in range(STEPS + 1):
            for name, model in models.items():
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                dist.barrier()
                torch.cuda.synchronize()
                began = time.perf_counter()
                loss(model, ids).backward()
                torch.cuda.synchronize()
                if turn:  # the first compiles
                    seconds[name].append(time.perf_counter() - began)
                    peak[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
                model.zero_grad(set_to_none=True)
    tokens = TOGETHER * LENGTH
    return {
        name: {
            "tokens": tokens,
            "seconds": of,
            "tokens a second": tokens / statistics.median(of),
            "GB above weights": peak[name],
        }
        for name, of in seconds.items()
    }


def run_rank(rank: int, folder: Path, ends: float, layers: str) -> None:
    faulthandler.dump_traceback_later(max(1.0, ends - time.time()), exit=True)
    torch.cuda.set_device(rank)
    megatron_models.DEVICE = torch.device("cuda", rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=90)
    )
    result: dict[str, Any] = {}
    for (name, part), depth in zip(PARTS.items(), layers.split(","), strict=True):
        began = time.time()
        shape = QWEN3_8B | {"num_hidden_layers": int(depth)}
        result[name] = tried(lambda part=part, shape=shape: part(shape, rank))
        result[f"{name}, layers"] = int(depth)
        result[f"{name}, seconds"] = round(time.time() - began, 1)
        if rank == 0:
            print(f"{name}: {time.time() - began:.0f} s", flush=True)
        (folder / f"{rank}.part").write_text(json.dumps(result))
        (folder / f"{rank}.part").rename(folder / f"{rank}.json")
    os._exit(0)


RANKS = 2
PARTS: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "gradients": gradients,
    "steps": steps,
}


def faults(results: list[dict[str, Any]]) -> list[str]:
    """What differed or was not measured, on any rank."""
    wrong = []
    for rank, result in enumerate(results):
        for layout in LAYOUTS:
            found = result.get("gradients", {}).get(f"{layout}, kernels", {})
            equal = found.get("differ") == 0 and not found["zero"] and found["of"] > 0
            if not equal or found["norm"] != found["norm of one rank"]:
                wrong.append(f"rank {rank}, gradients of {layout}: {found or 'not run'}")
        if "kernels" not in result.get("steps", {}):
            wrong.append(f"rank {rank}: steps were not timed")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240, help="the whole run ends by then")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--layers", default="2,8", help="for the gradients, and for the steps")
    for name, kind in (("rank", int), ("folder", Path), ("ends", float)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank, args.folder, args.ends, args.layers)
    ends = time.time() + args.seconds - 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [
            subprocess.Popen(
                [sys.executable, *sys.argv, "--rank", str(rank), "--folder", name,
                 "--ends", str(ends)],
                env=LOCAL | os.environ,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            for process in processes:
                process.wait(max(1.0, ends + 5 - time.time()))
        except subprocess.TimeoutExpired:
            print("the time is over", flush=True)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        files = [folder / f"{rank}.json" for rank in range(RANKS)]
        results = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    for part in PARTS:
        for what, found in results[0].get(part, {}).items():
            print(what, found)
    wrong = faults(results)
    print("\n".join(wrong) if wrong else "all gradients are equal")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
