"""Runs the real SGLang with the kernels' sampler in this process, and writes what each request
drew, bit for bit.

    python sglang_draws.py JOB.json FOUND.json

JOB.json: {"model", "prompts", "new_tokens"}. FOUND.json: "draws", by case, the tokens of each
request and the bits of their log-probs; "retractions", how often requests lost their slots;
"ran", whether the sampler ran. `drawn_requests` has the requests' settings.
"""

import sglang_in_process  # isort: skip

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from drawn_requests import seed, settings
from rlk_kernels.integrations import sglang
from sglang.srt.managers import scheduler as managers

CHUNK = 16


def params(request: int) -> dict[str, Any]:
    """As SGLang names them."""
    named = settings(request) | {"sampling_seed": seed(request)}
    if "logit_bias" in named:
        named["logit_bias"] = {str(token): bias for token, bias in named["logit_bias"].items()}
    return named


class Draws:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.requests = job, range(len(job["prompts"]))
        count = len(job["prompts"])
        self.engine = sglang_in_process.InProcess(
            job["model"], dtype="bfloat16", max_running_requests=count, max_total_tokens=1 << 14
        )
        self.found: dict[str, list[list[Any]]] = {}

    def draw(self, name: str, order: list[int] | None = None, at_once: int = 0) -> None:
        """What the requests draw in this order, this many in a call; 0: all."""
        order = order or [*self.requests]
        answers: dict[int, list[Any]] = {}
        for start in range(0, len(order), at_once or len(order)):
            some = order[start : start + (at_once or len(order))]
            done = self.engine.generate(
                [self.job["prompts"][i] for i in some], f"{name} {start}", self.job["new_tokens"],
                settings=[params(i) for i in some],
            )  # fmt: skip
            for i, answer in zip(some, done, strict=True):
                values = torch.tensor(answer.sampled, dtype=torch.float32)
                answers[i] = [answer.tokens, values.numpy().tobytes().hex()]
        self.found[name] = [answers[i] for i in self.requests]

    def draw_with_retractions(self) -> int:
        """While SGLang takes the slots of some requests away every third step; how often it did."""
        retract = managers.ScheduleBatch.retract_decode
        with (
            patch.object(managers, "TEST_RETRACT", True),
            patch.object(
                managers.ScheduleBatch, "retract_decode", autospec=True, side_effect=retract
            ) as called,
        ):
            self.draw("retracted")
        return called.call_count


def run(job: dict[str, Any]) -> dict[str, Any]:
    draws = Draws(job)
    runner, scheduler = draws.engine.runner, draws.engine.scheduler
    backwards = [*draws.requests][::-1]
    with sglang.use_kernels(runner, sampler=True):
        draws.draw("together")
        draws.draw("alone", at_once=1)
        draws.draw("seven", backwards, at_once=7)
        usual, scheduler.chunked_prefill_size = scheduler.chunked_prefill_size, CHUNK
        draws.draw("chunks")
        scheduler.chunked_prefill_size = usual
        retractions = draws.draw_with_retractions()
        replaced = sglang.check(runner).replaced
    with sglang.use_kernels(runner):
        draws.draw("SGLang's own", backwards)
    return {"draws": draws.found, "retractions": retractions, "replaced": len(replaced)}


if __name__ == "__main__":
    asked, found = map(Path, sys.argv[1:])
    found.write_text(json.dumps(run(json.loads(asked.read_text()))))
