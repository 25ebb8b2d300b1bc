"""Commands whose flags are the fields of a request."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from rlk_align.cli import options

Command = Callable[..., None]


def takes(request: type, **specific: Any) -> Callable[[Command], Command]:
    """Decorates the function of a command whose first parameter is a request, a dataclass of
    `rlk_align.api`: each field of the request becomes a flag with the field's default.

    `specific`: the annotated types of fields that no other command has; their flags come first. The
    types of all other fields are in `options.FLAGS`. The function's other parameters are kept: its
    arguments precede these flags, and its keyword parameters follow them.
    """
    known = specific | options.FLAGS
    flags = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=known[field.name],
        )
        for field in sorted(fields(request), key=lambda field: list(known).index(field.name))
    ]

    def decorate(function: Command) -> Command:
        _, *others = inspect.signature(function).parameters.values()
        arguments = [p for p in others if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        more = [p for p in others if p.kind is inspect.Parameter.KEYWORD_ONLY]
        parameters = [*arguments, *flags, *more]

        def command(**values: Any) -> None:
            asked = request(**{flag.name: values.pop(flag.name) for flag in flags})
            function(asked, **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate
