"""The distribution that the rollout draws from, by the options of train.py: a temperature, and
limits that drop tokens."""

import argparse
from typing import Any

NO_LIMIT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Option -> the value at which it drops no token."""


def limits(options: argparse.Namespace) -> dict[str, Any]:
    """The limits of sampling that drop a token."""
    named = ((name, getattr(options, name), none) for name, none in NO_LIMIT.items())
    return {name: value for name, value, none in named if value != none}


def processed(options: argparse.Namespace) -> bool:
    """Whether tokens are drawn from another distribution than that of the logits."""
    return options.temperature != 1.0 or bool(limits(options))


def recorded_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """What the records say of the distribution that tokens are drawn from, and of the rollout's
    log-probs."""
    mode = "processed_logprobs" if processed(options) else "raw_logprobs"
    return {"temperature": options.temperature, **limits(options), "logprobs_mode": mode}


def draws_by_kernels(options: argparse.Namespace) -> bool:
    """Whether the kernels' sampler draws the rollout's tokens."""
    return options.kernels == "rlk" and processed(options)
