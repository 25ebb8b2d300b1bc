"""Asks one live vLLM the same things alone and in company, and writes down what it said, bit for
bit.

    python ask_vllm.py CASE.json FOUND.json

CASE.json: {"model", "kernels" (on, off), "options" (LLM's)}. FOUND.json: see `ask`.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from rlk_kernels.integrations import vllm as kernels
from vllm import LLM, SamplingParams

NEEDLE_TOKENS, TRIALS, COMPANY = 24, 4, 40


def bits(values: list[float]) -> str:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes().hex()


class Asker:
    def __init__(self, llm: Any, vocabulary: int) -> None:
        self.llm, self.vocabulary, self.random = llm, vocabulary, random.Random(1)

    def prompt(self, low: int, high: int) -> list[int]:
        count = self.random.randint(low, high)
        return [self.random.randrange(2, self.vocabulary) for _ in range(count)]

    def decode(self, prompts: list[list[int]], params: list[Any]) -> list[tuple[list[int], str]]:
        """Of each prompt, what was sampled and the bits of its log-probs."""
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        said = []
        for out in self.llm.generate(asked, params, use_tqdm=False):
            one = out.outputs[0]
            ids = list(one.token_ids)
            said.append((ids, bits([d[t].logprob for d, t in zip(one.logprobs, ids, strict=True)])))
        return said

    def score(self, whole: list[list[int]], starts: list[int]) -> list[str]:
        """Bits of the log-probs of each sequence's tokens from `starts` on, by one prefill."""
        asked = [{"prompt_token_ids": ids} for ids in whole]
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        return [
            bits([out.prompt_logprobs[p][ids[p]].logprob for p in range(start, len(ids))])
            for out, ids, start in zip(
                self.llm.generate(asked, params, use_tqdm=False), whole, starts, strict=True
            )
        ]


def sampling(tokens: int, temperature: float, seed: int, logprobs: int = 0) -> Any:
    return SamplingParams(
        temperature=temperature, max_tokens=tokens, logprobs=logprobs, seed=seed, ignore_eos=True,
        detokenize=False,
    )  # fmt: skip


def ask(asker: Asker) -> dict[str, Any]:
    """needle: alone, and at a random place of batches of 64 to 128 others of other lengths.
    company: each of many prompts alone, and all at once. decode, prefill: of those at once.
    top: the same with the five likeliest tokens asked for."""
    needle, sampled = asker.prompt(30, 60), sampling(NEEDLE_TOKENS, 0.0, 0)
    answers: dict[str, Any] = {"needle": [asker.decode([needle], [sampled])[0]]}
    for trial in range(TRIALS):
        batch = asker.random.randint(64, 128)
        place = asker.random.randrange(batch)
        prompts = [asker.prompt(1, 300) for _ in range(batch)]
        params = [sampling(asker.random.randint(1, 48), 1.0, 100 * trial + i) for i in range(batch)]
        prompts[place], params[place] = needle, sampled
        answers["needle"].append(asker.decode(prompts, params)[place])
    prompts = [asker.prompt(1, 400) for _ in range(COMPANY)]
    params = [sampling(32, 1.0, 7_000 + i) for i in range(COMPANY)]
    answers["alone"] = [asker.decode([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    answers["together"] = together = asker.decode(prompts, params)
    whole = [p + ids for p, (ids, _) in zip(prompts, together, strict=True)]
    answers["decode"] = [said for _, said in together]
    answers["prefill"] = asker.score(whole, [len(p) for p in prompts])
    answers["scored alone"] = [
        asker.score([w], [len(p)])[0] for w, p in zip(whole, prompts, strict=True)
    ]
    more = [sampling(32, 1.0, 7_000 + i, logprobs=5) for i in range(COMPANY)]
    answers["top"] = asker.decode(prompts, more)
    return answers


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    config = json.loads((Path(case["model"]) / "config.json").read_text())
    options: dict[str, Any] = {}
    if case["kernels"] == "on":
        kernels.register()
        options["attention_backend"] = "CUSTOM"
    llm = LLM(
        model=case["model"], disable_log_stats=True, max_model_len=1024, max_num_seqs=128,
        gpu_memory_utilization=0.01, kv_cache_memory_bytes=2 * 10**9, **options, **case["options"],
    )  # fmt: skip
    answers = ask(Asker(llm, config["vocab_size"]))
    if case["kernels"] == "on" and case["options"].get("enforce_eager"):
        answers["replaced"] = len(kernels.check(llm).replaced)
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
