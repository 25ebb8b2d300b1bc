"""GRPO on problems with a verifiable answer: vLLM and a model of transformers in one process.

    python examples/grpo/train.py --run runs/grpo                   # with the kernels: no drift
    python examples/grpo/train.py --run runs/off --kernels off      # the engines' own kernels
    python examples/grpo/train.py --run runs/grpo --resume          # continues, bit for bit
    python examples/grpo/train.py --run runs/lora --lora 16 --lr 1e-3   # an adapter, of rank 16
    torchrun --nproc-per-node 2 -- examples/grpo/train.py --run runs/grpo   # FSDP2

A step samples groups of answers, scores them, takes one step of AdamW on fp32 master weights, and
syncs the weights into the live vLLM. checks.py has the checks of each step.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import problems
import torch
from adapter import write_adapter
from batch import Answer, Pack, Sample, empty_pack, packs, to_sample
from checks import LoopFault, check_masks, check_weights
from options import arguments
from ranks import Ranks
from record import (
    HELD_OUT,
    LOG_PROBS,
    METRICS,
    append,
    forget_after,
    load,
    mismatch,
    records,
    save,
)  # fmt: skip
from rlk_kernels import group_advantages
from rollout import Rollout
from sampling import sampled_by
from trainer import Trainer

from rlk_align.errors import RlkError
from rlk_align.logs.writers.step_file import write_step

ADAPTER = "adapter"
"""The folder, in that of a rank, of the adapter that vLLM loaded last."""


class Loop:
    """The two engines, the optimiser, and the step that uses them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.step, self.stopped = options, 0, False
        self.device = torch.device(options.device)
        self.gpu = self.device.type == "cuda"
        self.ranks = ranks = Ranks(self.device)
        # Each of several ranks has its own state and metrics.
        self.folder = options.run / f"rank-{ranks.rank}" if ranks.size > 1 else options.run
        self.rollout = Rollout(options, ranks.size)
        self.trainer = Trainer(options, ranks, self.timed)
        self.digests: dict[str, str] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.gpu:
            torch.cuda.synchronize()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    def samples(self, answers: list[Answer]) -> list[Sample]:
        rewards = torch.tensor([answer.reward for answer in answers])
        advantages = group_advantages(rewards, self.options.group).tolist()
        return [to_sample(answer, a) for answer, a in zip(answers, advantages, strict=True)]

    def sync(self) -> None:
        """Loads the trainer's weights, or its adapter, into the live vLLM, then compares the
        digests of every parameter with which the two engines compute."""
        before = self.digests
        with self.timed("sync"):
            if self.options.lora:
                folder = self.folder / ADAPTER
                write_adapter(folder, self.options.lora, self.trainer.weights())
                self.rollout.load_adapter(folder)
            else:
                self.rollout.load(self.trainer.weights())
        with self.timed("digest"):
            self.digests = self.trainer.digests()
            check_weights(self.digests, self.rollout.digests(), before)

    def packs(self, samples: list[Sample]) -> list[Pack]:
        """The samples as packs, the same number on each rank."""
        row = list(packs(samples, self.options.pack_tokens, self.device))
        missing = int(self.ranks.largest(len(row))) - len(row)
        return [*row, *(empty_pack(self.device) for _ in range(missing))]

    # --- a step -----------------------------------------------------------------------------

    def train_step(self) -> dict[str, Any]:
        """Takes one step; returns its line of metrics."""
        o, start = self.options, time.perf_counter()
        self.seconds = {}
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        with self.timed("rollout"):
            asked = problems.training(o.seed, self.step, o.problems, o.held_out, tuple(o.families))
            mine = asked[self.ranks.rank :: self.ranks.size]
            answers = self.rollout.answers(mine, f"step {self.step} rank {self.ranks.rank}")
            self.rollout.sleep()
        with self.timed("batch"):
            samples = self.samples(answers)
            check_masks(answers, samples)
            row = self.packs(samples)
        scored, norm = self.trainer.update(row)
        for _ in range(o.updates - 1):
            self.trainer.update(row)
        with self.timed("wake"):
            self.rollout.wake("weights")
        self.sync()
        with self.timed("wake"):
            self.rollout.wake("kv_cache")
        with self.timed("write"):
            lines = records(answers, samples, row, scored, self.step, partial(sampled_by, o))
            which = {"rank": self.ranks.rank, "ranks": self.ranks.size}
            write_step(o.run / LOG_PROBS, self.step, lines, **which)
        with self.timed("compare"):
            clipped = self.trainer.clip_fraction(row, scored)
            drift, on = mismatch(row, scored), torch.cat([pack.mask for pack in row])
            entropies = [entropies for _, entropies in scored if entropies is not None]
            entropy = float(torch.cat(entropies)[on].double().mean()) if entropies else None
        line = {
            "step": self.step,
            "kernels": o.kernels,
            "reward": sum(answer.reward for answer in answers) / len(answers),
            "cut": sum(answer.cut for answer in answers) / len(answers),
            "length": sum(len(a.ids) - a.prompt_length for a in answers) / len(answers),
            "entropy": entropy,
            "gradient_norm": norm,
            "counted_tokens": int(on.sum()),
            "mismatch": drift,
            "clip_fraction": clipped,
            "digests_equal": len(self.digests),
            "seconds": self.seconds | {"step": time.perf_counter() - start},
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.gpu else None,
            "reserved_memory_bytes": torch.cuda.memory_reserved() if self.gpu else None,
        }
        self.step += 1
        return line

    def hold_out(self) -> None:
        """Writes the reward of greedy answers to the held-out problems, with the weights after
        `self.step` steps."""
        asked = list(problems.held_out(self.options.held_out, tuple(self.options.families)))
        answers = self.rollout.answers(asked, "", greedy=True)
        reward = sum(answer.reward for answer in answers) / len(asked)
        solved = sum(answer.reward == 1.0 for answer in answers) / len(asked)
        line = {"step": self.step, "reward": reward, "solved": solved, "problems": len(asked)}
        append(self.folder / HELD_OUT, line)
        print(f"after step {self.step}: held-out reward {reward:.3f}", flush=True)

    def save(self) -> None:
        state = self.trainer.masters, self.trainer.optimizer
        # No rank's state is replaced before the new states of all ranks are complete.
        save(self.folder, self.step, self.settings(), *state, wait=lambda: self.ranks.largest(0))

    def load(self) -> None:
        trainer = self.trainer
        self.step = load(self.folder, self.settings(), trainer.masters, trainer.optimizer)
        first, last = -self.ranks.largest(-self.step), self.ranks.largest(self.step)
        if first != last:
            raise ValueError(
                f"in {self.options.run} one rank's state is of step {last:.0f}, and another's of "
                f"step {first:.0f}; begin another run"
            )
        trainer.round_masters()

    # --- a run ------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """The options that decide a run's bits."""
        free = {"run", "steps", "resume", "rollout_batch", "eval_every", "save_every"}
        free |= {"cache_gib", "sleep", "graphs"}
        chosen = vars(self.options) | {"ranks": self.ranks.size}
        return {k: str(v) for k, v in chosen.items() if k not in free}

    def run(self) -> int:
        """Runs all steps; returns the exit code."""
        o = self.options
        self.folder.mkdir(parents=True, exist_ok=True)
        if o.resume:
            self.load()
        begun = self.step
        forget_after(self.folder, o.run / LOG_PROBS, begun)
        if self.gpu:
            with self.timed("prepare"):
                self.trainer.prepare()
            print(f"prepared in {self.seconds['prepare']:.1f} s", flush=True)
        self.sync()
        total, differing, stops = 0, 0, False
        while self.step < o.steps and not stops:
            if o.eval_every and self.step % o.eval_every == 0:
                self.hold_out()
            line = self.train_step()
            append(self.folder / METRICS, line)
            drift, done = line["mismatch"], self.step == o.steps
            total, differing = total + drift["tokens"], differing + drift["other_bits"]
            print(
                f"step {line['step']}: reward {line['reward']:.3f}, mismatch "
                f"{drift['other_bits']} of {drift['tokens']} tokens, max {drift['max']:.2g}",
                flush=True,
            )
            # If one rank is to stop, all ranks stop.
            stops = bool(self.ranks.largest(self.stopped))
            if o.save_every and (self.step % o.save_every == 0 or done or stops):
                self.save()
        if o.eval_every and self.step == o.steps:
            self.hold_out()
        if self.step == begun:
            print(f"no step was taken: {begun} are done, and --steps is {o.steps}")
            return 0
        every = " in every step" if differing == 0 else ""
        print(f"mismatch {differing} of {total} tokens{every}")
        if stops:
            print(f"stopped after step {self.step}" + ", and saved" * bool(o.save_every))
            return 130
        return int(o.kernels == "rlk" and (differing > 0 or total == 0))


def main() -> int:
    options = arguments(about=__doc__)
    try:
        loop = Loop(options)
        # Ctrl-C lets the present step end, so that the saved state is complete.
        signal.signal(signal.SIGINT, lambda *_: setattr(loop, "stopped", True))
        return loop.run()
    except (LoopFault, RlkError, ValueError, OSError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before the first step; nothing was saved")
        return 130


if __name__ == "__main__":
    sys.exit(main())
