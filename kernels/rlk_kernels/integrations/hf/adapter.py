"""LoRA adapters of PEFT beside the weights: the class that replaces that of PEFT's linear layers.

N, K = out, in features   R = rank
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted
from rlk_kernels.integrations.transformers_modules import cast


class Adapter(NamedTuple):
    """The adapter that a layer of PEFT computes with."""

    a: Tensor
    """[R, K], in the dtype of the model or float32."""
    b: Tensor
    """[N, R], likewise."""
    scale: float


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
        base = self.base_layer(x)
        adapter = active_adapter(self)
        if adapter is None:
            return base
        scale = torch.full((1,), adapter.scale, dtype=torch.float32, device=base.device)
        return profile.add_lora(base, cast(x), adapter.a[None], adapter.b[None], scale)


def is_adapter(module: Any) -> bool:
    """Whether a module is PEFT's layer around a linear."""
    kind = type(module)
    name = f"{kind.__module__}.{kind.__qualname__}"
    return isinstance(module, HFLora) or name == "peft.tuners.lora.layer.Linear"


def active_adapter(layer: Any) -> Adapter | None:
    """The adapter that PEFT's layer computes with; None if it has none for this layer, it is merged
    into the weight, or adapters are disabled. Raises NotSupported for one whose formula is
    another."""
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
        "an adapter whose A and B are not torch.nn.Linear": not (type(a) is type(b) is nn.Linear),
        "dropout of an adapter while the model trains; set lora_dropout to 0": not isinstance(
            dropout, nn.Identity
        )
        and dropout.p > 0
        and layer.training,
    }
    if settings := [setting for setting, is_set in refused.items() if is_set]:
        raise NotSupported(f"{'; '.join(settings)} is not supported")
    return Adapter(a.weight, b.weight, float(layer.scaling[name]))
