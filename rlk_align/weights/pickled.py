"""Reads a pickle as data: nothing is imported, called or built.

Torch writes the metadata of a distributed checkpoint as a pickle. A pickle is a program, and
loading a foreign one runs it. Here only its structure is read: a class or function becomes its
name, and a call becomes a record of the call.
"""

import pickletools
from dataclasses import dataclass, field
from typing import Any

_LITERALS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
}
_CONSTANTS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING"),
    *("SHORT_BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_IGNORED = {"PROTO", "FRAME"}


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that the pickle refers to."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Call:
    """The record of a call of `function` in the pickle."""

    function: Any
    arguments: tuple
    state: Any = None
    """The state that the pickle would have set afterwards."""
    items: dict = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """An attribute that the pickle would have set. Raises KeyError."""
        return self.state[name] if isinstance(self.state, dict) else self.items[name]


class NotPlain(ValueError):
    """Raised for a pickle that does more than describe data."""


def read_pickle(data: bytes) -> Any:
    """The structure that a pickle describes. Raises ValueError if the pickle is damaged or uses an
    instruction that plain data does not need."""
    try:
        return _run(data)
    except NotPlain:
        raise
    except (IndexError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the pickle is damaged: {error!r}") from error


def _run(data: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        at = marks.pop()
        values = stack[at:]
        del stack[at:]
        return values

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _CONSTANTS:
            stack.append(argument)
        elif name in _LITERALS:
            stack.append(_LITERALS[name])
        elif name in _IGNORED:
            continue
        elif name == "STOP":
            return stack.pop()
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(Name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Name(module, attribute))
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(name[-1])
            stack[-size:] = [tuple(stack[-size:])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "LIST":
            stack.append(since_mark())
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = since_mark()
            stack[-1].extend(values)
        elif name == "EMPTY_SET":
            stack.append(set())
        elif name == "ADDITEMS":
            members = since_mark()
            stack[-1].update(members)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _items(stack[-1])[key] = value
        elif name == "SETITEMS":
            values = since_mark()
            _items(stack[-1]).update(zip(values[::2], values[1::2], strict=True))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(Call(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Call(Name("", "persistent"), (stack.pop(),)))
        else:
            raise NotPlain(f"the pickle uses {name}, which a description of tensors does not need")
    raise ValueError("the pickle has no end")


def _items(value: Any) -> dict:
    """The items of a dict, or of a call that would have created a kind of dict."""
    return value.items if isinstance(value, Call) else value
