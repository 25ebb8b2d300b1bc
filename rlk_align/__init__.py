"""rlk-align: are the rollout engine and the training engine the same policy?

The public names, for notebooks and pytest; docs/python.md shows examples. Errors are in
`rlk_align.errors`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rlk_align.api.public import capture, compare, gate, load_run
from rlk_align.version import __version__

if TYPE_CHECKING:
    from rlk_align.api.loaded import LoadedRun
    from rlk_align.errors import RlkError
    from rlk_align.judge.regression import RegressionVerdict
    from rlk_align.judge.verdict import Verdict

_TYPES = {
    "LoadedRun": "rlk_align.api.loaded",
    "RegressionVerdict": "rlk_align.judge.regression",
    "RlkError": "rlk_align.errors",
    "Verdict": "rlk_align.judge.verdict",
}
"""Name -> its module, which is imported at the first access."""

__all__ = [
    "LoadedRun",
    "RegressionVerdict",
    "RlkError",
    "Verdict",
    "__version__",
    "capture",
    "compare",
    "gate",
    "load_run",
]


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        return getattr(importlib.import_module(_TYPES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
