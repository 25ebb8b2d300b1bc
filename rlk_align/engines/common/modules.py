"""The modules of a live model of any family: their weights, and what passes through them.

A module is observed if it owns parameters, or if it has neither parameters nor submodules, as
activations do. Its sites are `NAME:in` and `NAME:out`, where NAME is its path in the live model.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord, record_parameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import LiveRows
from rlk_align.trace.writer import PassWriter

OUT, IN = ":out", ":in"
LATER = ":later"
"""The suffix of a module's name that stands for its calls after the first of a forward."""
NOT_CALLED = "never called as a module"
SEVERAL_INPUTS = "reads several tensors"
OTHER_ROWS = "its rows are not the tokens"

_MOST_INPUTS = 2
_ROUNDED = 0.02
"""The largest relative error of a sum that was rounded to a dtype of eight bits or more."""

ReadWeight = Callable[[Any, str, torch.Tensor], torch.Tensor | None]
"""(module, name of its parameter, the parameter) -> the values that it computes with; None if they
cannot be read."""


def observed_modules(model: Any) -> dict[str, Any]:
    """Path -> module, in the order of the model."""
    return {
        path: module
        for path, module in model.named_modules()
        if path and (_own(module) or not (_has_state(module) or any(module.children())))
    }


def _own(module: Any) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(recurse=False))


def _stored_buffers(module: Any) -> dict[str, torch.Tensor]:
    """The buffers that a checkpoint has; those of an engine's own begin with an underscore."""
    skipped = module._non_persistent_buffers_set
    buffers = dict(module.named_buffers(recurse=False))
    return {n: b for n, b in buffers.items() if n not in skipped and not n.startswith("_")}


def _has_state(module: Any) -> bool:
    return any(True for _ in (*module.parameters(), *module.buffers()))


def module_places(model: Any) -> list[Place]:
    """The places of the observed modules, for the record of the engine's code."""
    return [Place(sites=(path,), module=path) for path in observed_modules(model)]


def module_weights(model: Any, read: ReadWeight) -> Iterator[ParameterRecord]:
    """Every parameter and stored buffer of a live model, by its path there. Of one with more than
    two dimensions, all but the last count its rows."""
    for path, module in model.named_modules():
        for name, value in {**_own(module), **_stored_buffers(module)}.items():
            live = read(module, name, value.detach())
            if live is None or not live.numel():
                continue
            flat = as_rows(live)
            full = f"{path}.{name}" if path else name
            yield record_parameter(LiveParameter(full, flat))


def as_rows(value: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are counted by all dimensions but the last; a vector for a number."""
    if value.dim() > 2:
        return value.reshape(-1, value.shape[-1])
    return value if value.dim() else value.reshape(1)


class ModuleTaps:
    """Hooks on every observed module of a model; of a module that one forward calls several times,
    the first call is recorded."""

    def __init__(self, hooks: Hooks, model: Any, tap: PassWriter) -> None:
        self._tap = tap
        self._rows: LiveRows | None = None
        self._grid: tuple[int, int] = (0, 0)
        self._seen: set[str] = set()
        self.reasons: dict[str, str] = {}
        """Module -> why its values are not recorded."""
        self._inputs: dict[str, list[torch.Tensor]] = {}
        """Module -> copies of its inputs while it runs, because it may overwrite them."""
        for path, module in observed_modules(model).items():
            self.reasons[path] = NOT_CALLED
            hooks.before(module, self._before(path), with_kwargs=True)
            after = self._after(path, bool(_own(module)))
            hooks.callback(module.register_forward_hook(after, with_kwargs=True).remove)

    def at(self, rows: LiveRows, grid: tuple[int, int]) -> None:
        """Declares the rows of the next forward, and the shape of its grid of tokens."""
        self._rows, self._grid = rows, grid
        self._seen.clear()

    def _before(self, path: str) -> Callable[..., None]:
        def keep(_module: Any, args: Any, kwargs: Any) -> None:
            inputs = _tensors((*args, *kwargs.values()))
            if self._rows is not None and path not in self._seen:
                few = len(inputs) <= _MOST_INPUTS
                self._inputs[path] = [x.detach().clone() for x in inputs] if few else inputs

        return keep

    def _after(self, path: str, has_weights: bool) -> Callable[..., None]:
        def see(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if path not in self._inputs:
                if path in self._seen:
                    self.reasons[path + LATER] = "called several times in a forward: the first"
                return
            self._seen.add(path)
            outputs, inputs = _tensors(_flat(output)), self._inputs.pop(path)
            passed = _tensors((*args, *kwargs.values()))
            same = bool(passed and outputs) and outputs[0].data_ptr() == passed[0].data_ptr()
            if same and not has_weights:
                self.reasons[path] = "returns its input"
                return
            reason = self._record(path, inputs, outputs)
            if reason:
                self.reasons[path] = reason
            else:
                self.reasons.pop(path, None)

        return see

    def _record(self, path: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> str:
        """Records one call; returns why it cannot, or nothing."""
        x = _one_input(inputs, outputs)
        if x is None:
            return SEVERAL_INPUTS
        y = outputs[0]
        if len(outputs) > 1 and len(inputs) == 1:
            if outputs[1].dim() != 1:
                return "returns several tensors"
            y = y + outputs[1]  # a bias that a later operator adds
        assert self._rows is not None
        seen = [self._token_rows(value) for value in (x, y)]
        if seen[0] is None or seen[1] is None:
            return OTHER_ROWS
        for end, rows in zip((IN, OUT), seen, strict=True):
            self._tap(path + end, rows, self._rows.sample, self._rows.position)
        return ""

    def _token_rows(self, value: torch.Tensor) -> torch.Tensor | None:
        """`[N, F]`, the rows of the trace; None where the value's dimensions do not count tokens.
        Of `[B, H, S, D]` the heads are moved behind the tokens."""
        assert self._rows is not None
        batch, length = self._grid
        if value.dtype == torch.int64:
            value = value.int()
        if value.dim() == 4 and value.shape[1] == value.shape[2] == length:
            return None
        if value.dim() >= 2 and value.shape[:2] == (batch, length):
            value = value.reshape(batch * length, -1)
        elif value.dim() == 4 and (value.shape[0], value.shape[2]) == (batch, length):
            value = value.transpose(1, 2).reshape(batch * length, -1)
        elif value.shape[:1] == (batch * length,):
            value = value.reshape(batch * length, -1)
        else:
            return None
        index = self._rows.index
        return value if index is None else value[index]


def _one_input(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> torch.Tensor | None:
    """The tensor that the first output is computed from; None if there are several, or none.

    A norm that takes the residual stream as well returns two tensors: beside its own output the sum
    of both inputs, which it normed, or the stream as it was.
    """
    if not inputs or not outputs or len(inputs) > _MOST_INPUTS:
        return None
    if len(inputs) == 1:
        return inputs[0]
    x, stream = inputs
    if len(outputs) != len(inputs) or not outputs[1].shape == stream.shape == x.shape:
        return None
    if torch.equal(outputs[1], stream):
        return x
    total = x.double() + stream.double()
    added = bool((outputs[1].double() - total).norm() <= _ROUNDED * total.norm())
    return outputs[1] if added else None


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [x for x in values if isinstance(x, torch.Tensor)]


def _flat(output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)
