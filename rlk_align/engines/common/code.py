"""Where in its engine's code each operator is, for whoever has to look at it."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlk_align.engines.common.places import Place
from rlk_align.results import CodePlace

SETTINGS = 24
"""Scalars of a module that are kept."""


def code_places(model: Any, places: Iterable[Place]) -> dict[str, CodePlace]:
    """Site -> the module of the live model that computes it. What has no module of its own is
    computed by the one around it: an attention, an MLP, a layer."""
    code: dict[str, CodePlace] = {}
    for place in places:
        if place.unexposed:
            continue
        path = place.module.rpartition(".")[0] if place.end == "input" else place.module
        module = model.get_submodule(path)
        kind = type(module)
        file, line = _source(kind)
        for site in place.sites:
            code[site] = CodePlace(
                module=path,
                kind=kind.__qualname__,
                file=file,
                line=line,
                settings=_scalars(module),
            )
    return code


def _source(kind: type) -> tuple[str, int]:
    """The file below its installation, and the line at which a class computes: a class may inherit
    its `forward` from another file."""
    try:
        defines = next((k for k in kind.__mro__ if "forward" in vars(k)), kind)
        forward = inspect.unwrap(vars(defines).get("forward", defines))
        path = Path(inspect.getsourcefile(forward) or "")
        line = inspect.getsourcelines(forward)[1]
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
    return dict(list(scalars.items())[:SETTINGS])
