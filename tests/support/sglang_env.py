"""The environment of the engine sglang, which `make sglang-env` makes, and a model for it."""

import warnings
from typing import Any

import pytest
from command import INTERPRETERS, REQUIRED, spec_here
from pair_models import MODELS

PYTHON = INTERPRETERS["sglang"]
needed = pytest.mark.skipif(
    not PYTHON.exists() and "sglang" not in REQUIRED, reason="run make sglang-env"
)
"""Skips where the environment is missing; where it is required, the test fails then."""
if not PYTHON.exists():
    warnings.warn(f"sglang is not tested: no {PYTHON}; run make sglang-env", stacklevel=1)
EVERY_LAYER_SPARSE: dict[str, Any] = {"model_type": "qwen3_moe", **MODELS["untied"].settings}
"""A random model that all engines run."""


def sglang(options: str = "") -> str:
    """The engine's spec with these options."""
    return spec_here(f"sglang:{options}".rstrip(":"))
