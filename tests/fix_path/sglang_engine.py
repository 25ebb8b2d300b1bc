"""The public Engine of SGLang, whose model is in a process of its own, with the plug-in that its
entry point names.

    python sglang_engine.py JOB.json FOUND.json

JOB.json: {"model", "prompts", "new_tokens", "settings"}. FOUND.json: "decode" and "prefill", the
log-probs of the sampled tokens; "replaced", what `check` says, or "refusal".
"""

import sglang_stand_ins  # noqa: F401  isort: skip

import json
import sys
from pathlib import Path
from typing import Any

import sglang
from rlk_kernels.integrations import sglang as kernels
from rlk_kernels.integrations.errors import NotSupported

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def run(job: dict[str, Any]) -> dict[str, Any]:
    engine = sglang.Engine(
        **{"model_path": job["model"], "device": "cpu", "skip_tokenizer_init": True},
        **{"max_total_tokens": 8192, "max_running_requests": 16, "log_level": "error"},
        **{"grammar_backend": "none"} | job["settings"],
    )
    new, prompts = job["new_tokens"], job["prompts"]
    outputs = engine.generate(
        input_ids=prompts, sampling_params=GREEDY | {"max_new_tokens": new}, return_logprob=True
    )
    whole = [a + b["output_ids"] for a, b in zip(prompts, outputs, strict=True)]
    scored = engine.generate(
        input_ids=whole, sampling_params=GREEDY | {"max_new_tokens": 1}, return_logprob=True,
        logprob_start_len=0,
    )  # fmt: skip
    found: dict[str, Any] = {
        "decode": [[x[0] for x in o["meta_info"]["output_token_logprobs"]] for o in outputs],
        "prefill": [[x[0] for x in o["meta_info"]["input_token_logprobs"]][-new:] for o in scored],
    }
    try:
        found["replaced"] = kernels.check(engine).replaced
    except NotSupported as error:
        found["refusal"] = str(error)
    engine.shutdown()
    return found


if __name__ == "__main__":
    asked, written = map(Path, sys.argv[1:])
    written.write_text(json.dumps(run(json.loads(asked.read_text()))))
