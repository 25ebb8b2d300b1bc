"""LoRA adapters of PEFT beside the weights: the classes that replace those of PEFT's layers and of
their factors."""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted, become
from rlk_kernels.integrations.transformers_modules import cast


class FactorA(Counted):
    """PEFT's linear of A. It is called, and its weight is not read from outside, because ZeRO-3
    gathers a parameter for the call of its module."""

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        self.count()
        return profile.lora_a(x, self.weight, scales)


class FactorB(Counted):
    """PEFT's linear of B."""

    def forward(self, base: Tensor, h: Tensor, scales: Tensor) -> Tensor:
        self.count()
        return profile.lora_b(base, h, self.weight, scales)


class HFLora(Counted):
    """Adds the update of PEFT's active adapter to the output of the linear that it wraps."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or any(value is not None for value in kwargs.values()):
            raise NotSupported(
                f"{', '.join(kwargs) or 'more arguments'} of a projection with adapters is not "
                "supported: set one adapter for the whole batch"
            )
        self.count()
        if self.disable_adapters and self.merged:
            self.unmerge()
        name = active_adapter(self)
        if name is None:
            return self.base_layer(x)
        a, b = self.lora_A[name], self.lora_B[name]
        if not all(isinstance(*x) for x in ((a, FactorA), (b, FactorB))):
            raise NotSupported(f"the adapter {name} came later: call use_kernels again")
        # Both gradients of x are added up here, before those of other projections. Otherwise hooks
        # of a framework (ZeRO-3's) could change the order in which all of them are added up.
        x = cast(x)
        x = x.view_as(x)
        base = self.base_layer(x)
        scales = torch.full((1,), self.scaling[name], dtype=torch.float32, device=base.device)
        return b(base, a(x, scales), scales)


def replace_factors(layer: Any, undo: ExitStack) -> None:
    """Gives the factors of PEFT's layer their classes, until `undo` is closed."""
    for factors, kind in ((layer.lora_A, FactorA), (layer.lora_B, FactorB)):
        for factor in factors.values():
            become(factor, kind, undo)


def is_adapter(module: Any) -> bool:
    """Whether a module is PEFT's layer around a linear."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return isinstance(module, HFLora) or name == "peft.tuners.lora.layer.Linear"


def active_adapter(layer: Any) -> str | None:
    """The name of the adapter that PEFT's layer computes with; None if it has none for this layer,
    it is merged into the weight, or adapters are disabled. Raises NotSupported for one whose
    formula is another."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or not names:
        return None
    if len(names) > 1:
        raise NotSupported(
            f"several active adapters ({', '.join(names)}) are not supported; set one"
        )
    (name,) = names
    a, b, dropout = (part[name] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    variant = layer.lora_variant.get(name)
    refused = {
        f"an adapter of {type(variant).__name__}": variant is not None,
        "an adapter with a bias": b.bias is not None,
        "an adapter of a transposed weight (fan_in_fan_out)": bool(layer.fan_in_fan_out),
        "an adapter whose A or B is no torch.nn.Linear": not all(
            type(x) is nn.Linear or isinstance(x, Counted) for x in (a, b)
        ),
        "dropout of an adapter while the model trains (lora_dropout above 0)": (
            not isinstance(dropout, nn.Identity) and dropout.p > 0 and layer.training
        ),
    }
    if settings := [setting for setting, is_set in refused.items() if is_set]:
        raise NotSupported(f"{'; '.join(settings)} is not supported")
    return name
