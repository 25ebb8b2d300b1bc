"""GRPO on problems with a verifiable answer: vLLM and a model of transformers in one process.

    python examples/grpo/train.py --run runs/grpo                   # with the kernels: no drift
    python examples/grpo/train.py --run runs/off --kernels off      # as the engines are
    python examples/grpo/train.py --run runs/grpo --resume          # goes on, bit for bit

A step: sample groups of answers, score them, take one step of AdamW on fp32 master weights, sync
the weights into the live vLLM. What must hold in each step is in checks.py.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import problems
import torch
from batch import Answer, Pack, Sample, packs, to_sample
from checks import LoopFault, check_masks, check_weights
from record import HELD_OUT, METRICS, append, forget_after, load, mismatch, records, save
from rlk_kernels import group_advantages
from rlk_kernels.integrations import hf
from rollout import Rollout
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlk_align.data import data_path
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.places import hf_places
from rlk_align.trace.digest import digest_parameters
from rlk_align.writers.step_file import write_step


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("--run", type=Path, required=True, help="folder of the run")
    a.add_argument("--model", type=Path, default=data_path("model"))
    a.add_argument("--kernels", choices=["rlk", "off"], default="rlk")
    a.add_argument("--steps", type=int, default=3, help="how many there are in the end")
    a.add_argument("--problems", type=int, default=8, help="of a step")
    a.add_argument("--group", type=int, default=8, help="answers to a problem")
    a.add_argument("--turns", type=int, default=2, help="tries; a checker speaks between them")
    a.add_argument("--max-tokens", type=int, default=48, help="of a try")
    a.add_argument("--rollout-batch", type=int, help="answers sampled at a time; changes no bit")
    a.add_argument("--pack-tokens", type=int, default=4096, help="tokens of a forward, at most")
    a.add_argument("--updates", type=int, default=1, help="of a rollout")
    a.add_argument("--lr", type=float, default=1e-5)
    a.add_argument("--clip", type=float, nargs=2, default=(0.2, 0.28), metavar=("LOW", "HIGH"))
    a.add_argument("--held-out", type=int, default=32, help="problems that measure the reward")
    a.add_argument("--eval-every", type=int, default=0, help="steps; 0 for never")
    a.add_argument("--save-every", type=int, default=1, help="steps; 0 for never")
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    a.add_argument("--cache-gib", type=float, default=8, help="of keys and values, on a GPU")
    a.add_argument(
        "--sleep", action=argparse.BooleanOptionalAction, default=True,
        help="vLLM's memory is the trainer's in an update, on a GPU",
    )  # fmt: skip
    a.add_argument(
        "--master-dtype", choices=["float32", "bfloat16"], default="float32",
        help="of the weights that AdamW updates, and of its moments",
    )  # fmt: skip
    a.add_argument("--kv-cache", choices=["auto", "fp8"], default="auto", help="of the control")
    a.add_argument("--resume", action="store_true")
    options = a.parse_args(words)
    if options.kernels == "rlk" and options.kv_cache != "auto":
        a.error(f"--kv-cache {options.kv_cache}: the kernels keep keys and values as they are")
    return options


class Loop:
    """The two engines, the optimiser, and what one step does with them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.step, self.stopped = options, 0, False
        self.device = torch.device(options.device)
        self.gpu = self.device.type == "cuda"
        self.rollout = Rollout(options)
        self.model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        self.model.to(self.device).train()
        if options.kernels == "rlk":
            self.kernels = hf.use_kernels(self.model)
        self.parameters = dict(self.model.named_parameters())
        dtype = getattr(torch, options.master_dtype)
        self.masters = {n: p.detach().to(dtype, copy=True) for n, p in self.parameters.items()}
        adam = {"lr": options.lr, "weight_decay": 0.0, "fused": self.gpu}
        self.optimizer = torch.optim.AdamW(self.masters.values(), **adam)
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

    # --- training ---------------------------------------------------------------------------

    def score(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies) float32 [T] of a pack; 0 at each sequence's first token."""
        if self.options.kernels == "rlk":
            rows = hf.score_tokens(
                self.model, pack.ids, position_ids=pack.positions, return_entropy=True
            )
        else:
            call = {"position_ids": pack.positions, "use_cache": False}
            logs = torch.log_softmax(self.model(pack.ids, **call).logits[:, :-1].float(), -1)
            found = logs.gather(-1, pack.ids[:, 1:, None])[..., 0]
            first = pack.positions[:, 1:] == 0
            with torch.no_grad():
                entropies = -logs.exp().mul_(logs).sum(-1)
            rows = (found.masked_fill(first, 0.0), entropies)
        logprobs, entropies = (torch.nn.functional.pad(x[0], (1, 0)) for x in rows)
        return logprobs, entropies

    def update(self, row: list[Pack]) -> tuple[list[tuple[Tensor, Tensor]], float]:
        """One step of AdamW on all packs: (their log-probs and entropies before it, the gradient's
        norm)."""
        low, high = self.options.clip
        count = sum(pack.mask.sum() for pack in row).clamp(min=1)
        scored = []
        self.optimizer.zero_grad()
        for pack in row:
            with self.timed("score"):
                logprobs, entropies = self.score(pack)
                scored.append((logprobs.detach(), entropies.detach()))
            with self.timed("update"):
                ratio = (logprobs - pack.rollout_logprobs).exp()
                clipped = ratio.clamp(1 - low, 1 + high)
                gain = torch.minimum(ratio * pack.advantages, clipped * pack.advantages)
                (-(gain * pack.mask).sum() / count).backward()
                self._collect_gradients()
        with self.timed("update"):
            norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0).item()
            self.optimizer.step()
            self._round_masters()
        return scored, norm

    def _collect_gradients(self) -> None:
        """Packs' bf16 gradients, added up in the masters' dtype."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            wide = parameter.grad.to(master.dtype)
            master.grad = wide if master.grad is None else master.grad + wide
            parameter.grad = None

    @torch.no_grad()
    def _round_masters(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    def sync(self) -> None:
        """The trainer's weights into the live vLLM; then every parameter of both, as each of them
        computes with it, is held against the other."""
        before = self.digests
        with self.timed("sync"):
            self.rollout.load(self.changed_weights())
        with self.timed("digest"), torch.inference_mode():
            live = unfused(self.model, hf_places(self.model))
            self.digests = digest_parameters(live)
            check_weights(self.digests, self.rollout.digests(), before)

    def changed_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, parameter.detach()

    # --- a step -----------------------------------------------------------------------------

    def train_step(self) -> dict[str, Any]:
        """Takes one step; returns its line of metrics."""
        o, start = self.options, time.perf_counter()
        self.seconds = {}
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        with self.timed("rollout"):
            asked = problems.training(o.seed, self.step, o.problems, o.held_out)
            answers = self.rollout.answers(asked, f"step {self.step}")
            self.rollout.sleep()
        samples = self.samples(answers)
        check_masks(answers, samples)
        row = list(packs(samples, o.pack_tokens, self.device))
        scored, norm = self.update(row)
        for _ in range(o.updates - 1):
            self.update(row)
        with self.timed("wake"):
            self.rollout.wake("weights")
        self.sync()
        with self.timed("wake"):
            self.rollout.wake("kv_cache")
        with self.timed("write"):
            lines = records(answers, samples, row, scored, self.step)
            write_step(o.run / "log-probs", self.step, lines)
        drift, on = mismatch(row, scored), torch.cat([pack.mask for pack in row])
        entropies = torch.cat([entropies for _, entropies in scored])[on]
        line = {
            "step": self.step,
            "kernels": o.kernels,
            "reward": sum(answer.reward for answer in answers) / len(answers),
            "cut": sum(answer.cut for answer in answers) / len(answers),
            "length": sum(len(a.ids) - a.prompt_length for a in answers) / len(answers),
            "entropy": float(entropies.double().mean()),
            "gradient_norm": norm,
            "counted_tokens": int(on.sum()),
            "mismatch": drift,
            "digests_equal": len(self.digests),
            "seconds": self.seconds | {"step": time.perf_counter() - start},
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.gpu else None,
        }
        self.step += 1
        return line

    def hold_out(self) -> None:
        """Writes the reward on the held-out problems, greedily answered, with the weights as they
        are after `self.step` steps."""
        asked = list(problems.held_out(self.options.held_out))
        answers = self.rollout.answers(asked, "", greedy=True)
        reward = sum(answer.reward for answer in answers) / len(asked)
        solved = sum(answer.reward == 1.0 for answer in answers) / len(asked)
        line = {"step": self.step, "reward": reward, "solved": solved, "problems": len(asked)}
        append(self.options.run / HELD_OUT, line)
        print(f"after step {self.step}: held-out reward {reward:.3f}", flush=True)

    # --- a run ------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """What decides a run's bits."""
        free = {"run", "steps", "resume", "rollout_batch", "eval_every", "save_every"}
        free |= {"cache_gib", "sleep"}
        return {k: str(v) for k, v in vars(self.options).items() if k not in free}

    def run(self) -> int:
        """All steps; returns the exit code."""
        o = self.options
        o.run.mkdir(parents=True, exist_ok=True)
        if o.resume:
            self.step = load(o.run, self.settings(), self.masters, self.optimizer)
            self._round_masters()
        forget_after(o.run, self.step)
        self.sync()
        total = differing = 0
        while self.step < o.steps and not self.stopped:
            if o.eval_every and self.step % o.eval_every == 0:
                self.hold_out()
            line = self.train_step()
            append(o.run / METRICS, line)
            drift, done = line["mismatch"], self.step == o.steps
            total, differing = total + drift["tokens"], differing + drift["other_bits"]
            print(
                f"step {line['step']}: reward {line['reward']:.3f}, mismatch "
                f"{drift['other_bits']} of {drift['tokens']} tokens, max {drift['max']:.2g}",
                flush=True,
            )
            if o.save_every and (self.step % o.save_every == 0 or done or self.stopped):
                save(o.run, self.step, self.settings(), self.masters, self.optimizer)
        if o.eval_every and self.step == o.steps:
            self.hold_out()
        every = " in every step" if differing == 0 else ""
        print(f"mismatch {differing} of {total} tokens{every}")
        if self.stopped:
            print(f"stopped after step {self.step}" + ", and saved" * bool(o.save_every))
            return 130
        return int(o.kernels == "rlk" and (differing > 0 or total == 0))


def main() -> int:
    options = arguments()
    try:
        loop = Loop(options)
        # A step that has begun is finished, so that what is saved is whole.
        signal.signal(signal.SIGINT, lambda *_: setattr(loop, "stopped", True))
        return loop.run()
    except (LoopFault, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped before the first step: nothing was to save")
        return 130


if __name__ == "__main__":
    sys.exit(main())
