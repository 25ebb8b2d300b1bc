"""What SGLang needs before it is imported on a CPU: the choice of its CPU engine, and stand-ins for
two packages that it imports and does not call there."""

import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any, NoReturn

from rlk_align.engines.sglang.info import SGLANG

_PARTS = {
    "torchvision": (
        *("io", "transforms", "transforms.functional", "transforms.v2"),
        "transforms.v2.functional",
    ),
    "sgl_kernel": ("kvcacheio", "mamba"),
}
"""Stand-in -> the modules in it that SGLang imports."""


def prepare(raw: bool, ranks: int = 1) -> tuple[str, ...]:
    """Sets up this process for `import sglang`, and returns the names of the stand-ins.

    `raw`: whether log-probs of sampled tokens are those of the raw distribution; `ranks`: the
    number of tensor-parallel ranks.

    PyPI's torchvision is built for CUDA and cannot be loaded beside a CPU build of torch, and the
    kernels for CPUs, `sgl_kernel`, are not on PyPI: without them SGLang computes with torch.
    """
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "1" if raw else "0"
    # SGLang binds each rank to its own NUMA node, and a small machine has too few.
    cores = os.cpu_count() or 1
    bound = "|".join(str(rank % cores) for rank in range(ranks))
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bound if ranks > 1 else "all")
    missing = tuple(filter(_is_missing, SGLANG.stand_ins))
    if "torchvision" in missing:
        # transformers caches its answer, and must not find the stand-in.
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        import_utils.is_torchvision_v2_available()
    for name in missing:
        print(f"rlk-align: {name} is not installed: an empty stand-in takes its place", flush=True)
        for path in (name, *(f"{name}.{part}" for part in _PARTS[name])):
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
