"""What compiles kernels for a GPU that need not be there; it shares programs with tests/kernels."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
