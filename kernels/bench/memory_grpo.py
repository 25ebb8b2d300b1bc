"""Memory and time of a policy step's last part, from hidden states to gradients, by the size of a
group: Llama-3-8B's head, 512 tokens an answer.

    PYTHONPATH=.:kernels python kernels/bench/memory_grpo.py [--out memory_grpo.json]

Each implementation is given hidden[G * 512, 4096] and weight[128256, 4096] in bf16 and gives the
gradients of both. MiB are what its peak holds beyond these inputs and gradients. `largest`: the
largest group, a multiple of 8, of which the step fits on the card, up to 512. What is not installed
is listed as such.
"""

import argparse
import importlib.metadata
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import rlk_kernels as rk
import torch
from bench_linear_logp import attempt, held_mib, torch_whole

HIDDEN, VOCABULARY, LENGTH = 4096, 128256, 512
GROUPS, MOST, STEP = (64, 128, 256), 512, 8
CLIP = (0.2, 0.28)
Step = Callable[["Batch"], None]


class Batch:
    """A group's answers: each token has an advantage, and counts."""

    def __init__(self, group: int, weight: torch.Tensor) -> None:
        torch.manual_seed(group)
        t, device = group * LENGTH, "cuda"
        hidden = torch.randn(t, HIDDEN, device=device, dtype=torch.bfloat16)
        self.group, self.weight, self.hidden = group, weight, hidden.requires_grad_()
        self.target = torch.randint(0, VOCABULARY, (t,), device=device)
        self.advantages = torch.randn(group, device=device)
        self.mask = torch.ones(t, device=device)
        self.bounds = torch.arange(0, t + 1, LENGTH, device=device)
        self.gradient_bytes = 2 * (hidden.numel() + weight.numel())

    def backward(self, logp: torch.Tensor) -> None:
        """Of the clipped objective's token mean, on the policy."""
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
    """As its trainer scores: `add_fused_lm_head`, log-probs and entropies."""
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


STEPS: dict[str, Step] = {
    "torch, logits in memory": plain_torch,
    "TRL": trl,
    "Liger": liger,
    "rlk linear_logp, entropy too": scored,
    "rlk linear_grpo_loss": fused,
}


def seconds(step: Step, batch: Batch) -> float:
    """The median of five calls after the first."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step(batch)
    times = []
    for _ in range(5):
        start.record()
        step(batch)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def fits(step: Step, group: int, weight: torch.Tensor) -> bool:
    """Whether a step runs; anything but a lack of memory is raised."""
    try:
        step(Batch(group, weight))
        return True
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return False


def largest(step: Step, weight: torch.Tensor) -> int:
    """By bisection; 0 where not even STEP answers fit."""
    low, high = 0, MOST + STEP
    if fits(step, MOST, weight):
        return MOST
    while high - low > STEP:
        middle = (low + high) // (2 * STEP) * STEP
        low, high = (middle, high) if fits(step, middle, weight) else (low, middle)
    return low


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("memory_grpo.json"))
    options = parser.parse_args()
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5
    weight.requires_grad_()
    names = ("torch", "triton", "trl", "liger-kernel")
    record: dict = {
        "device": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in names},
        "shape": {"hidden": HIDDEN, "vocabulary": VOCABULARY, "length": LENGTH},
        "groups": [],
    }
    for group in GROUPS:
        batch, line = Batch(group, weight), {"group": group, "steps": {}}
        for name, step in STEPS.items():
            held = attempt(held_mib, lambda s=step, b=batch: s(b), batch.gradient_bytes)
            line["steps"][name] = {"MiB": held}
            if isinstance(held, float):
                line["steps"][name]["s"] = attempt(seconds, step, batch)
        record["groups"].append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)
        options.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
        del batch
    record["largest"] = {name: attempt(largest, step, weight) for name, step in STEPS.items()}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record["largest"]), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
