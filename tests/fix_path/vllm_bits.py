"""Runs the real vLLM several times in one process, with the kernels or without, and writes what it
said, bit for bit.

    python vllm_bits.py CASES.json FOUND.json

CASES.json: a list of {"name", "model", "prompts", "new_tokens", "kernels" (off, registered,
plugin), "options" (LLM's), "reload" (a checkpoint), "all tokens" (whether to ask for them),
"apart" (whether the model is in a process of its own, as vLLM has it by default), "plain routers"
(see `plain_routers`), "stock model" (whether GLM-4.5's class stays vLLM's), "check" (whether to),
"adapters" (for each prompt the folder of its LoRA adapter, or null)};
FOUND.json: by name, greedy tokens, the bits of the log-probs of decoding and of scoring the same
sequences, and what `check` says. Where prefixes are cached it decodes twice, and says what it said
with the cache filled; where a checkpoint is to be loaded into the live engine it decodes before and
after, and says what it said after.
"""

import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import rlk_kernels
import torch
from rlk_kernels.integrations import vllm as kernels
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.vllm import registry
from vllm import LLM, SamplingParams, plugins
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest


def bits(values: list[float]) -> str:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes().hex()


def of_all_tokens(llm: LLM, ids: list[int]) -> dict[str, Any]:
    """What requests say that ask for log-probs of all tokens, of a few and of the sampled one, and,
    apart because vLLM mixes them up, of listed ones: token -> bits and rank, at the first sampled
    position and at the prompt's second."""
    usual = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True, "detokenize": False}
    asked: dict[str, dict[str, Any]] = {
        "all": {"logprobs": -1, "prompt_logprobs": -1},
        "listed": {"logprob_token_ids": [11, 7, 500]},
        "fewer listed": {"logprob_token_ids": [7]},
        "three": {"logprobs": 3, "prompt_logprobs": 3},
        "sampled": {"logprobs": 0},
    }
    params = {name: SamplingParams(**usual, **more) for name, more in asked.items()}
    outputs: dict[str, Any] = {}
    for names in (["all", "three", "sampled"], ["listed", "fewer listed"]):
        prompts = [{"prompt_token_ids": ids}] * len(names)
        said = llm.generate(prompts, [params[name] for name in names], use_tqdm=False)
        outputs |= zip(names, said, strict=True)
    found: dict[str, Any] = {}
    for name, out in outputs.items():
        places = {"sampled": out.outputs[0].logprobs[0]}
        if out.prompt_logprobs is not None:
            places["prompt"] = out.prompt_logprobs[1]
        found[name] = {
            where: {str(t): [bits([x.logprob]), x.rank] for t, x in place.items()}
            for where, place in places.items()
        }
    return found


def preemptions(llm: LLM) -> int:
    """How often a request lost its blocks and was computed again."""
    name = "vllm:num_preemptions"
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


@contextlib.contextmanager
def plain_routers() -> Iterator[None]:
    """GLM-4.5 as in vLLM 0.26: a router is torch's linear in fp32, gets rows in fp32, and returns
    only logits."""
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.models import glm4_moe, gpt_oss

    def router(inputs: int, outputs: int, **_: Any) -> torch.nn.Linear:
        return torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float32)

    def forward(block: Any, rows: torch.Tensor) -> torch.Tensor:
        return block.experts(hidden_states=rows, router_logits=block.gate(rows.float()))

    with (
        patch.object(glm4_moe, "GateLinear", router),
        patch.object(glm4_moe.Glm4MoE, "forward", forward),
        patch.object(gpt_oss, "GateLinear", ReplicatedLinear),
    ):
        yield


def requests_of(adapters: list[str | None]) -> list[LoRARequest | None] | None:
    """What names each prompt's adapter; None if there are none at all."""
    ids = {folder: 1 + i for i, folder in enumerate(sorted(filter(None, set(adapters))))}
    named = [None if a is None else LoRARequest(a, ids[a], a) for a in adapters]
    return named or None


def refusal(llm: LLM) -> str:
    """The error of `check` for a live model that is not supported."""
    try:
        kernels.check(llm)
    except NotSupported as error:
        return str(error)
    return ""


def run(case: dict[str, Any]) -> dict[str, Any]:
    how = case["kernels"]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if case.get("apart") else "0"
    plugins.plugins_loaded = False
    if how == "registered":
        if case.get("stock model"):
            kernels.unregister()
        with patch.dict(registry.MODELS, clear=case.get("stock model", False)):
            kernels.register()
    else:
        kernels.unregister()
        # vLLM calls this by its entry point, whether the variable is set or not.
        if how == "plugin":
            os.environ[kernels.ENVIRONMENT] = "1"
        kernels.plugin()
    rlk_kernels.reset_backend_calls()
    usual = {"enable_prefix_caching": False, "enforce_eager": True, "disable_log_stats": True}
    options = usual | case.get("options", {})
    form = plain_routers() if case.get("plain routers") else contextlib.nullcontext()
    with form:
        return ask(case, options)


def ask(case: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(
        model=case["model"], max_model_len=1024, kv_cache_memory_bytes=1 << 28, **options
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    greedy = SamplingParams(
        temperature=0.0, max_tokens=case["new_tokens"], logprobs=0, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip
    adapters = requests_of(case.get("adapters", []))
    outputs = llm.generate(prompts, greedy, lora_request=adapters, use_tqdm=False)
    if options["enable_prefix_caching"]:
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    if "reload" in case:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": case["reload"]})
        llm.reset_prefix_cache()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
    decoded = [out.outputs[0] for out in outputs]
    tokens = [list(out.token_ids) for out in decoded]
    said = [
        [step[t].logprob for step, t in zip(out.logprobs, ids, strict=True)]
        for out, ids in zip(decoded, tokens, strict=True)
    ]
    whole = [a + b for a, b in zip(case["prompts"], tokens, strict=True)]
    score = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate(
        [{"prompt_token_ids": ids} for ids in whole], score, lora_request=adapters, use_tqdm=False
    )
    again = [
        [out.prompt_logprobs[p][ids[p]].logprob for p in range(len(prompt), len(ids))]
        for out, ids, prompt in zip(scored, whole, case["prompts"], strict=True)
    ]
    found = {
        "tokens": tokens,
        "decode": [bits(x) for x in said],
        "prefill": [bits(x) for x in again],
        "cached": sum(out.num_cached_tokens or 0 for out in outputs),
        "preempted": 0 if options["disable_log_stats"] else preemptions(llm),
        "ran": sorted({op for op, _ in rlk_kernels.backend_calls()}),
        "all tokens": of_all_tokens(llm, case["prompts"][1]) if case.get("all tokens") else {},
        "refusal": refusal(llm) if case.get("check") else "",
        "replaced": list(kernels.check(llm).replaced) if adapters else [],
        "hash": llm.llm_engine.vllm_config.compute_hash(),
    }
    del llm, outputs, decoded, scored
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def main() -> None:
    cases, found = json.loads(Path(sys.argv[1]).read_text()), {}
    for case in cases:
        found[case["name"]] = run(case)
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
