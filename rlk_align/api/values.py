"""Converts arguments of the public functions to values of flags.

An argument that cannot be the value of a flag raises BadOption with its name.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar

from rlk_align.api.options import names
from rlk_align.errors import BadOption

R = TypeVar("R")


def request(kind: type[R], **arguments: Any) -> R:
    """Makes a request from the arguments of a public function. Raises BadOption."""
    return kind(**converted(arguments))


def converted(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Converts each argument to the value of its flag. Raises BadOption for a wrong type."""
    return {
        name: None if value is None else _KINDS.get(name, _unchanged)(name, value)
        for name, value in arguments.items()
    }


def text(name: str, value: Any) -> str:
    """Returns a text, or a path as text."""
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if isinstance(path, str):
            return path
    raise BadOption(f"{name} is {value!r}; it must be text")


def _path(name: str, value: Any) -> Path:
    return Path(text(name, value))


def _number(name: str, value: Any) -> int:
    if not _is_whole(value):
        raise BadOption(f"{name} is {value!r}; it must be a whole number")
    return int(value)


def _is_whole(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadOption(f"{name} is {value!r}; it must be True or False")
    return value


def _names(name: str, value: Any) -> str:
    """Returns names separated by commas, from such a text or from a list."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise BadOption(f"{name} is {value!r}; it must be text, or a list of names")
    if not value and name != "allow_mismatch":
        raise BadOption(f"{name} is an empty list", "omit it for all")
    return ",".join(value)


def _layers(name: str, value: Any) -> str:
    """Returns `A-B`, from such a text, one layer, or a list of consecutive layers."""
    if isinstance(value, str):
        return value
    layers = [value] if _is_whole(value) else value
    if not isinstance(layers, Sequence) or not layers or not all(map(_is_whole, layers)):
        raise BadOption(f"{name} is {value!r}; it must be text, a layer, or a list of layers")
    if list(layers) != list(range(layers[0], layers[0] + len(layers))):
        raise BadOption(
            f"{name} is {value!r}; it must be consecutive layers",
            f'"{min(layers)}-{max(layers)}" includes all of them',
        )
    return f"{layers[0]}-{layers[-1]}"


def _prompts(name: str, value: Any) -> Path | tuple[Any, ...]:
    if isinstance(value, str | os.PathLike):
        return _path(name, value)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise BadOption(f"{name} is {value!r}; it must be a file, or a list of prompts")
    return tuple(value)


def _unchanged(_name: str, value: Any) -> Any:
    return value


_KINDS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("engine", "rollout", "train", "kernels", "trace_budget"), text),
    **dict.fromkeys(("model", "contract", "tokens", "run", "later"), text),
    **dict.fromkeys(("run_dir", "out"), _path),
    **dict.fromkeys(("max_new_tokens", "seed"), _number),
    **dict.fromkeys(("fresh", "production", "recompute", "perturb_lora"), _flag),
    **dict.fromkeys(("sites", "edges"), _names),
    "allow_mismatch": lambda name, value: names(_names(name, value)),
    **{"layers": _layers, "prompts": _prompts},
}
"""Argument -> the function that converts it to the value of its flag."""
