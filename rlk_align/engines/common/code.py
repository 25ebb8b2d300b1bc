"""Where each operator is in its engine's code, for the person who inspects it."""

import functools
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlk_align.engines.common.places import Place
from rlk_align.results import CodePlace

MAX_SETTINGS = 24
"""The largest number of a module's scalars that are recorded."""


def code_places(model: Any, places: Iterable[Place]) -> dict[str, CodePlace]:
    """Site -> the module of the live model that computes it. For an operator without a module of
    its own, that is the enclosing attention, MLP or layer."""
    code: dict[str, CodePlace] = {}
    for place in places:
        if place.unexposed:
            continue
        path = place.module.rpartition(".")[0] if place.end == "input" else place.module
        module = model.get_submodule(path)
        kind = type(module)
        file, line = _source(_computes(module))
        hooks = _hooks(module)
        for site in place.sites:
            code[site] = CodePlace(
                module=path,
                kind=kind.__qualname__,
                file=file,
                line=line,
                hooks=hooks,
                settings=_scalars(module),
            )
    return code


def _computes(module: Any) -> Any:
    """The function that a module computes with: its own `forward` attribute, or the `forward` of
    its class, which may inherit it from another file."""
    if "forward" in vars(module):
        return module.forward
    kind = type(module)
    defines = next((k for k in kind.__mro__ if "forward" in vars(k)), kind)
    return vars(defines).get("forward", defines)


def _hooks(module: Any) -> list[str]:
    """`file:line` of each forward hook of a module that is not from an installed package."""
    tables = (getattr(module, name, {}) for name in ("_forward_pre_hooks", "_forward_hooks"))
    sources = [_source(hook) for table in tables for hook in table.values()]
    return [f"{file}:{line}" for file, line in sources if file and Path(file).is_absolute()]


def _source(function: Any) -> tuple[str, int]:
    """The file and the line of a function; installed files are relative to site-packages."""
    try:
        function = inspect.unwrap(function)
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
        path = Path(inspect.getsourcefile(function) or "")
        line = inspect.getsourcelines(function)[1]
    except (OSError, TypeError, ValueError):
        return "", 0
    parts = path.parts
    if "site-packages" in parts:
        return "/".join(parts[parts.index("site-packages") + 1 :]), line
    return str(path), line


def _scalars(module: Any) -> dict[str, bool | int | float | str]:
    scalars = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
        if isinstance(value, bool | int | float | str)
    }
    return dict(list(scalars.items())[:MAX_SETTINGS])
