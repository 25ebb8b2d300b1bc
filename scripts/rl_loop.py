"""A small RL loop on the embedded model: vLLM samples, and HF transformers trains.

The trainer keeps fp32 master weights and computes in bf16, as mixed-precision training does; vLLM
computes in bf16. The reward is `check` of `fixtures/corpus.py`, and the loss is REINFORCE with the
group's mean as the baseline. Both sides' log-probs become lines of the neutral file.
"""

import json
import os
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
}

import torch
from torch.nn import Linear, Module, Parameter
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from rlk_align.data import data_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
from corpus import Problem, check, sample_problem

GROUP = 8
NEW_TOKENS = 64
CACHE_BLOCK = 32
MODEL = str(data_path("model"))


@dataclass(frozen=True, kw_only=True)
class Task:
    """A prompt, and the problem at its end."""

    name: str
    problem: Problem
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response with the rollout's values."""

    task: Task
    response: list[int]
    logprobs: list[float]
    cached_tokens: int
    reward: float

    @property
    def token_ids(self) -> list[int]:
        return self.task.token_ids + self.response


class Tasks:
    """Prompts of two solved problems and an open one: long enough to fill blocks of the cache."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = 0
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def take(self, count: int) -> list[Task]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Task:
        first, second, problem = (sample_problem(self._random) for _ in range(3))
        text = "\n".join(
            [first.prompt + first.solution, second.prompt + second.solution, problem.prompt]
        )
        self._number += 1
        ids = self.tokenizer.encode(text)
        return Task(name=f"prompt-{self._number}", problem=problem, token_ids=ids)


class Rollout:
    """vLLM, unchanged."""

    def __init__(self, tasks: Tasks, logprobs: str = "processed") -> None:
        self.tokenizer = tasks.tokenizer
        self.llm = LLM(
            model=MODEL,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=1024,
            enable_prefix_caching=True,
            block_size=CACHE_BLOCK,
            disable_log_stats=True,
            logprobs_mode=f"{logprobs}_logprobs",
        )

    def sample(
        self, tasks: list[Task], seed: int, temperature: float = 1.0, top_p: float = 1.0
    ) -> list[Sample]:
        """Returns GROUP samples of each task."""
        # vLLM's sampler on the CPU draws from torch's global generator.
        torch.manual_seed(seed)
        params = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            max_tokens=NEW_TOKENS,
            logprobs=0,
            detokenize=False,
        )
        asked = [task for task in tasks for _ in range(GROUP)]
        prompts: Any = [{"prompt_token_ids": task.token_ids} for task in asked]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [self._sample(task, out) for task, out in zip(asked, outputs, strict=True)]

    def _sample(self, task: Task, output: Any) -> Sample:
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        logprobs = [d[i].logprob for d, i in zip(completion.logprobs, ids, strict=True)]
        return Sample(
            task=task,
            response=ids,
            logprobs=logprobs,
            cached_tokens=output.num_cached_tokens,
            reward=float(check(task.problem, self.tokenizer.decode(ids))),
        )

    def sync(self, trainer: "Trainer", reset_cache: bool = True) -> None:
        """Loads the trainer's weights in place."""
        weights = [(name, w.detach().bfloat16()) for name, w in trainer.weights()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if reset_cache and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")


class LoRA(Module):
    """A frozen linear layer with an adapter beside it: W x + B A x."""

    def __init__(self, base: Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.a = Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Trainer:
    """HF transformers: scores in evaluation mode, and takes policy-gradient steps."""

    def __init__(self, rate: float, lora: bool = False) -> None:
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        if lora:
            self.model.requires_grad_(False)
            for layer in self.model.model.layers:
                for block in (layer.self_attn, layer.mlp):
                    for name, child in [*block.named_children()]:
                        if isinstance(child, Linear):
                            setattr(block, name, LoRA(child))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.state_dict().items()

    def score(self, samples: list[Sample], temperature: float = 1.0) -> list[list[float]]:
        """Returns the log-probs of all tokens but the first of each sample."""
        with torch.no_grad():
            logp_BT = self._logprobs(samples, temperature)
        return [
            row[: len(s.token_ids) - 1].tolist() for row, s in zip(logp_BT, samples, strict=True)
        ]

    def step(self, samples: list[Sample]) -> None:
        """Takes one optimizer step."""
        rewards = torch.tensor([s.reward for s in samples]).view(-1, GROUP)
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        logp_BT = self._logprobs(samples, 1.0)
        mask_BT = torch.zeros_like(logp_BT)
        for row, s in zip(mask_BT, samples, strict=True):
            row[len(s.task.token_ids) - 1 : len(s.token_ids) - 1] = 1
        loss = -(advantages[:, None] * logp_BT * mask_BT).sum() / mask_BT.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _logprobs(self, samples: list[Sample], temperature: float) -> torch.Tensor:
        """[B, T − 1]; index t belongs to token t + 1. Rows are padded on the right."""
        rows = [torch.tensor(s.token_ids) for s in samples]
        ids_BT = pad_sequence(rows, batch_first=True)
        mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        with torch.autocast("cpu", torch.bfloat16):
            logits_BTV = self.model(ids_BT, attention_mask=mask_BT).logits[:, :-1]
        logits_BTV = logits_BTV.float() / temperature
        return logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).squeeze(-1)


def records(
    step: int, samples: list[Sample], scores: list[list[float]]
) -> Iterator[dict[str, Any]]:
    """Yields the samples of a step as records of the neutral file."""
    for number, (sample, score) in enumerate(zip(samples, scores, strict=True)):
        prompt = len(sample.task.token_ids)
        yield {
            "schema": "rlk-align/logprobs/1",
            "id": f"{step}-{number}",
            "group": sample.task.name,
            "step": step,
            "token_ids": sample.token_ids,
            "prompt_length": prompt,
            "rollout_logprobs": [None] * prompt + sample.logprobs,
            "train_logprobs": [None, *score],
            "cached_tokens": sample.cached_tokens,
            "reward": sample.reward,
            "dtype": {"rollout": "bfloat16", "train": "bfloat16"},
        }


def text_of(records: Iterable[dict[str, Any]]) -> str:
    """Records as the text of a neutral file."""
    return "".join(json.dumps(record) + "\n" for record in records)
