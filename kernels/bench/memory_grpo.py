"""Measures memory and time of the last part of a policy step, from hidden states to gradients, by
the size of a group. The head is Llama-3-8B's, and an answer has 512 tokens.

    PYTHONPATH=.:kernels python kernels/bench/memory_grpo.py [--out memory_grpo.json] [--limit 80]
                                                             [--groups 64,128,256]

Each implementation takes hidden[G * 512, 4096] and weight[128256, 4096] in bf16 and returns the
gradients of both. MiB are the peak beyond these inputs and gradients. The largest group that fits
follows from the measured peaks, which grow by the same number of bytes with every answer; if it is
at most 512, a step of that size confirms it. Packages that are not installed are listed. The
kernels are compiled first, and the compilation is timed separately. Each case is printed when it is
measured. A case ends after 30 s, and the whole run --limit seconds after the compilation.
"""

import argparse
import importlib.metadata
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import rlk_kernels as rk
import torch
from bench_linear_logp import attempt, torch_whole

HIDDEN, VOCABULARY, LENGTH = 4096, 128256, 512
GROUPS, MOST, STEP = (64, 128, 256), 512, 8
DEVICE, MIB = "cuda", 1 << 20
CASE_SECONDS = 30
"""The time limit of one case."""
CLIP = (0.2, 0.28)
Step = Callable[["Batch"], None]


class Batch:
    """A group's answers, whose tokens all count in the loss."""

    def __init__(self, group: int, weight: torch.Tensor) -> None:
        torch.manual_seed(group)
        t, device = group * LENGTH, DEVICE
        hidden = torch.randn(t, HIDDEN, device=device, dtype=torch.bfloat16)
        self.group, self.weight, self.hidden = group, weight, hidden.requires_grad_()
        self.target = torch.randint(0, VOCABULARY, (t,), device=device)
        self.advantages = torch.randn(group, device=device)
        self.mask = torch.ones(t, device=device)
        self.bounds = torch.arange(0, t + 1, LENGTH, device=device)
        self.gradient_bytes = 2 * (hidden.numel() + weight.numel())

    def backward(self, logp: torch.Tensor) -> None:
        """Differentiates the token mean of the clipped objective, on-policy."""
        ratio, a = (logp - logp.detach()).exp(), self.advantages.repeat_interleave(LENGTH)
        gain = torch.minimum(ratio * a, ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * a)
        self.differentiate(-gain.mean())

    def differentiate(self, loss: torch.Tensor) -> None:
        torch.autograd.grad(loss, (self.hidden, self.weight))


def plain_torch(b: Batch) -> None:
    b.backward(torch_whole(b.hidden, b.weight, b.target))


def scored(b: Batch) -> None:
    logp, _ = rk.linear_logp(b.hidden, b.weight, b.target, return_entropy=True)
    b.backward(logp)


def fused(b: Batch) -> None:
    loss, _ = rk.linear_grpo_loss(
        b.hidden, b.weight, b.target, None, b.advantages, b.mask, cu_seqlens=b.bounds, clip=CLIP,
        loss_type="dapo",
    )  # fmt: skip
    b.differentiate(loss)


def trl(b: Batch) -> None:
    """Log-probs and entropies as TRL's trainer computes them (`add_fused_lm_head`)."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

    logp, *_ = ChunkedLogProbFunction.apply(
        b.hidden, b.weight, None, b.target, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
        ("log_probs", "entropy"),
    )  # fmt: skip
    b.backward(logp)


def liger(b: Batch) -> None:
    """Liger's own fused loss, in chunks of a sequence."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=CLIP[0], epsilon_high=CLIP[1], compiled=False, use_ref_model=False,
        loss_type="dapo",
    )  # fmt: skip
    shape = (b.group, LENGTH)
    value = loss(
        b.hidden.view(*shape, HIDDEN), b.weight, b.target.view(shape), b.mask.view(shape),
        b.advantages,
    )[0]  # fmt: skip
    b.differentiate(value)


OURS: dict[str, Step] = {"rlk linear_logp, entropy too": scored, "rlk linear_grpo_loss": fused}
STEPS = OURS | {"torch, logits in memory": plain_torch, "TRL": trl, "Liger": liger}


class TookTooLong(Exception):
    """A case exceeded its time limit."""


def measure(step: Step, batch: Batch) -> dict[str, float]:
    """MiB beyond inputs and gradients, and the bytes of the peak, of one call; and the seconds of
    the next one, which allocates no new memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(batch)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    start = time.perf_counter()
    step(batch)
    torch.cuda.synchronize()
    held = (peak - before - batch.gradient_bytes) / MIB
    return {"MiB": held, "peak_bytes": peak, "s": time.perf_counter() - start}


def predicted(cases: dict[int, dict], capacity: int) -> int:
    """The largest group, a multiple of STEP, whose peak stays within `capacity` bytes. The peak is
    extrapolated on a line through the two largest groups that were measured, or, if only one was,
    through that group and the weight with its gradient, the memory of an empty group. Raises
    ValueError where no group was measured."""
    points = sorted((g, case["peak_bytes"]) for g, case in cases.items() if "peak_bytes" in case)
    if not points:
        raise ValueError("no group was measured")
    weights = 2 * 2 * VOCABULARY * HIDDEN
    (g0, p0), (g1, p1) = points[-2:] if len(points) > 1 else [(0, weights), points[0]]
    each = max((p1 - p0) / (g1 - g0), 1.0)
    return max(int((capacity - p1) / each + g1) // STEP * STEP, 0)


def largest(step: Step, cases: dict[int, dict], weight: torch.Tensor) -> dict[str, int]:
    """The predicted group, and the largest one that ran: the predicted group, reduced by STEP as
    long as it does not fit. Above MOST, the largest group that was measured counts as run."""
    capacity = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    fits = predicted(cases, capacity)
    if fits > MOST:
        return {"predicted": fits, "ran": max(g for g, c in cases.items() if "MiB" in c)}
    group = fits
    while group > 0:
        try:
            step(Batch(group, weight))
            torch.cuda.synchronize()
            break
        except torch.cuda.OutOfMemoryError:
            group -= STEP
        finally:
            torch.cuda.empty_cache()
    return {"predicted": fits, "ran": group}


def limited(seconds: float, call: Callable, *arguments):
    """The call's value, or a line that says why the call returned none within `seconds`."""
    if seconds <= 0:
        return "not run: no time was left"
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return attempt(call, *arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def alarm(*_) -> None:
    raise TookTooLong("the time limit came first")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def table(record: dict) -> str:
    """MiB and seconds by implementation and group, and the largest group."""

    def cell(case: dict) -> str:
        return f"{case['MiB']:,.0f}, {case['s']:.2f} s" if "MiB" in case else case["failed"]

    groups = list(next(iter(record["steps"].values())))
    lines = ["| MiB held, seconds | " + " | ".join(map(str, groups)) + " | largest |"]
    lines.append("| --- |" + " ---: |" * (len(groups) + 1))
    for name, cases in record["steps"].items():
        most = record["largest"].get(name)
        fits = f"{most['ran']} ran, {most['predicted']} by arithmetic" if most else "–"
        lines.append(f"| {name} | " + " | ".join(map(cell, cases.values())) + f" | {fits} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("memory_grpo.json"))
    parser.add_argument("--limit", type=float, default=80, help="seconds, once all is compiled")
    parser.add_argument("--groups", default=",".join(map(str, GROUPS)), help="answers, with commas")
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, alarm)
    groups = [int(word) for word in options.groups.split(",")]
    weight = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.bfloat16) * HIDDEN**-0.5
    weight.requires_grad_()
    names = ("torch", "triton", "trl", "liger-kernel")
    record: dict = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in names},
        "shape": {"hidden": HIDDEN, "vocabulary": VOCABULARY, "length": LENGTH},
        "compiling_s": {},
        "steps": {name: {} for name in STEPS},
        "largest": {},
    }

    def tell(**line: object) -> None:
        print(json.dumps(line), flush=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    start = time.perf_counter()
    rk.warm_up(DEVICE)
    tell(what="self-check of the tiles", s=round(time.perf_counter() - start, 1))
    batch = Batch(groups[0], weight)
    for name, step in OURS.items():
        start = time.perf_counter()
        step(batch)
        torch.cuda.synchronize()
        record["compiling_s"][name] = round(time.perf_counter() - start, 1)
        tell(what=f"first call of {name}", s=record["compiling_s"][name])
    end = time.monotonic() + options.limit

    def left() -> float:
        return min(CASE_SECONDS, end - time.monotonic())

    for group in groups:
        batch = Batch(group, weight)
        for name, step in STEPS.items():
            found = limited(left(), measure, step, batch)
            case = {"failed": found} if isinstance(found, str) else found
            record["steps"][name][group] = case
            tell(group=group, step=name, **case)
        del batch
    for name, step in STEPS.items():
        found = limited(left(), largest, step, record["steps"][name], weight)
        if isinstance(found, dict):
            record["largest"][name] = found
        tell(step=name, largest=found)
    print(table(record), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
