"""The kernels' tests on the CPU: the portable backend, and Triton in its interpreter.

TRITON_INTERPRET has to be set before rlk_kernels is imported for the first time in the process.
"""

import os
import sys
from pathlib import Path

import pytest

# behind the others: tests/ has a conftest of its own
sys.path.append(str(Path(__file__).parent))
if "rlk_kernels" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

import interpreter_dot

interpreter_dot.install()


@pytest.fixture(autouse=True)
def plans_are_made_anew(monkeypatch):
    from planning import uncached  # imports rlk_kernels

    uncached(monkeypatch)


@pytest.fixture(params=["torch", "triton"])
def backend(request):
    """Each of the two backends: a test that takes it runs on both."""
    return request.param
