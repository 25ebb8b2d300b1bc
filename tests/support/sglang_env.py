"""The environment of the engine sglang, which `make sglang-env` makes."""

import warnings
from pathlib import Path

import pytest

PYTHON = Path(__file__).parents[2] / ".venv-sglang/bin/python"
needed = pytest.mark.skipif(not PYTHON.exists(), reason="run make sglang-env")
"""Skips where the environment is missing."""
if not PYTHON.exists():
    warnings.warn(f"sglang is not tested: no {PYTHON}; run make sglang-env", stacklevel=1)


def sglang(options: str = "") -> str:
    """The engine's spec with these options."""
    return f"sglang:python={PYTHON}{',' if options else ''}{options}"
