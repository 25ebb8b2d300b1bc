"""vLLM and SGLang for `serving.py`: the public class of each, with its defaults. The engine runs in
a process of its own, and the kernels are its installed plug-in."""

import json
import os
from abc import ABC, abstractmethod
from itertools import cycle, islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import adapters

CONTEXT = 40960

Answer = list[tuple[float, int]]
"""(log-prob, id) of each token."""


class Server(ABC):
    vocabulary: int

    @abstractmethod
    def answer(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[Answer]:
        """Samples so many tokens after each prompt, whatever they are."""


class VLLM(Server):
    def __init__(self, llm: Any, adapters: list[Path] | None = None) -> None:
        """Each request asks for the next adapter of the list."""
        self._llm, self._adapters = llm, adapters or []
        self.vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def answer(self, prompts: list[list[int]], tokens: int, temperature: float) -> list[Answer]:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=temperature, max_tokens=tokens, logprobs=0, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        asked: Any = [{"prompt_token_ids": ids} for ids in prompts]
        answered = self._llm.generate(
            asked, params, use_tqdm=False, lora_request=self._loras(prompts)
        )
        outputs = (o.outputs[0] for o in answered)
        return [
            [(step[t].logprob, t) for t, step in zip(o.token_ids, o.logprobs or (), strict=True)]
            for o in outputs
        ]

    def _loras(self, prompts: list[list[int]]) -> Any:
        if not self._adapters:
            return None
        from vllm.lora.request import LoRARequest

        made = (LoRARequest(a.name, i, str(a)) for i, a in enumerate(self._adapters, start=1))
        return list(islice(cycle(made), len(prompts)))


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


class Settings(NamedTuple):
    """Those of an engine; the command line of `serving.py` says what they are."""

    model: Path
    engine: str
    load_format: str
    cache_bytes: int
    tp: int
    custom_all_reduce: bool
    adapters: int
    options: dict[str, str]


def start_vllm(of: Settings) -> VLLM:
    if of.engine == "invariant":
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    options: dict[str, Any] = {"attention_backend": "CUSTOM"} if of.engine == "rlk" else {}
    options |= of.options
    written = []
    if of.adapters:
        options |= adapters.settings(of.model, of.adapters)
        written = adapters.write_adapters(of.model, Path(mkdtemp()), of.adapters)
    from vllm import LLM

    return VLLM(
        LLM(
            model=str(of.model), load_format=of.load_format, skip_tokenizer_init=True,
            tensor_parallel_size=of.tp, disable_log_stats=True, max_model_len=CONTEXT,
            gpu_memory_utilization=0.01, kv_cache_memory_bytes=of.cache_bytes,
            disable_custom_all_reduce=not of.custom_all_reduce, **options,
        ),
        written,
    )  # fmt: skip


def start_sglang(of: Settings) -> SGLang:
    if of.engine == "invariant" or of.adapters:
        raise SystemExit("--engine invariant, --adapters: vLLM alone has them here")
    config = json.loads((of.model / "config.json").read_text())
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * width
    import sglang

    started = sglang.Engine(
        model_path=str(of.model), load_format=of.load_format, skip_tokenizer_init=True,
        dtype="bfloat16", tp_size=of.tp, context_length=CONTEXT, log_level="error",
        max_total_tokens=of.cache_bytes * of.tp // token,
        disable_custom_all_reduce=not of.custom_all_reduce, **of.options,
    )  # fmt: skip
    return SGLang(started, int(config["vocab_size"]))


SERVERS = {"vllm": start_vllm, "sglang": start_sglang}
