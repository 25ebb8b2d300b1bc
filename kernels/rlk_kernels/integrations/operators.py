"""The canonical operators of a decoder, those that a user excludes from replacement, and the checks
that each replacement is in the model and runs.

An integration's `operators(model)` maps each operator of a live model, such as `layers.3.q_proj`,
to the object that computes it. A replacement is `Counted`; any other object belongs to the engine.
"""

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch

from rlk_kernels.integrations.errors import NotSupported

LAYER = (
    *("attn_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "v_norm"),
    *("q_rope", "k_rope", "attn", "o_proj"),
    *("q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "latent_attn", "attn_gate"),
    *("qkv_in", "z", "b", "a", "conv", "decay", "beta", "delta", "gated_norm", "out_proj"),
    *("attn_post_norm", "mlp_norm"),
    *("gate_proj", "up_proj", "act", "down_proj"),
    *("router", "experts", "routing_weights"),
    *("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj"),
    *("shared_gate", "moe_out", "mlp_post_norm"),
)
"""The operators of a layer: those of dense layers in order, with attention, latent attention or a
gated delta net, those that sparse layers add, and the norm after both."""
LATENT = frozenset(("q_rope", "k_rope", "latent_attn"))
"""The operators that latent attention computes as one. They cannot be excluded there."""
DELTA_NET = frozenset(
    ("qkv_in", "z", "b", "a", "conv", "decay", "beta", "delta", "gated_norm", "out_proj")
)
"""The operators of a gated delta net. They cannot be excluded."""
BY_DELTA_NET = ("conv", "decay", "beta", "delta")
"""Those that the module itself computes; the products and the norm have modules of their own."""
ROUTED = frozenset(
    ("router", "experts", "routing_weights", "gate_proj", "up_proj", "act", "down_proj", "moe_out")
)
"""The operators of a sparse layer from the router to the sum. Engines compute most of them as
one."""
SHARED = frozenset(("shared_gate_proj", "shared_up_proj", "shared_act", "shared_down_proj"))
"""The operators of the experts that process every token, which some sparse layers have."""
SPARSE = ROUTED | SHARED | {"shared_gate"}
"""The operators that cannot be excluded in a sparse model."""
OPERATORS = ("embed", *LAYER, "final_norm", "logits", "logprob")
NORMS = frozenset(name for name in OPERATORS if name.endswith("norm")) - DELTA_NET
POST_NORMS = frozenset(("attn_post_norm", "mlp_post_norm"))
"""The norms that only some families have."""
LORA = "lora"
"""What follows the name of a projection (`layers.3.q_proj.lora`) for the update of its LoRA
adapter, if it has one. The kernels compute all of them; none can be excluded."""


_NORMS = {
    **{"attn_norm": "input_layernorm", "attn_post_norm": "post_self_attn_layernorm"},
    **{"mlp_norm": "post_attention_layernorm", "mlp_post_norm": "post_mlp_layernorm"},
}
_NORMS_OF_BRANCHES = {
    **{"attn_norm": "input_layernorm", "attn_post_norm": "post_attention_layernorm"},
    **{"mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
}
"""The same where the norm after attention norms its branch, and not the stream."""


def norms(layer: Any) -> dict[str, Any]:
    """Operator -> the norm of a layer before or after attention or MLP; None if it has none."""
    names = _NORMS_OF_BRANCHES if hasattr(layer, "post_feedforward_layernorm") else _NORMS
    return {op: getattr(layer, name, None) for op, name in names.items()}


def head_norms(attention: Any) -> dict[str, Any]:
    """Operator -> the norm of q, k or v; None if a layer has none. HunYuan has names of its own."""
    names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm", "v_norm": ""}
    return {
        op: getattr(attention, op, None) or getattr(attention, name, None)
        for op, name in names.items()
    }


_ROTATED_WITH_WINDOW = ("cohere2",)
"""Families whose layers rotate q and k if they have a window."""


def rotates(attention: Any) -> bool:
    """Whether a layer rotates q and k."""
    window = getattr(attention, "sliding_window", None)
    if getattr(getattr(attention, "config", None), "model_type", "") in _ROTATED_WITH_WINDOW:
        return window is not None
    if hasattr(attention, "apply_rope_all_layers"):  # EXAONE 4 in vLLM
        return bool(window or attention.apply_rope_all_layers)
    if hasattr(attention, "sliding_window_pattern"):  # EXAONE 4 in transformers
        return window is None or attention.is_sliding
    return bool(getattr(attention, "use_rope", True))


def mlp_of(layer: Any) -> Any:
    """A layer's MLP, or its block of experts."""
    return getattr(layer, "mlp", None) or layer.block_sparse_moe


def mlp_linears(mlp: Any) -> dict[str, Any]:
    """Operator -> the linear of a dense MLP that computes it; no gate_proj if it has no gate, and
    one linear for gate and up if it fuses them."""
    if (both := getattr(mlp, "gate_up_proj", None)) is not None:
        linears = {"gate_proj": both, "up_proj": both}
    elif (gate := getattr(mlp, "gate_proj", None)) is not None:
        linears = {"gate_proj": gate, "up_proj": mlp.up_proj}
    else:
        linears = {"up_proj": getattr(mlp, "up_proj", None) or mlp.c_fc}
    return linears | {"down_proj": getattr(mlp, "down_proj", None) or mlp.c_proj}


def shared_experts(block: Any) -> Any:
    """The experts of a block that process every token; None if it has none."""
    return getattr(block, "shared_experts", None) or getattr(block, "shared_expert", None)


class Counted:
    """A part of an engine that the kernels replace."""

    rlk_calls = 0
    """The number of calls. Compiled code does not count its calls."""

    def count(self) -> None:
        if not torch.compiler.is_compiling():
            self.rlk_calls += 1


@functools.cache
def _derived(kind: type, base: Any) -> type:
    """A class with the bases `kind` and `base`. Its module is base's, by which transformers finds
    functions."""
    return type(f"Rlk{base.__name__}", (kind, base), {"__module__": base.__module__})


def become(module: Any, kind: type[Counted], undo: ExitStack) -> None:
    """Gives a live module a class of the kernels, unless it has it, until `undo` is closed."""
    if not isinstance(module, kind):
        undo.callback(vars(module).pop, "rlk_calls", None)
        undo.callback(setattr, module, "__class__", type(module))
        module.__class__ = _derived(kind, type(module))  # type: ignore[arg-type]


def excluded_operators(excluded: Iterable[str]) -> frozenset[str]:
    """The operators that the engine continues to compute, as a set. Raises NotSupported for an
    unknown name."""
    excluded = frozenset(excluded)
    if unknown := sorted(excluded.difference(OPERATORS)):
        raise NotSupported(
            f"{', '.join(unknown)}: no such operator; choose from {', '.join(OPERATORS)}"
        )
    return excluded


def check_sparse(excluded: frozenset[str]) -> None:
    """Raises NotSupported if operators in `SPARSE` are excluded for a sparse model."""
    if some := sorted(excluded & SPARSE):
        raise NotSupported(
            f"{', '.join(some)} cannot be excluded in a model with sparse layers, which "
            f"compute {', '.join(op for op in LAYER if op in SPARSE)} as one"
        )


def check_delta_net(excluded: frozenset[str]) -> None:
    """Raises NotSupported if operators of gated delta nets are excluded for a model with some, or
    one of attention and its gate."""
    if some := sorted(excluded & DELTA_NET):
        raise NotSupported(
            f"{', '.join(some)} cannot be excluded in a model with gated delta nets, which compute "
            f"{', '.join(op for op in LAYER if op in DELTA_NET)} as one"
        )
    if len(excluded & {"attn", "attn_gate"}) == 1:
        raise NotSupported("attn and attn_gate cannot be excluded alone: exclude both, or none")


def check_latent(excluded: frozenset[str]) -> None:
    """Raises NotSupported if operators in `LATENT` are excluded for a model with latent
    attention."""
    if some := sorted(excluded & LATENT):
        raise NotSupported(
            f"{', '.join(some)} cannot be excluded in a model with latent attention, which "
            f"computes {', '.join(op for op in LAYER if op in LATENT)} as one"
        )


def excludes(excluded: frozenset[str], *fused: str) -> bool:
    """Whether the engine continues to compute these operators, which one module fuses."""
    return not excluded.isdisjoint(fused)


@dataclass(frozen=True)
class Replacement:
    """The operators of a live model, by the code that computes them."""

    replaced: tuple[str, ...]
    not_replaced: tuple[str, ...]
    """The engine computes these operators."""
    uncalled: tuple[str, ...]
    """These operators are replaced, and the replacements were not called yet."""


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
    """Returns `look(operators)`. Raises NotSupported if the engine computes an operator that was
    not excluded, or, with `called`, if a replacement was never called."""
    replacement = look(operators)
    excluded = excluded_operators(excluded)
    missing = [name for name in replacement.not_replaced if name.rpartition(".")[2] not in excluded]
    if missing:
        raise NotSupported(f"the engine still computes {_some(missing)}")
    if called and replacement.uncalled:
        raise NotSupported(
            f"the kernels were installed and never called for {_some(replacement.uncalled)}"
        )
    return replacement


class Watch:
    """A hook before each forward, which raises NotSupported if an operator of a live model has lost
    its kernel: an adapter wraps it, or a new module replaces it."""

    def __init__(self, model: Any, operators: Callable[[Any], Mapping[str, Any]]) -> None:
        """operators: returns a model's operators for `check`. The hook does not keep the model
        alive."""
        self._model, self._operators = weakref.ref(model), operators
        named = operators(model).items()
        ours = {name.rpartition(".")[2] for name, o in named if isinstance(o, Counted)}
        self._ours = ours | {LORA}

    def __call__(self, *_inputs: Any) -> None:
        model = self._model()
        if model is None:
            return
        for name, o in self._operators(model).items():
            if not isinstance(o, Counted) and name.rpartition(".")[2] in self._ours:
                raise NotSupported(
                    f"{name} is now a {type(o).__module__}.{type(o).__qualname__} without the "
                    "kernels that were installed: merge adapters; after another change call "
                    "use_kernels again"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """The hook of the model's copy."""
        copied, model = type(self).__new__(type(self)), self._model()
        vars(copied).update(vars(self))
        if model is not None:
            copied._model = weakref.ref(copy.deepcopy(model, memo))
        return copied

    def __getstate__(self) -> Any:
        raise NotSupported("a model with the kernels cannot be pickled: save its state_dict()")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
