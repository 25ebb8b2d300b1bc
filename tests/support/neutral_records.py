"""Simulated runs as records of the neutral file."""

from collections.abc import Iterator
from typing import Any

from rlk_align.logs.dumps.sequences import Sequences


def records(run: Sequences) -> Iterator[dict[str, Any]]:
    """The sequences as records of the neutral file."""
    for k in range(len(run)):
        at = slice(run.offsets[k], run.offsets[k + 1])
        missing = run.rollout_missing[at]
        yield {
            "schema": "rlk-align/logprobs/1",
            "id": run.ids[k],
            "group": run.groups[k],
            "step": int(run.steps[k]),
            "token_ids": run.token_ids[at].tolist(),
            "prompt_length": int(run.prompt_lengths[k]),
            "rollout_logprobs": [
                None if m else v for v, m in zip(run.rollout[at].tolist(), missing, strict=True)
            ],
            "train_logprobs": [None, *run.train[at][1:].tolist()],
        }
