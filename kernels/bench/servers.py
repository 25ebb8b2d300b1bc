"""vLLM and SGLang for `serving.py`: the public class of each, with its defaults. The engine runs in
a process of its own, and the kernels are its installed plug-in."""

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

CONTEXT = 40960

Answer = list[tuple[float, int]]
"""(log-prob, id) of each token."""


class Server(ABC):
    vocabulary: int

    @abstractmethod
    def answer(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[Answer]:
        """Samples so many tokens after each prompt, whatever they are."""


class VLLM(Server):
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def answer(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature, max_tokens=tokens, logprobs=0, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = (o.outputs[0] for o in self._llm.generate(asked, params, use_tqdm=False))
        return [
            [(step[t].logprob, t) for t, step in zip(o.token_ids, o.logprobs or (), strict=True)]
            for o in outputs
        ]


class SGLang(Server):
    def __init__(self, engine: Any, vocabulary: int) -> None:
        self._engine, self.vocabulary = engine, vocabulary

    def answer(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[Answer]:
        params = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
        outputs = self._engine.generate(
            input_ids=prompts, sampling_params=params, return_logprob=True
        )
        steps = (output["meta_info"]["output_token_logprobs"] for output in outputs)
        return [[(logprob, token) for logprob, token, *_ in each] for each in steps]


def start_vllm(
    model: Path, engine: str, load_format: str, cache_bytes: int, tp: int, custom_all_reduce: bool
) -> VLLM:
    if engine == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    options: dict[str, Any] = {"attention_backend": "CUSTOM"} if engine == "rlk" else {}
    from vllm import LLM

    return VLLM(
        LLM(
            model=str(model), load_format=load_format, skip_tokenizer_init=True,
            tensor_parallel_size=tp, disable_log_stats=True, max_model_len=CONTEXT,
            gpu_memory_utilization=0.01, kv_cache_memory_bytes=cache_bytes,
            disable_custom_all_reduce=not custom_all_reduce, **options,
        )
    )  # fmt: skip


def start_sglang(
    model: Path, engine: str, load_format: str, cache_bytes: int, tp: int, custom_all_reduce: bool
) -> SGLang:
    if engine == "invariant":
        raise SystemExit("--engine invariant: vLLM alone has this mode")
    config = json.loads((model / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * width
    import sglang

    started = sglang.Engine(
        model_path=str(model), load_format=load_format, skip_tokenizer_init=True,
        dtype="bfloat16", tp_size=tp, context_length=CONTEXT, log_level="error",
        max_total_tokens=cache_bytes * tp // token,
        disable_custom_all_reduce=not custom_all_reduce,
        # The kernels refuse graphs of prefills.
        disable_prefill_cuda_graph=engine == "rlk",
    )  # fmt: skip
    return SGLang(started, int(config["vocab_size"]))


SERVERS = {"vllm": start_vllm, "sglang": start_sglang}
