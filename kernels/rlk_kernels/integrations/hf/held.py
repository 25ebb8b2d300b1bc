"""Changes to the whole process that last while any of its models has the kernels."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

Undo = Callable[[], None]


@dataclass
class _Held:
    undo: Undo
    models: int = 0


_held: dict[Hashable, _Held] = {}


def hold(what: Hashable, change: Callable[[], Undo]) -> Undo:
    """Makes the change for the first model that needs it. Returns a function that releases it for
    one model; the last release undoes the change."""
    if what not in _held:
        _held[what] = _Held(change())
    held = _held[what]
    held.models += 1

    def give_up() -> None:
        held.models -= 1
        if not held.models:
            del _held[what]
            held.undo()

    return give_up


def round_as_eager() -> Undo:
    """Has Inductor round each sum to its dtype, as eager code does: where three products read one
    tensor, it would add their gradients and round once."""
    from torch._inductor import config

    before = config.emulate_precision_casts
    config.emulate_precision_casts = True
    return lambda: setattr(config, "emulate_precision_casts", before)
