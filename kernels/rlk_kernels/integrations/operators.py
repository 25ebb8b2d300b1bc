"""The canonical operators of a decoder, which of them a user excludes from replacement, and counts
of the replacements' calls.

An integration's `operators(model)` maps each operator of a live model, such as `layers.3.q_proj`,
to the object that computes it. A replacement is `Counted`; any other object is the engine's own.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from rlk_kernels.integrations.errors import NotServed

LAYER = (
    *("attn_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_rope", "k_rope"),
    *("attn", "o_proj", "mlp_norm", "gate_proj", "up_proj", "act", "down_proj"),
    *("router", "experts", "routing_weights"),
    *("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj", "moe_out"),
)
"""Operators of a layer: those of dense layers in order, then those that sparse layers add."""
ROUTED = frozenset(
    ("router", "experts", "routing_weights", "gate_proj", "up_proj", "act", "down_proj", "moe_out")
)
"""Operators of a sparse layer, from the router to the sum; engines compute most of them as one."""
SHARED = frozenset(("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj"))
"""Operators of the experts that every token is sent to, where a sparse layer has some."""
SPARSE = ROUTED | SHARED
"""None of these can be excluded in a sparse model."""
OPERATORS = ("embed", *LAYER, "final_norm", "logits", "logprob")
NORMS = frozenset(name for name in OPERATORS if name.endswith("norm"))


class Counted:
    """A part of an engine that the kernels compute now."""

    rlk_calls = 0
    """Calls outside of compiled code, which counts none."""

    def count(self) -> None:
        if not torch.compiler.is_compiling():
            self.rlk_calls += 1


def excluded_operators(excluded: Iterable[str]) -> frozenset[str]:
    """Returns the operators that stay the engine's own, as a set; raises NotServed for an unknown
    name."""
    excluded = frozenset(excluded)
    if unknown := sorted(excluded.difference(OPERATORS)):
        raise NotServed(f"{', '.join(unknown)}: no such operator; known: {', '.join(OPERATORS)}")
    return excluded


def check_sparse(excluded: frozenset[str]) -> None:
    """Raises NotServed where some of `SPARSE` are excluded for a sparse model."""
    if some := sorted(excluded & SPARSE):
        raise NotServed(
            f"{', '.join(some)} cannot be left in a model with sparse layers, which "
            f"compute {', '.join(op for op in LAYER if op in SPARSE)} as one"
        )


def excludes(excluded: frozenset[str], *fused: str) -> bool:
    """Whether a module that computes these operators as one stays the engine's own."""
    return not excluded.isdisjoint(fused)


@dataclass(frozen=True)
class Replacement:
    """What computes the operators of a live model."""

    replaced: tuple[str, ...]
    not_replaced: tuple[str, ...]
    """The engine's own still computes them."""
    uncalled: tuple[str, ...]
    """Replaced, and never called so far."""


def look(operators: Mapping[str, Any]) -> Replacement:
    """Sorts the result of an integration's `operators(model)`."""
    replaced = {name: o for name, o in operators.items() if isinstance(o, Counted)}
    return Replacement(
        replaced=tuple(replaced),
        not_replaced=tuple(name for name in operators if name not in replaced),
        uncalled=tuple(name for name, o in replaced.items() if not o.rlk_calls),
    )


def check(
    operators: Mapping[str, Any], excluded: Iterable[str] = (), called: bool = True
) -> Replacement:
    """`look`; raises NotServed where an operator that was not excluded is the engine's own, or,
    with `called`, where a replacement was never called."""
    replacement = look(operators)
    excluded = excluded_operators(excluded)
    missing = [name for name in replacement.not_replaced if name.rpartition(".")[2] not in excluded]
    if missing:
        raise NotServed(f"the engine's own still computes {_some(missing)}")
    if called and replacement.uncalled:
        raise NotServed(
            f"the kernels were put in and never called for {_some(replacement.uncalled)}"
        )
    return replacement


class Watch:
    """A hook before each forward: raises NotServed where an operator of a live model has lost its
    kernel (an adapter around it, a new module instead of it)."""

    def __init__(self, model: Any, operators: Callable[[Any], Mapping[str, Any]]) -> None:
        """`operators`: as `check` takes them, of the model, which the hook does not keep alive."""
        self._model, self._operators = weakref.ref(model), operators
        named = operators(model).items()
        self._ours = {name.rpartition(".")[2] for name, o in named if isinstance(o, Counted)}

    def __call__(self, *_inputs: Any) -> None:
        model = self._model()
        if model is None:
            return
        for name, o in self._operators(model).items():
            if not isinstance(o, Counted) and name.rpartition(".")[2] in self._ours:
                raise NotServed(
                    f"{name} is a {type(o).__module__}.{type(o).__qualname__} by now, without the "
                    "kernels that were put in: merge adapters; after another change call "
                    "use_kernels again"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The hook for the copy of the model."""
        copied, model = type(self).__new__(type(self)), self._model()
        vars(copied).update(vars(self))
        if model is not None:
            copied._model = weakref.ref(copy.deepcopy(model, memo))
        return copied

    def __getstate__(self) -> Any:
        raise NotServed("a model that has the kernels cannot be pickled: save its state_dict()")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
