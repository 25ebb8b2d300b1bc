"""`patch=module:function`: the user's own change to a loaded model."""

import importlib
import os
import sys
from typing import Any

from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption
from rlk_align.text import one_line


def apply_patch(spec: EngineSpec, model: Any) -> None:
    """Calls the spec's patch, if it has one, with the loaded model.

    The module is imported from the current directory or PYTHONPATH. Raises BadOption if the patch
    cannot be imported, raises an error, or assigns a weight that the engine has packed, which would
    have no effect.
    """
    patch = spec.option("patch")
    if patch is None:
        return
    module_name, _, function_name = str(patch).partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:
        raise BadOption(
            f"engine {spec.name!r}: patch={patch} cannot be imported: {_described(error)}",
            "patches are imported from the current directory and PYTHONPATH",
        ) from error
    packed = _packed_parameters(model)
    try:
        function(model)
    except (Exception, SystemExit) as error:
        raise BadOption(
            f"engine {spec.name!r}: patch={patch} raised {_described(error)}"
            + (_packed_hint(packed) if packed else "")
        ) from error
    touched = [name for name, state in packed.items() if _state(model, name) != state]
    if touched:
        raise BadOption(
            f"engine {spec.name!r}: patch={patch} assigns {touched[0]}, which has no effect: the "
            "engine moved this weight into a packed copy when it loaded the model",
            "wrap the module's forward, or name a changed checkpoint with model=PATH",
        )


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _packed_parameters(model: Any) -> dict[str, Any]:
    """The state of each parameter that the engine emptied after it packed the values elsewhere."""
    names = [n for n, p in model.named_parameters() if p.numel() == 0]
    return {n: _state(model, n) for n in names}


def _state(model: Any, name: str) -> Any:
    parameter = dict(model.named_parameters()).get(name)
    return None if parameter is None else (tuple(parameter.shape), parameter._version)


def _packed_hint(packed: dict[str, Any]) -> str:
    return (
        f" ({len(packed)} weights, such as {next(iter(packed))}, are empty: the engine packed them)"
    )
