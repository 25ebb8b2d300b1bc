"""The distribution that the rollout draws from, by the options of train.py: a temperature, and
limits that drop tokens."""

import argparse
from typing import Any

from batch import Answer

NO_LIMIT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Option -> the value at which it drops no token."""


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """The limits of sampling that drop a token."""
    named = ((name, getattr(options, name), none) for name, none in NO_LIMIT.items())
    return {name: value for name, value, none in named if value != none}


def processed(options: argparse.Namespace) -> bool:
    """Whether tokens are drawn from another distribution than that of the logits."""
    return options.temperature != 1.0 or bool(limits(options))


def logprobs_mode(options: argparse.Namespace) -> str:
    """Which log-probs vLLM returns; without a temperature and limits both are the same."""
    return "processed_logprobs" if processed(options) else "raw_logprobs"


def sampled_by(options: argparse.Namespace, answer: Answer) -> dict[str, Any]:
    """What the record of an answer says of the distribution that its tokens are drawn from, and of
    the draws, so that `rlk-align replay` can repeat them."""
    distribution = {"temperature": options.temperature, **limits(options)}
    said = {"sampling": distribution | {"logprobs_mode": logprobs_mode(options)}}
    if not draws_by_kernels(options):
        return said
    seeds: list[int | None] = [None] * len(answer.ids)
    for span in answer.spans:
        for index in span.indices:
            seeds[index] = span.seed
    return said | {"sampler": "rlk", "seeds": seeds}


def draws_by_kernels(options: argparse.Namespace) -> bool:
    """Whether the kernels' sampler draws the rollout's tokens."""
    return options.kernels == "rlk" and processed(options)
