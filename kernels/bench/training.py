"""Measures a training step of HF or Megatron-core: tokens a second, with the kernels or without.

    python kernels/bench/training.py --shape CONFIG.json --trainer hf|megatron --kernels off|rlk \\
        --out X.jsonl [--lock F] [--tokens 8192,32768]

A step is forward, loss (the mean negative log-prob) and backward, over sequences of 2048 tokens,
four in a forward; gradients are added up over the forwards. Weights are random, in bf16. Plain HF
is as `from_config` makes it (sdpa), and plain Megatron has its local layer spec. Each size of a
step appends a line of JSON to --out. A sparse shape appends another line, which times the forward
and the backward of the first sparse layer alone, over the tokens of one forward.

--experts sets how plain Megatron computes experts: `sequential`, one after another, or `grouped`,
its GroupedMLP, with torch._grouped_mm if the package grouped_gemm is not installed.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from serving import alone, append_line
from torch import Tensor

LENGTH, TOGETHER = 2048, 4
STEPS = 3


def hf_model(
    shape: dict[str, Any], kernels: bool, _experts: str
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """(model, ids[B, S] -> logits[B, S, V])."""
    from rlk_kernels.integrations import hf
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {k: v for k, v in shape.items() if k != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **kind)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if kernels:
        hf.use_kernels(model)
    return model, lambda ids: model(input_ids=ids, use_cache=False).logits


def megatron_model(
    shape: dict[str, Any], kernels: bool, experts: str
) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """As `hf_model`."""
    import megatron_models

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    megatron_models.initialize(1)
    model = megatron_models.gpt_model(shape, LENGTH, kernels, experts=experts)
    at = torch.arange(LENGTH, device="cuda").expand(TOGETHER, LENGTH)
    hidden = megatron_models.causal_mask(LENGTH)
    return model, lambda ids: model(ids, at, hidden)


def plain_loss(logits: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), target)


def kernel_loss(logits: Tensor, target: Tensor) -> Tensor:
    from rlk_kernels.integrations.profile import logp

    return -logp(logits, target).mean()


def step(model: Any, run: Callable[[Tensor], Tensor], loss_of: Any, ids: Tensor) -> None:
    """Adds up the gradients of N forwards, of ids[N, B, S]."""
    for p in model.parameters():
        p.grad = None
    for some in ids:
        logits = run(some)[:, :-1].flatten(0, 1)
        (loss_of(logits, some[:, 1:].flatten()) / len(ids)).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Path, required=True)
    parser.add_argument("--trainer", choices=("hf", "megatron"), required=True)
    parser.add_argument("--kernels", choices=("off", "rlk"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lock", type=Path, default=Path("/tmp/serving.lock"))
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--experts", choices=("sequential", "grouped"), default="sequential")
    parser.add_argument("--layers", type=int, help="instead of the config's")
    args = parser.parse_args()
    shape = json.loads(args.shape.read_text())
    if "num_local_experts" in shape:  # Mixtral's name
        shape["num_experts"] = shape.pop("num_local_experts")
    shape["num_hidden_layers"] = args.layers or shape["num_hidden_layers"]
    torch.manual_seed(0)
    make = {"hf": hf_model, "megatron": megatron_model}[args.trainer]
    model, run = make(shape, args.kernels == "rlk", args.experts)
    loss_of = kernel_loss if args.kernels == "rlk" else plain_loss
    who = {"engine": args.trainer, "kernels": args.kernels}
    if "num_experts" in shape and args.trainer == "megatron" and args.kernels == "off":
        who["experts"] = args.experts
    for tokens in map(int, args.tokens.split(",")):
        size = (tokens // (LENGTH * TOGETHER), TOGETHER, LENGTH)
        ids = torch.randint(2, shape["vocab_size"], size, device="cuda")
        rates = []
        with alone(args.lock):
            step(model, run, loss_of, ids)
            for _ in range(STEPS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                step(model, run, loss_of, ids)
                torch.cuda.synchronize()
                rates.append(tokens / (time.perf_counter() - started))
        peak = torch.cuda.max_memory_allocated() / 1e9
        append_line(args.out, **who, what="step", tokens=tokens, rates=rates, peak_gb=peak)
    if "num_experts" in shape:
        ms = layer_ms(args, model)
        append_line(args.out, **who, what="sparse layer", tokens=LENGTH * TOGETHER, ms=ms)


def layer_ms(args: Any, model: Any) -> list[float]:
    """Milliseconds of forward and backward of the first sparse layer, alone."""
    layers = model.model.layers if args.trainer == "hf" else model.decoder.layers
    mlp, size = layers[0].mlp, (LENGTH, TOGETHER, model.config.hidden_size)
    x = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad, times = torch.randn_like(x), []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with alone(args.lock):
        for _ in range(1 + STEPS):
            for p in mlp.parameters():
                p.grad = None
            start.record()
            y = mlp(x)
            (y[0] if isinstance(y, tuple) else y).backward(grad)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
    return times[1:]


if __name__ == "__main__":
    main()
