"""Requests to compile a kernel, as text for another process.

The text is JSON. Values that JSON lacks are written as `{kind: content}`, and functions and classes
as their module and name. Only names of Triton and of this package are read.
"""

import dataclasses
import importlib
import json
from enum import Enum
from typing import Any

_MODULES = ("rlk_kernels", "triton")


def to_text(*values: Any) -> str:
    """Values as text. Raises TypeError for a value that cannot be written."""
    return json.dumps([_written(x) for x in values])


def from_text(text: str) -> list[Any]:
    """The values in a text of `to_text`. Raises ValueError for an unknown kind or name."""
    return [_read(x) for x in json.loads(text)]


def _written(x: Any) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, dict):
        return {"dict": [_written(item) for item in x.items()]}
    if isinstance(x, tuple | list):
        return {"tuple" if isinstance(x, tuple) else "list": [_written(y) for y in x]}
    if isinstance(x, Enum):
        return {"instance": [_name(type(x)), _written(x.value)]}
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = [_written(getattr(x, f.name)) for f in dataclasses.fields(x) if f.init]
        return {"instance": [_name(type(x)), *fields]}
    form = _form(x)
    return {"name": _name(x)} if form is None else {"instance": [_name(type(x)), _written(form)]}


def _form(x: Any) -> Any:
    """The value from which an object of Triton's language can be constructed; None for a function
    or a class."""
    import triton.language as tl

    if isinstance(x, tl.dtype) and type(x) is tl.dtype:
        return x.name
    return x.value if isinstance(x, tl.constexpr) else None


def _name(x: Any) -> list[str]:
    module, name = str(getattr(x, "__module__", "")), str(getattr(x, "__name__", ""))
    if _named(module, name) is not x:
        raise TypeError(f"{x!r} cannot be written")
    return [module, name]


def _named(module: str, name: str) -> Any:
    if module.partition(".")[0] not in _MODULES:
        return None
    return getattr(importlib.import_module(module), name, None)


def _read(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    [(kind, content)] = x.items()
    if kind in ("name", "instance"):
        (module, name), *arguments = [content] if kind == "name" else content
        named = _named(module, name)
        if named is None:
            raise ValueError(f"unknown name {module}.{name}")
        return named if kind == "name" else named(*map(_read, arguments))
    readers = {"tuple": tuple, "list": list, "dict": dict}
    if kind not in readers:
        raise ValueError(f"unknown kind {kind!r}")
    return readers[kind](map(_read, content))
