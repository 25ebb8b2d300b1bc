"""Stand-ins for two packages that SGLang imports and that have no build for CPUs on PyPI. Import
this module before SGLang, in each process: at the top of a script, so that the processes that
SGLang starts import it too. Nothing in them computes; a call raises RuntimeError.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


class StandIn(ModuleType):
    """A package each of whose names is a function that raises, or a class where an `Enum` is
    needed."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        vars(self).update(names)
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{self.__name__}.{name} is not installed here")

        return missing


class InterpolationMode:
    BICUBIC = BILINEAR = NEAREST = LANCZOS = None


def _torchvision() -> None:
    from transformers.utils import import_utils

    # transformers caches these answers, and would believe in the stand-in otherwise.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    modes = {"InterpolationMode": InterpolationMode}
    functional = StandIn("torchvision.transforms.functional", **modes)
    newer = StandIn("torchvision.transforms.v2.functional", **modes)
    v2 = StandIn("torchvision.transforms.v2", functional=newer)
    transforms = StandIn("torchvision.transforms", functional=functional, v2=v2, **modes)
    io = StandIn("torchvision.io", ImageReadMode=object)
    StandIn("torchvision", io=io, transforms=transforms, __version__="0")


if importlib.util.find_spec("torchvision") is None:
    _torchvision()
if importlib.util.find_spec("sgl_kernel") is None:
    for part in ("sgl_kernel", "sgl_kernel.kvcacheio", "sgl_kernel.mamba"):
        StandIn(part)
