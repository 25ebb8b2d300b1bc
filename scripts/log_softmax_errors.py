#!/usr/bin/env python3
"""How far a log-softmax in float32 is from float64, in the unit that log-probs are counted in.

    ATEN_CPU_CAPABILITY=avx2 python scripts/log_softmax_errors.py
    python scripts/log_softmax_errors.py --device cuda       # vLLM's Triton kernel too, where it is

Logits are random, rounded to bfloat16: a likely token, 512 that are known, and a tail about UNSEEN.
`largest loss` is of the sum of exponentials, in 2^-24.
"""

import argparse
from collections.abc import Callable, Iterator

import torch

from rlk_align.probe.referee import formulas
from rlk_align.probe.referee.exponentials import SumOrder, lost_share, sum_orders
from rlk_align.probe.referee.reference import FLOAT32_UNIT, SUM_ULPS
from rlk_align.probe.referee.rounding import rounding_variance

VOCABULARIES = (1_024, 32_000, 128_256, 151_936)
UNSEEN = (-3.0, -8.0, -13.0, -17.0)
ROWS = 256

LogSoftmax = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""float32 logits `[N, V]` and tokens `[N]` -> log-probs `[N]`."""


def torchs_own(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(logits, dim=-1).gather(1, target[:, None])[:, 0]


def of_vllm(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    return compute_token_logprobs(logits, target[:, None])[:, 0]


def of_rlk_kernels(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    import rlk_kernels

    return rlk_kernels.logp(logits, target)


def known(device: str) -> Iterator[tuple[str, LogSoftmax]]:
    yield "torch.log_softmax", torchs_own
    yield "rlk_kernels.logp", of_rlk_kernels
    if device == "cuda":
        yield "vLLM's Triton kernel", of_vllm


def drawn(vocab: int, unseen: float) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    logits = 0.3 * torch.randn(ROWS, vocab, generator=random) + unseen
    logits[:, :512] = 2.5 * torch.randn(ROWS, 512, generator=random) - 3
    logits[:, 0] = 6
    order = torch.randperm(vocab, generator=random)
    place = torch.empty_like(order)
    place[order] = torch.arange(vocab)
    likely = torch.randint(0, 16, (ROWS,), generator=random)
    return logits[:, order].bfloat16().float(), place[likely]


def row(
    name: str, compute: LogSoftmax, orders: tuple[SumOrder, ...], device: str, vocab: int
) -> str:
    square = unit = torch.zeros(0, dtype=torch.float64, device=device)
    losses = []
    for unseen in UNSEEN:
        logits, target = (x.to(device) for x in drawn(vocab, unseen))
        exact = formulas.log_prob(logits.double(), target, 1.0)[:, 0]
        chosen = logits.double().gather(1, target[:, None])[:, 0]
        wide = logits.double()
        lost = lost_share((wide - wide.amax(dim=1, keepdim=True)).exp(), orders)[:, 0]
        rounded = (rounding_variance(x, "float32") for x in (exact, chosen, chosen - exact))
        unit = torch.cat([unit, sum(rounded) + (SUM_ULPS * FLOAT32_UNIT) ** 2 + lost])
        square = torch.cat([square, (compute(logits, target).double() - exact).square()])
        losses.append(float(lost.max().sqrt() / FLOAT32_UNIT))
    rms = float((square.sum() / unit.sum()).sqrt())
    worst = float((square / unit).max().sqrt())
    error = float(square.mean().sqrt() / FLOAT32_UNIT)
    return f"| {name} | {vocab:,} | {error:.1f} | {max(losses):.0f} | {rms:.2f} | {worst:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    capability = torch.backends.cpu.get_cpu_capability()
    orders = sum_orders({"device_type": options.device, "capability": capability})
    where = torch.cuda.get_device_name() if options.device == "cuda" else capability
    print(f"torch {torch.__version__}, {where}; {ROWS} rows for each of {UNSEEN}")
    print("| log-softmax | vocabulary | error rms, 2^-24 | largest loss | rms | worst row |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, compute in known(options.device):
        for vocab in VOCABULARIES:
            print(row(name, compute, orders, options.device, vocab), flush=True)


if __name__ == "__main__":
    main()
