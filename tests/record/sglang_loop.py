"""A loop of reinforcement learning as a user writes it, whose rollout is an Engine of SGLang.

sglang_loop.py FOLDER MODEL PROMPTS.json        with RLK_RECORD in the environment

In the environment: SGLANG, further settings of the Engine, in JSON; TOKENS, how many are sampled at
most; RAW, whether log-probs are raw.
"""

# SGLang's other processes import this script too: they need what a CPU lacks.
import sglang_stand_ins  # noqa: F401  isort: skip

import json
import os
import sys
from pathlib import Path

os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = os.environ.get("RAW", "1")


def rollout(folder: Path, model: str, prompts: list[list[int]]) -> None:
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch_native",
        grammar_backend="none",
        context_length=1024,
        log_level="warning",
        random_seed=0,
        **{"max_total_tokens": 16384, "disable_radix_cache": True}
        | json.loads(os.environ.get("SGLANG", "{}")),
    )
    settings = {"temperature": 1.0, "max_new_tokens": int(os.environ.get("TOKENS", "24"))}
    outputs = engine.generate(input_ids=prompts, sampling_params=settings)
    # Another call is another step.
    engine.generate(input_ids=prompts[:2], sampling_params=settings | {"temperature": 0.5})
    assert not any("output_token_logprobs" in o["meta_info"] for o in outputs), outputs[0]
    ids = [[p, o["output_ids"]] for p, o in zip(prompts, outputs, strict=True)]
    (folder / "ids.json").write_text(json.dumps(ids))
    engine.shutdown()


if __name__ == "__main__":
    rollout(Path(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
