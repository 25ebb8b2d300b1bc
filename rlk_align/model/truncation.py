"""The limits of truncated sampling, as options of an engine and as attributes of a trace."""

from collections.abc import Mapping
from typing import Any

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Limit -> the value at which it changes nothing. The order is that of the kernels."""


def truncation(given: Mapping[str, Any]) -> dict[str, Any]:
    """The limits that options, or attributes, set to another value."""
    return {name: given[name] for name, value in NEUTRAL.items() if given.get(name, value) != value}
