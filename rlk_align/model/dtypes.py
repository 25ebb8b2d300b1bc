"""Floating-point dtypes by their precision."""

DTYPES = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""Significant bits."""


def lower_precision(a: str, b: str) -> str:
    """Returns the dtype that has fewer significant bits."""
    return min(a, b, key=lambda dtype: DTYPES.get(dtype, 0))
