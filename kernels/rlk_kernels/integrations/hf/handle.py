"""What `use_kernels` returns, and the order in which several calls for one model are undone."""

import weakref
from contextlib import ExitStack
from typing import Any, Self

_open: weakref.WeakKeyDictionary[Any, list[weakref.ref["Handle"]]] = weakref.WeakKeyDictionary()
"""Model -> its open handles that are still referenced, in the order of their calls. They are held
weakly, because they hold the model."""


class Handle:
    """The kernels that one call put into a model. `close()`, or the end of a `with`, removes them,
    or, while a later call is still open, when that one closes. A second `close()` does nothing."""

    def __init__(self, model: Any, undo: ExitStack) -> None:
        self._undo = undo
        self._all = _open.setdefault(model, [])
        self._self = weakref.ref(self)
        self._all.append(self._self)

    def close(self) -> None:
        if self._self not in self._all:
            return
        place = self._all.index(self._self)
        del self._all[place]
        earlier = self._undo.pop_all()
        later = self._all[place]() if place < len(self._all) else None
        if later is None:
            earlier.close()
            return
        later_undo = later._undo.pop_all()
        later._undo.callback(earlier.close)
        later._undo.callback(later_undo.close)

    def __del__(self) -> None:
        """The handle was dropped: it ends with the call before it; without such a call it stays."""
        if self._self not in self._all:
            return
        place = self._all.index(self._self)
        del self._all[place]
        before = self._all[place - 1]() if place else None
        if before is not None:
            before._undo.callback(self._undo.pop_all().close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()
