"""The engines by name. A new engine is a folder here with an `info.py`, and a line in ENGINES.

Third parties add engines through the entry-point group `rlk_align.engines`, whose entry points name
an EngineInfo.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

from rlk_align.engines.info import EngineInfo
from rlk_align.errors import INSTALL_ENGINES, BadOption, MissingDependency, UnknownEngine

ENGINES = {
    "hf": "rlk_align.engines.hf.info:HF",
    "fsdp": "rlk_align.engines.hf.info:FSDP",
    "deepspeed": "rlk_align.engines.deepspeed.info:DEEPSPEED",
    "megatron": "rlk_align.engines.megatron.info:MEGATRON",
    "vllm": "rlk_align.engines.vllm.info:VLLM",
    "sglang": "rlk_align.engines.sglang.info:SGLANG",
}
"""Name -> `module:attribute` of its EngineInfo."""


@functools.cache
def engine_info(name: str) -> EngineInfo:
    """Raises UnknownEngine, which lists the known engines."""
    if name in ENGINES:
        return _named(ENGINES[name])
    plugins = importlib.metadata.entry_points(group="rlk_align.engines")
    if name in plugins.names:
        return plugins[name].load()
    known = sorted({*ENGINES, *plugins.names})
    raise UnknownEngine(f"engine {name!r} is unknown; choose from {', '.join(known)}")


def require_installed(name: str) -> None:
    """Raises MissingDependency with the command that installs the missing package."""
    info = engine_info(name)
    if info.missing:
        raise MissingDependency(
            f"engine {name!r} needs the package {info.missing!r}, which is not installed",
            info.install,
        )


def does_not_sample(name: str) -> BadOption:
    """The error for an engine that only scores and is asked to sample."""
    return BadOption(
        f"engine {name!r} does not sample",
        "name it as --train, or give `capture` the --tokens of a run",
    )


def require_kernels(name: str) -> None:
    """Raises MissingDependency if `rlk_kernels`, which `kernels=rlk` needs, is not installed."""
    if importlib.util.find_spec("rlk_kernels") is None:
        raise MissingDependency(
            f"engine {name!r}: kernels=rlk needs the package 'rlk_kernels', which is not installed",
            INSTALL_ENGINES,
        )


def load_engine(name: str, modules: bool = False) -> type[Any]:
    """The engine's class, a subclass of `engines.base.Engine`; this imports the engine. `modules`:
    that which runs a model of any family, module by module."""
    require_installed(name)
    info = engine_info(name)
    return _named(info.modules if modules else info.target)


def load_patch(name: str) -> type[Any]:
    """The class that puts the kernels into an engine, a subclass of `engines.patch.BasePatch`."""
    return _named(engine_info(name).patch)


def _named(target: str) -> Any:
    """The object that `module:attribute` names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
