"""The state-space models (Mamba-2) of an HF decoder: the values inside, and their attributes.

transformers computes them by functions of the modeling module, which are wrapped while the hooks
are installed. B = sequences, T = tokens of each in this forward, H = heads
"""

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.places import Place
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.engines.hf.delta_net import CONVOLUTIONS, Running
from rlk_align.model.operators import OPERATORS

SCANS = ("mamba2_chunk_scan", "mamba2_selective_state_update")
"""The functions of the recurrence: of a whole sequence in chunks, and of one token."""


def mambas(model: Any) -> Iterator[tuple[int, Any]]:
    """(index of the layer, its state-space model) of each layer that has one."""
    for i, layer in enumerate(model.model.layers):
        every = (m for m in layer.modules() if hasattr(m, "A_log") and hasattr(m, "D"))
        if (net := next(every, None)) is not None:
            yield i, net


IN_ONE_KERNEL = "transformers' step of decode multiplies the scan by its gate in one function"


def mamba_places(layer: str, module: str, norm: bool) -> Iterator[Place]:
    """The places of a state-space model, which is `module`, beside its products; `norm`: whether it
    has a norm, or else a gate that is no module."""

    def within(op: str, **more: Any) -> Place:
        return Place(sites=(f"{layer}.{op}",), module=module, end="inside", **more)

    yield within("conv", parameters_in=f"{module}.conv1d")
    for op in ("dt", "dt_a"):
        yield within(op, parameters_in=module, weight=OPERATORS[op].tensor)
    scan = OPERATORS["scan"].tensor
    if not norm:
        yield within("scan", parameters_in=module, weight=scan)
        path = f"{module}.out_proj"
        yield Place(sites=(f"{layer}.mamba_gate",), module=path, end="input")
        return
    path = f"{module}.norm"
    yield Place(
        sites=(f"{layer}.scan",), module=path, end="input", parameters_in=module, weight=scan
    )
    yield Place(sites=(f"{layer}.mamba_norm",), module=path)


def on_mambas(hooks: SiteHooks, model: Any, unexposed: dict[str, str]) -> None:
    """Shows the values inside state-space models, and overwrites those that the pass changes, but
    for dt · A, of which the engine keeps no tensor. `unexposed`: gets the sites that a forward does
    not show."""
    nets = dict(mambas(model))
    if not nets:
        return
    modeling = sys.modules[type(next(iter(nets.values()))).__module__]
    normed = not isinstance(next(iter(nets.values())).norm, torch.nn.Identity)
    running = _Running(hooks, normed, unexposed)
    for i, net in nets.items():
        hooks.before(net, functools.partial(running.begin, i), with_kwargs=True)
    for name in CONVOLUTIONS:
        hooks.replace(modeling, name, running.convolution(getattr(modeling, name)))
    for name in SCANS:
        hooks.replace(modeling, name, running.scan(getattr(modeling, name)))
    hooks.replace(modeling, "F", _Functions(running.step))


class _Running(Running):
    """The state-space model that is running."""

    _a: torch.Tensor

    def __init__(self, hooks: SiteHooks, normed: bool, unexposed: dict[str, str]) -> None:
        """`normed`: whether a norm reads the scan, so that its place shows it."""
        super().__init__(hooks)
        self._normed, self._unexposed = normed, unexposed

    def scan(self, compute: Any) -> Any:
        place = list(inspect.signature(compute).parameters).index("A")

        @functools.wraps(compute)
        def scan(*args: Any, **kwargs: Any) -> Any:
            # [H], which a step of decode repeats for each entry of the state: [H, V, D].
            self._a = args[place].reshape(len(args[place]), -1)[:, 0]
            out = compute(*args, **kwargs)
            if not self._normed:
                site = f"layers.{self._layer}.scan"
                if kwargs.get("z") is not None:
                    self._unexposed[site] = IN_ONE_KERNEL
                else:
                    self._hooks.visit_inside(site, out[0] if isinstance(out, tuple) else out)
            return out

        return scan

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """softplus of `[B, T, H]`, or of `[B, H, V]`, equal along V, in a step of decode."""
        out = torch.nn.functional.softplus(x)
        dt = out if x.shape[1:] == (self._length, len(self._a)) else out[:, None, :, 0]
        self._visit("dt", dt)
        self._hooks.show(f"layers.{self._layer}.dt_a", self._a.float() * dt.float())
        return out


class _Functions:
    """torch's functions, of which softplus is another."""

    def __init__(self, softplus: Any) -> None:
        self.softplus = softplus

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)


def mamba_attributes(model: Any) -> dict[str, Any]:
    """How a live model's state-space models compute, beside their weights; empty without them."""
    # The scan returns the state in float32, and takes it as it returned it.
    return {"mamba_state_dtype": "float32"} if any(True for _ in mambas(model)) else {}
