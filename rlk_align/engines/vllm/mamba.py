"""The state-space models (Mamba-2) of a live vLLM decoder on a CPU: their values and weights.

vLLM 0.32 computes them in one custom operator, `mamba_mixer2`: first the tokens of prefills, then
those of decode steps, which come before them in the packed rows. Its parts are functions of
modules, and are wrapped while the hooks are installed.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.attributes import per_layer
from rlk_align.engines.common.fused_places import place_of
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.model.operators import OPERATORS
from rlk_align.model.shape import ModelShape

STEPS = ("dt", "dt_a")
"""The operators that a step of decode computes in one kernel with the scan."""
_DECAY = "A"
"""The name of vLLM's weight for A_log: −exp(A_log)."""


def mambas(model: Any) -> Iterator[tuple[int, Any]]:
    """(index of the layer, its state-space model) of each layer that has one."""
    for i, layer in enumerate(model.model.layers):
        if path := mamba_path(layer):
            yield i, layer.get_submodule(path)


def mamba_path(layer: Any) -> str:
    """The path of a layer's state-space model; empty if the layer has none."""
    every = layer.named_modules()
    return next((path for path, m in every if hasattr(m, "conv1d") and hasattr(m, _DECAY)), "")


def mamba_places(model: Any, layer: str, module: str, shape: ModelShape) -> Iterator[Place]:
    """The places of a layer's state-space model, which is `module`, beside its products."""

    def place(path: str, op: str, **more: Any) -> Place:
        return place_of(model, shape, 1, f"{module}{path}", (f"{layer}.{op}",), **more)

    yield place("", "conv", end="inside", parameters_in=f"{module}.conv1d")
    for op, weight in zip(STEPS, (OPERATORS["dt"].tensor, _DECAY), strict=True):
        yield place("", op, end="inside", parameters_in=module, weight=weight)
    scan = OPERATORS["scan"].tensor
    yield place(".norm", "scan", end="input", parameters_in=module, weight=scan)
    yield place(".norm", "mamba_norm" if shape.scan_norm else "mamba_gate")


def on_mambas(hooks: SiteHooks, model: Any) -> None:
    """Shows the values inside state-space models, and overwrites those that the pass changes, but
    for dt · A, of which the kernel keeps no tensor."""
    nets = dict(mambas(model))
    if not nets:
        return
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba import mamba_mixer2

    running = _Running(hooks)
    for i, net in nets.items():
        hooks.before(net, functools.partial(running.begin, i), with_kwargs=True)
    for name, wrap in (
        ("causal_conv1d_fn", running.prefilled),
        ("causal_conv1d_update", running.decoded),
    ):
        hooks.replace(mamba_mixer2, name, wrap(getattr(mamba_mixer2, name)))
    scan = "mamba_chunk_scan_fwd_cpu"
    hooks.replace(_custom_ops, scan, running.scanned(getattr(_custom_ops, scan)))


class _Running:
    """The state-space model that is running."""

    def __init__(self, hooks: SiteHooks) -> None:
        self._hooks = hooks
        self._layer, self._tokens = -1, 0

    def begin(self, layer: int, _module: Any, inputs: Any, kwargs: Any) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else inputs[0]
        self._layer, self._tokens = layer, len(hidden)

    def _visit(self, op: str, rows: torch.Tensor, part: slice) -> None:
        self._hooks.visit_inside(f"layers.{self._layer}.{op}", rows, part)

    def prefilled(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def convolution(*args: Any, **kwargs: Any) -> Any:
            out = compute(*args, **kwargs)
            rows = out.transpose(0, 1)
            self._visit("conv", rows, self._last(len(rows)))
            return out

        return convolution

    def decoded(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def convolution(*args: Any, **kwargs: Any) -> Any:
            out = compute(*args, **kwargs)
            self._visit("conv", out, slice(0, len(out)))
            return out

        return convolution

    def scanned(self, compute: Any) -> Any:
        @functools.wraps(compute)
        def scan(
            out: Any, states: Any, x: Any, dt: torch.Tensor, a: torch.Tensor, *rest: Any
        ) -> Any:
            rows = self._last(len(dt))
            self._visit("dt", dt, rows)
            self._hooks.show(f"layers.{self._layer}.dt_a", dt * a, rows)
            return compute(out, states, x, dt, a, *rest)

        return scan

    def _last(self, rows: int) -> slice:
        return slice(self._tokens - rows, self._tokens)


def a_log(model: Any, name: str, value: torch.Tensor) -> torch.Tensor:
    """The A_log of the A that a state-space model computes with, in the dtype of the model if A is
    its −exp(A_log), and in float32 otherwise. `name`: of the canonical parameter."""
    if not name.endswith(".dt_a"):
        return value
    net = dict(mambas(model))[int(name.split(".")[1])]
    exact = (-value.double()).log()
    rounded = exact.to(net.D.dtype)
    return rounded if torch.equal(-rounded.float().exp(), value) else exact.float()


def mamba_attributes(model: Any) -> dict[str, Any]:
    """How a live model's state-space models compute, beside their weights; empty without them."""
    nets = dict(mambas(model))
    if not nets:
        return {}
    dtypes = [str(net.kv_cache[1].dtype).removeprefix("torch.") for net in nets.values()]
    return per_layer("mamba_state_dtype", dtypes, list(nets))
