"""The inner values of the hybrid layers of an HF decoder: a gated delta net's convolution, decay,
beta and recurrence, and the output of an attention that a gate follows.

transformers computes each by a function of the modeling module, which is wrapped while the hooks
are installed. B = sequences, T = tokens of each in this forward, C = channels, H = heads of v
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.experts import has_kernels
from rlk_align.engines.common.kernel_delta_nets import kernel_attributes, on_kernels
from rlk_align.engines.common.places import Access, End, Place
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.model.operators import OPERATORS

RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
"""The functions of the recurrence: of a whole sequence in chunks, and of one token."""
_AT_NORM: dict[str, End] = {"delta": "input", "gated_norm": "output"}
"""The operators whose values the norm reads and returns."""
CONVOLUTIONS = ("causal_conv1d_fn", "causal_conv1d_update")


def delta_nets(model: Any) -> Iterator[tuple[int, Any]]:
    """(index of the layer, its gated delta net) of each layer that has one."""
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            yield i, layer.linear_attn


def delta_places(layer: str, module: str, heads: int) -> Iterator[Place]:
    """The places of a gated delta net, which is `module`, beside its products; `heads`: those of
    v."""
    yield Place(
        sites=(f"{layer}.conv",), module=module, end="inside", parameters_in=f"{module}.conv1d"
    )
    yield Place(
        sites=(f"{layer}.decay",),
        module=module,
        end="inside",
        parameters_in=module,
        weight=OPERATORS["decay"].tensor,
        bias=OPERATORS["decay"].bias_tensor,
    )
    yield Place(sites=(f"{layer}.beta",), module=module, end="inside")

    def by_token(value: torch.Tensor) -> torch.Tensor:
        """`[B · T · H, V]` -> `[B · T, H, V]`."""
        return value.unflatten(0, (-1, heads))

    access = Access(by_token, by_token, lambda value: value)
    for op, end in _AT_NORM.items():
        yield Place(sites=(f"{layer}.{op}",), module=f"{module}.norm", end=end, access=access)


def modeling_of(model: Any) -> Any:
    """The modeling module of a model with gated delta nets. FSDP changes the classes of the model
    and its layers, but not those of their parts."""
    return sys.modules[type(next(net for _, net in delta_nets(model))).__module__]


def on_hybrid(hooks: SiteHooks, model: Any) -> None:
    """Shows the values inside hybrid layers, and overwrites those that the pass changes."""
    nets = dict(delta_nets(model))
    if not nets:
        return
    attentions = ((i, x.self_attn) for i, x in enumerate(model.model.layers) if i not in nets)
    for i, module in (*nets.items(), *attentions):
        if has_kernels(module):
            on_kernels(hooks, module, i)
    running, modeling = Running(hooks), modeling_of(model)
    hooks.replace(modeling, "ALL_ATTENTION_FUNCTIONS", _Attentions(hooks, modeling))
    if any(map(has_kernels, nets.values())):
        return
    for i, net in nets.items():
        hooks.before(net, functools.partial(running.begin, i), with_kwargs=True)
    for name in CONVOLUTIONS:
        hooks.replace(modeling, name, running.convolution(getattr(modeling, name)))
    for name in RULES:
        hooks.replace(modeling, name, running.rule(getattr(modeling, name)))


class Running:
    """The gated delta net that is running."""

    def __init__(self, hooks: SiteHooks) -> None:
        self._hooks = hooks

    def begin(self, layer: int, _module: Any, inputs: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else inputs[0]
        self._layer, self._length = layer, hidden.shape[1]

    def _visit(self, op: str, value: torch.Tensor) -> None:
        self._hooks.visit_inside(f"layers.{self._layer}.{op}", value)

    def convolution(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def convolution(*args: Any, **kwargs: Any) -> Any:
            out = compute(*args, **kwargs)
            # [B, C, T], after the rows before this forward, which a cache adds.
            self._visit("conv", out[:, :, -self._length :].transpose(1, 2))
            return out

        return convolution

    def rule(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def rule(*args: Any, **kwargs: Any) -> Any:
            self._visit("decay", kwargs["g"])
            self._visit("beta", kwargs["beta"])
            return compute(*args, **kwargs)

        return rule


class _Attentions:
    """transformers' attentions, whose outputs `[B, T, H, D]` are shown."""

    def __init__(self, hooks: SiteHooks, modeling: Any) -> None:
        self._hooks, self._original = hooks, modeling.ALL_ATTENTION_FUNCTIONS

    def get_interface(self, name: str, default: Any) -> Any:
        attend = self._original.get_interface(name, default)

        def shown(module: Any, *args: Any, **kwargs: Any) -> Any:
            out, weights = attend(module, *args, **kwargs)
            self._hooks.visit_inside(f"layers.{module.layer_idx}.attn", out)
            return out, weights

        return shown


def delta_attributes(model: Any, dtype: str) -> dict[str, Any]:
    """How a live model's gated delta nets compute, beside their weights; empty without them.
    `dtype`: that of the A_log that they compute with."""
    nets = dict(delta_nets(model))
    if not nets:
        return {}
    # transformers' functions and the kernels take the state as they return it, in float32.
    dtypes = {"delta_a_log_dtype": dtype, "delta_state_dtype": "float32"}
    net = next(iter(nets.values()))
    if has_kernels(net):
        return dtypes | kernel_attributes(net)
    modeling = modeling_of(model)
    norm, rule = (inspect.signature(f) for f in (modeling.l2norm, getattr(modeling, RULES[0])))
    return dtypes | {
        "delta_eps": norm.parameters["eps"].default,
        "delta_chunk": rule.parameters["chunk_size"].default,
    }
