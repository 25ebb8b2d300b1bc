"""A tiny Qwen3-Next in the real vLLM, in this process: log-probs of tokens that are sampled, and of
the same tokens scored. It writes them as JSON.

    python delta_net_run.py MODEL OUT registered|off OPTIONS [SEQUENCES]

SEQUENCES: a file of an earlier run whose tokens are scored; without it, tokens are sampled.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}

PROMPTS = (5, 37, 64, 100)
"""Lengths: within a chunk of 64, and at its border."""
PREFIX = 380
"""Tokens of a prompt whose first 352 are cached, which end within a chunk."""


def main(model: str, out: str, kernels: str, options: str, sequences: str | None = None) -> None:
    import torch
    from rlk_kernels.integrations import vllm as integration
    from vllm import LLM, SamplingParams

    if kernels == "registered":
        integration.register()
    usual = {"enforce_eager": True, "max_model_len": 512, "skip_tokenizer_init": True}
    usual |= {"dtype": "bfloat16", "max_num_seqs": 4, "max_logprobs": 1}
    asked = json.loads(options)
    llm = LLM(model=model, **usual | {"enable_prefix_caching": False} | asked)
    silent = {"detokenize": False}

    def generated(prompts: list[list[int]], new: int) -> list[Any]:
        how = SamplingParams(max_tokens=new, temperature=1.0, logprobs=0, ignore_eos=True, **silent)
        ids = [{"prompt_token_ids": p} for p in prompts]
        return llm.generate(ids, how, use_tqdm=False)

    def scored(prompts: list[list[int]]) -> list[list[float]]:
        how = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, **silent)
        ids = [{"prompt_token_ids": p} for p in prompts]
        return [
            [d[t].logprob for d, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)]
            for o, p in zip(llm.generate(ids, how, use_tqdm=False), prompts, strict=True)
        ]

    random = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 500, (n,), generator=random).tolist() for n in PROMPTS]
    found: dict[str, Any] = {}
    if asked.get("enable_prefix_caching"):
        start = torch.randint(3, 500, (PREFIX,), generator=random).tolist()
        prompts = [start, start, [*start[:-9], 7, 8, 9]]
        runs = [generated([p], 15)[0] for p in prompts]
        found["cached"] = [run.num_cached_tokens for run in runs]
    elif sequences is not None:
        rows = json.loads(Path(sequences).read_text())["sequences"]
        found |= {"scored": scored(rows), "alone": [scored([row])[0] for row in rows]}
        runs = []
    else:
        runs = generated(prompts, 40)
    pairs = [(p, run.outputs[0]) for p, run in zip(prompts, runs, strict=False)]
    found["prompts"] = [len(p) for p, _ in pairs]
    found["sequences"] = [p + list(o.token_ids) for p, o in pairs]
    found["sampled"] = [
        [d[t].logprob for d, t in zip(o.logprobs, o.token_ids, strict=True)] for _, o in pairs
    ]
    if kernels == "registered":
        integration.check(llm)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
