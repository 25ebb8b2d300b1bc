"""The handle that `use_kernels` returns, and the order in which several calls for one model end."""

import weakref
from contextlib import ExitStack
from typing import Any, Self

_open: weakref.WeakKeyDictionary[Any, list[weakref.ref["Handle"]]] = weakref.WeakKeyDictionary()
"""Model -> weak references to its open handles, in the order of their calls. A handle refers to the
model, which a strong reference here would keep alive."""


class Handle:
    """The kernels that one call has installed in a model. `close()`, or the end of a `with`,
    removes them; while the handle of a later call is open, they stay until that handle is closed. A
    second `close()` does nothing."""

    def __init__(self, model: Any, undo: ExitStack) -> None:
        self._undo = undo
        self._all = _open.setdefault(model, [])
        self._self = weakref.ref(self)
        self._all.append(self._self)

    def close(self) -> None:
        if self._self not in self._all:
            return
        index = self._all.index(self._self)
        del self._all[index]
        earlier = self._undo.pop_all()
        later = self._all[index]() if index < len(self._all) else None
        if later is None:
            earlier.close()
            return
        later_undo = later._undo.pop_all()
        later._undo.callback(earlier.close)
        later._undo.callback(later_undo.close)

    def __del__(self) -> None:
        """The handle was dropped: its kernels end with those of the previous call, if there is one,
        and otherwise stay."""
        if self._self not in self._all:
            return
        index = self._all.index(self._self)
        del self._all[index]
        previous = self._all[index - 1]() if index else None
        if previous is not None:
            previous._undo.callback(self._undo.pop_all().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
