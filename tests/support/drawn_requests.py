"""The settings of the requests whose tokens the kernels' sampler draws in engines."""

from typing import Any

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {7: 2.0, 11: -3.0}},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2,
     "presence_penalty": 0.3},
)  # fmt: skip


def settings(request: int) -> dict[str, Any]:
    """Request -> temperature, limits, penalties and biases; six in turn."""
    return SETTINGS[request % len(SETTINGS)]


def seed(request: int) -> int:
    return 1000 + request
