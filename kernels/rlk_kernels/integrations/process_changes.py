"""Changes to the whole process, which last while a model of the process has the kernels."""

from collections.abc import Callable, Hashable

Undo = Callable[[], None]
_active: dict[Hashable, tuple[Undo, int]] = {}
"""Key -> (the function that undoes the change, the number of models that need the change)."""


def change_process(key: Hashable, change: Callable[[], Undo]) -> Undo:
    """Makes a change for the first model that needs it. Returns a function that releases the change
    for one model; the last release undoes it."""
    undo, models = _active[key] if key in _active else (change(), 0)
    _active[key] = undo, models + 1

    def release() -> None:
        undo, models = _active[key]
        if models > 1:
            _active[key] = undo, models - 1
        else:
            del _active[key]
            undo()

    return release


def round_as_eager() -> Undo:
    """Makes Inductor round each sum to its dtype, as eager code does. Otherwise it adds up the
    gradients of three products that read one tensor, and rounds once."""
    from torch._inductor import config

    before = config.emulate_precision_casts
    config.emulate_precision_casts = True
    return lambda: setattr(config, "emulate_precision_casts", before)
