"""Floating-point dtypes by their precision."""

_PRECISION = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Significant bits."""


def lower_precision(a: str, b: str) -> str:
    """Of two dtypes, the one with fewer significant bits."""
    return min(a, b, key=lambda dtype: _PRECISION.get(dtype, 0))
