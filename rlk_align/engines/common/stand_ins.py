"""Empty stand-ins for packages that an engine imports and does not call here."""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any, NoReturn

TORCHVISION = (
    *("io", "transforms", "transforms.functional", "transforms.v2"),
    "transforms.v2.functional",
)
"""The modules of torchvision that engines import for images. PyPI's torchvision is built for CUDA
and cannot be loaded beside a CPU build of torch."""


def stand_in(packages: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Puts a stand-in in the place of each package that is not installed, and returns their names.

    `packages`: package -> its modules that are imported.
    """
    missing = tuple(filter(_is_missing, packages))
    if "torchvision" in missing:
        # transformers caches its answer, and must not find the stand-in.
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        import_utils.is_torchvision_v2_available()
    for name in missing:
        print(f"rlk-align: {name} is not installed: an empty stand-in takes its place", flush=True)
        for path in (name, *(f"{name}.{part}" for part in packages[name])):
            _add(path)
    return missing


def _is_missing(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


def _add(path: str) -> None:
    module = _StandIn(path)
    module.__spec__ = importlib.machinery.ModuleSpec(path, None, is_package=True)
    module.__path__ = []
    sys.modules[path] = module
    parent, _, name = path.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


class _StandIn(types.ModuleType):
    """A module in which every name is a class that raises an error when it is called."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__new__": _refuse, "__module__": self.__name__})


def _refuse(cls: type, *_args: Any, **_options: Any) -> NoReturn:
    raise RuntimeError(f"{cls.__module__}.{cls.__name__} is not installed; this is a stand-in")
