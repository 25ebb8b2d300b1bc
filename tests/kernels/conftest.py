"""The kernels' tests on the CPU: the portable backend, and Triton in its interpreter.

TRITON_INTERPRET has to be set before rlk_kernels is imported for the first time in the process.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if "rlk_kernels" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

import interpreter_dot

interpreter_dot.install()
