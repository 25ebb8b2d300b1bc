"""The gated delta nets of a live vLLM decoder on a CPU: their values, weights and attributes.

vLLM 0.32 computes them in one custom operator, `cpu_gdn_attention_core`: first the tokens of decode
steps, then those of prefills. Its parts are functions of the operator's module, and are wrapped
while the hooks are installed. T = packed tokens, H = heads of v
"""

import functools
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlk_align.engines.common.attributes import per_layer
from rlk_align.engines.common.experts import has_kernels
from rlk_align.engines.common.fused_places import place_of
from rlk_align.engines.common.kernel_delta_nets import kernel_attributes, on_kernels
from rlk_align.engines.common.layout import of_fused
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape

FUSED_IN_DECODE = "vLLM's decode step computes it in one kernel with the recurrence"
HIDDEN_IN_DECODE = ("decay", "beta")


def delta_nets(model: Any) -> Iterator[tuple[int, Any]]:
    """(index of the layer, its gated delta net) of each layer that has one."""
    for i, layer in enumerate(model.model.layers):
        if hasattr(layer, "linear_attn"):
            yield i, layer.linear_attn


def delta_places(
    model: Any, layer: str, module: str, shape: ModelShape, tp: int
) -> Iterator[Place]:
    """The places of a layer's gated delta net, which is `module`, in a model of `tp` ranks."""

    def place(path: str, *ops: str, **more: Any) -> Place:
        sites = tuple(f"{layer}.{op}" for op in ops)
        return place_of(model, shape, tp, f"{module}{path}", sites, **more)

    for name, ops in (("in_proj_qkvz", ("qkv_in", "z")), ("in_proj_ba", ("b", "a"))):
        product, stored = place(f".{name}", *ops), f"linear_attn.{name}"
        if stored in shape.family.fused:
            product = replace(product, layout=of_fused(layer, stored, shape, tp))
        yield product
    decay = OPERATORS["decay"]
    yield place("", "conv", end="inside", parameters_in=f"{module}.conv1d")
    yield place(
        *("", "decay"),
        end="inside",
        parameters_in=module,
        weight=decay.tensor,
        bias=decay.bias_tensor,
    )
    yield place("", "beta", end="inside")
    yield place(".norm", "delta", end="input")
    yield place(".norm", "gated_norm")
    yield place(".out_proj", "out_proj")


def on_delta_nets(hooks: SiteHooks, model: Any, decode: bool) -> None:
    """Shows the values inside gated delta nets, and overwrites those that the pass changes.
    `decode`: whether the pass samples, so that vLLM's own nets do not show decays and betas."""
    nets = {}
    for i, net in delta_nets(model):
        if has_kernels(net):
            on_kernels(hooks, net, i)
        else:
            nets[i] = net
    if not nets:
        return
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    running = _Running(hooks, decode)
    for i, net in nets.items():
        hooks.before(net, functools.partial(running.begin, i), with_kwargs=True)
        hooks.replace(net, "rearrange_mixed_qkv", running.convolved(net.rearrange_mixed_qkv))
    gate = gdn_attention.ops.fused_gdn_gating_cpu
    hooks.replace(gdn_attention.ops, "fused_gdn_gating_cpu", running.gated(gate))


class _Running:
    """The gated delta net that is running."""

    def __init__(self, hooks: SiteHooks, decode: bool) -> None:
        self._hooks, self._decode = hooks, decode
        self._layer = -1
        self._rows = slice(0, 0)

    def begin(self, layer: int, *_: Any) -> None:
        self._layer, self._rows = layer, slice(0, 0)

    def convolved(self, rearrange: Any) -> Any:
        """Takes the convolved q, k and v of the decode steps, then those of the prefills."""

        @functools.wraps(rearrange)
        def convolved(mixed: torch.Tensor) -> Any:
            self._rows = slice(self._rows.stop, self._rows.stop + len(mixed))
            self._hooks.visit_inside(f"layers.{self._layer}.conv", mixed, self._rows)
            return rearrange(mixed)

        return convolved

    def gated(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def gated(*args: Any, **kwargs: Any) -> Any:
            values = compute(*args, **kwargs)
            for op, value in zip(HIDDEN_IN_DECODE, values, strict=True):
                if not self._decode:
                    rows = value.view(-1, value.shape[-1])
                    self._hooks.visit_inside(f"layers.{self._layer}.{op}", rows, self._rows)
            return values

        return gated


def convolution_weight(module: Any) -> torch.Tensor:
    """The weight `[C, 1, K]` that a convolution computes with, also where vLLM has packed it."""
    packed, unpacked = module.weight.detach(), getattr(module, "_cpu_unpacked_conv_weight", None)
    if unpacked is None:
        return packed
    from vllm._custom_ops import causal_conv1d_weight_pack

    # It computes with the packed weight, which has changed if the copy does not give it.
    same = torch.equal(causal_conv1d_weight_pack(unpacked.detach().clone()), packed)
    return (unpacked if same else packed).detach().reshape(len(packed), 1, -1)


def decay_dtype(net: Any) -> torch.dtype:
    """The dtype of the A_log that a gated delta net computes with: that of the model, to which the
    kernels round it, or float32."""
    return net.in_proj_ba.weight.dtype if has_kernels(net) else net.A_log.dtype


def as_computed(model: Any, parameter: LiveParameter) -> LiveParameter:
    """A canonical parameter with the values that gated delta nets compute with."""
    _, _, name = parameter.name.partition(".")
    layer, _, operator = name.partition(".")
    if operator not in ("decay", "decay.bias"):
        return parameter
    net = dict(delta_nets(model))[int(layer)]
    if not has_kernels(net):
        return parameter
    return replace(parameter, value=parameter.value.to(decay_dtype(net)))


def delta_attributes(model: Any) -> dict[str, Any]:
    """How a live model's gated delta nets compute, beside their weights; empty without them."""
    nets = dict(delta_nets(model))
    if not nets:
        return {}
    from vllm import _custom_ops

    def of_nets(name: str, values: Sequence[Any]) -> dict[str, Any]:
        return per_layer(name, list(values), list(nets))

    dtypes = {
        **of_nets("delta_a_log_dtype", [_name(decay_dtype(net)) for net in nets.values()]),
        **of_nets("delta_state_dtype", [_name(n.kv_cache[1].dtype) for n in nets.values()]),
    }
    net = next(iter(nets.values()))
    if has_kernels(net):
        return dtypes | kernel_attributes(net)
    rule = inspect.signature(_custom_ops.chunk_gated_delta_rule_cpu)
    # The chunk is a constant of its kernel.
    return dtypes | {"delta_eps": rule.parameters["eps"].default, "delta_chunk": 64}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
