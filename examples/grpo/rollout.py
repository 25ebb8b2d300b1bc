"""The rollout engine: vLLM in this process. It samples answers, sleeps while the trainer needs its
memory, and loads the trainer's weights."""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import problems
import torch
from adapter import digests_of, for_vllm
from batch import Answer, Span
from rlk_kernels.integrations import vllm as vllm_kernels
from sampling import draws_by_kernels, limits, logprobs_mode
from torch import Tensor
from transformers import AutoTokenizer

from rlk_align.engines.vllm.lora import live_adapter
from rlk_align.engines.vllm.parallel import tensor_parallel
from rlk_align.engines.vllm.registered import register_without_torchvision
from rlk_align.engines.vllm.weights import vllm_weights
from rlk_align.model.shape import read_shape
from rlk_align.trace.digest import digest_parameters

MOST_AT_ONCE = 512
"""The most answers that vLLM samples at a time on a GPU; each number up to it has a CUDA graph."""


class Rollout:
    """`options` are those of train.py."""

    def __init__(self, options: argparse.Namespace, ranks: int = 1) -> None:
        from vllm import LLM

        self.options, self.gpu = options, options.device.startswith("cuda")
        self.tokenizer = AutoTokenizer.from_pretrained(options.model)
        # A line break ends an answer.
        size = len(self.tokenizer)
        ends = [i for i in range(size) if "\n" in self.tokenizer.decode([i])]
        self.stop_ids = sorted({*ends, self.tokenizer.eos_token_id} - {None})
        if options.kernels == "rlk":
            vllm_kernels.register(sampler=draws_by_kernels(options))
        at_once = min(options.rollout_batch or options.problems * options.group, MOST_AT_ONCE)
        on_gpu = {
            # Other processes share the GPU, so vLLM's memory is its cache and its weights alone.
            "kv_cache_dtype": options.kv_cache,
            "kv_cache_memory_bytes": int(options.cache_gib * 2**30), "gpu_memory_utilization": 0.01,
            "enable_sleep_mode": options.sleep, "max_num_seqs": at_once,
            "max_num_batched_tokens": 4096, "max_cudagraph_capture_size": at_once,
        }  # fmt: skip
        # On a CPU, vLLM cannot combine chunked prefill with a seed for each request, and without
        # chunks it caches no prefixes of models with gated delta nets.
        on_cpu = {"enable_chunked_prefill": False, "enforce_eager": True}
        hybrid = bool(read_shape(options.model).delta_layers)
        if hybrid:
            register_without_torchvision()
        self.llm = LLM(
            str(options.model), dtype="bfloat16", max_model_len=1024, seed=options.seed,
            enable_prefix_caching=self.gpu or not hybrid, disable_log_stats=True,
            logprobs_mode=logprobs_mode(options),
            **(on_gpu if self.gpu else on_cpu),
            **(for_vllm(options.lora) if options.lora else {}),
            # In torchrun, each rank has an engine of its own.
            distributed_executor_backend="external_launcher" if ranks > 1 else None,
        )  # fmt: skip
        # The live parameters. On a GPU they are those of the start, because CUDA graphs read that
        # memory, whatever the model gets later. On a CPU each update creates new ones.
        self.live: list[tuple[str, Tensor]] | None = None
        # What names the adapter in requests, with --lora.
        self.adapter: Any = None

    def answers(
        self, asked: Sequence[problems.Problem], name: str, greedy: bool = False
    ) -> list[Answer]:
        """The answers of each problem's group; greedy, one answer each, in one try. A request's
        seed follows from `name` and its number, so that no token depends on its batch."""
        answers = []
        for number, problem in enumerate(asked):
            ids = self.tokenizer(problem.prompt)["input_ids"]
            for _ in range(1 if greedy else self.options.group):
                answers.append(Answer(problem, number, list(ids), len(ids)))
        unfinished = list(enumerate(answers))
        for turn in range(1 if greedy else self.options.turns):
            size = self.options.rollout_batch or max(len(unfinished), 1)
            for first in range(0, len(unfinished), size):
                self._sample(unfinished[first : first + size], f"{name} {turn}", greedy)
            unfinished = [x for x in unfinished if self._goes_on(x[1], turn)]
        for answer in answers:
            answer.reward = problems.reward(answer.problem, answer.tries)
        return answers

    def _sample(self, some: list[tuple[int, Answer]], name: str, greedy: bool) -> None:
        from vllm import SamplingParams

        settings = {"temperature": self.options.temperature, **limits(self.options)}
        params = [
            SamplingParams(
                **({"temperature": 0.0} if greedy else settings), logprobs=0,
                seed=random.Random(f"{self.options.seed} {name} {number}").getrandbits(31),
                max_tokens=self.options.max_tokens, stop_token_ids=self.stop_ids, detokenize=False,
            )
            for number, _ in some
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": answer.ids} for _, answer in some]
        outputs = self.llm.generate(prompts, params, lora_request=self.adapter, use_tqdm=False)
        for (_, answer), output, asked in zip(some, outputs, params, strict=True):
            sampled = output.outputs[0]
            ids = list(sampled.token_ids)
            logprobs = [step[i].logprob for step, i in zip(sampled.logprobs, ids, strict=True)]
            cut = sampled.finish_reason == "length"
            answer.spans.append(Span(len(answer.ids), tuple(logprobs), cut, asked.seed))
            answer.tries.append(self.tokenizer.decode(ids, skip_special_tokens=True))
            answer.ids = answer.ids + ids

    def _goes_on(self, answer: Answer, turn: int) -> bool:
        """Whether there is another try; if so, appends the checker's reply to the answer."""
        words = problems.observation(answer.problem, answer.tries[-1])
        if words is None or answer.cut or turn + 1 == self.options.turns:
            return False
        answer.ids = answer.ids + self.tokenizer(words)["input_ids"]
        return True

    def sleep(self) -> None:
        """On a GPU, moves the weights to the host's memory and frees the cache of keys and
        values."""
        if self.gpu and self.options.sleep:
            self.llm.sleep(level=1)

    def wake(self, part: str) -> None:
        """Restores a part: `weights` or `kv_cache`."""
        if self.gpu and self.options.sleep:
            self.llm.wake_up(tags=[part])

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads weights, by their names in the checkpoint, through vLLM's own update path, and
        clears the prefix cache."""
        if self.gpu:
            self.llm.apply_model(lambda model: model.load_weights(weights))
        else:  # on a CPU vLLM packs its weights
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self.llm.reset_prefix_cache()

    def load_adapter(self, folder: Path) -> None:
        """Replaces the adapter by the one in a folder, and clears the prefix cache."""
        from vllm.lora.request import LoRARequest

        engine, number = self.llm.llm_engine, 1
        if self.adapter is not None:
            number = self.adapter.lora_int_id + 1
            engine.remove_lora(self.adapter.lora_int_id)
        # vLLM reads an adapter once: another one needs another number.
        self.adapter = LoRARequest(f"adapter {number}", number, str(folder.resolve()))
        engine.add_lora(self.adapter)
        self.llm.reset_prefix_cache()

    def digests(self) -> dict[str, str]:
        """Canonical name -> digest of each parameter that the live engine computes with, and of
        each factor of its adapter."""
        if self.adapter is None:
            return self._weights()
        shape, folder = read_shape(self.options.model), self.adapter.path

        def of_adapter(model: torch.nn.Module) -> dict[str, str]:
            # vLLM has one slot for adapters here.
            return digests_of(live_adapter(model, shape, 0, folder))

        (factors,) = self.llm.apply_model(of_adapter)
        return self._weights() | factors

    def _weights(self) -> dict[str, str]:
        if self.live is None or not self.gpu:
            shape = read_shape(self.options.model)

            def of_model(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
                live = vllm_weights(model, shape, tensor_parallel())
                return [(parameter.name, parameter.value) for parameter in live]

            with torch.inference_mode():
                (self.live,) = self.llm.apply_model(of_model)
        return digest_parameters(self.live)
