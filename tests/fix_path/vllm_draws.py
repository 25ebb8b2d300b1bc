"""Runs the real vLLM with the kernels' sampler several times in one process, and writes what each
request drew, bit for bit.

    python vllm_draws.py CASES.json FOUND.json

CASES.json: a list of {"name", "model", "prompts", "new_tokens", "options" (LLM's), "order" (the
requests' order; missing: as they come), "alone" (whether each has a call of its own), "sampler"
(false: vLLM's own), "poison" (a token whose embedding is NaN)}. FOUND.json: by name, the error, or
the tokens of each request, the bits of their log-probs, the numbers of preemptions and of cached
tokens, and the kernels that ran in this process. `drawn_requests` has the requests' settings.
"""

import gc
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

import rlk_kernels
import torch
from drawn_requests import seed, settings
from rlk_kernels.integrations import vllm as kernels
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm_bits import bits, preemptions


def poison(llm: LLM, token: int) -> None:
    """Makes the embedding of a token NaN, for as long as the model lives."""

    def spoil(_module: Any, ids: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out.masked_fill((ids[0] == token)[:, None], math.nan)

    llm.apply_model(lambda model: model.model.embed_tokens.register_forward_hook(spoil) and None)


def run(case: dict[str, Any]) -> dict[str, Any]:
    kernels.unregister()
    kernels.register(sampler=case.get("sampler", True))
    rlk_kernels.reset_backend_calls()
    usual = {"enable_prefix_caching": False, "enforce_eager": True, "disable_log_stats": True}
    options = {"logprobs_mode": "processed_logprobs", **usual, **case.get("options", {})}
    ranks = options.get("tensor_parallel_size", 1)
    llm = LLM(model=case["model"], max_model_len=1024, kv_cache_memory_bytes=1 << 28, **options)
    order = case.get("order") or list(range(len(case["prompts"])))
    prompts = [{"prompt_token_ids": case["prompts"][i]} for i in order]
    params = [
        SamplingParams(
            **settings(i), seed=seed(i), max_tokens=case["new_tokens"], logprobs=0,
            ignore_eos=True, detokenize=False,
        )
        for i in order
    ]  # fmt: skip
    if "poison" in case:
        poison(llm, case["poison"])
    if case.get("alone"):
        pairs = zip(prompts, params, strict=True)
        outputs = [llm.generate([p], [s], use_tqdm=False)[0] for p, s in pairs]
    else:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    drawn = sorted(zip(order, (out.outputs[0] for out in outputs), strict=True))
    found = {
        "tokens": [list(out.token_ids) for _, out in drawn],
        "logprobs": [
            bits([step[t].logprob for step, t in zip(out.logprobs, out.token_ids, strict=True)])
            for _, out in drawn
        ],
        "cached": sum(out.num_cached_tokens or 0 for out in outputs),
        "preempted": 0 if options["disable_log_stats"] else preemptions(llm),
        "ran": sorted({op for op, _ in rlk_kernels.backend_calls()}),
        # The models of several ranks are in other processes.
        "replaced": 0 if ranks > 1 else len(kernels.check(llm).replaced),
    }
    del llm, outputs, drawn
    gc.collect()
    cleanup_dist_env_and_memory()
    return found


def main() -> None:
    found = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        try:
            found[case["name"]] = run(case)
        except ValueError as error:
            found[case["name"]] = {"error": str(error)}
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
