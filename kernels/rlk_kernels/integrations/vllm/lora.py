"""LoRA adapters in vLLM: the kernels compute what vLLM's wrappers add to a linear.

vLLM wraps the linears as they are, ours too, and has no extension point in its wrappers. Patches
replace the function that computes a wrapped linear, and keep the scale of an adapter out of B,
into which vLLM would fold it, with a rounding.

T = rows   S = slots of adapters
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import LORA, Counted


class Update(Counted):
    """What a wrapper of vLLM adds to the output of its linear, of one or several projections.

    The wrapper's factors are moved into one tensor of A and one of B, of which its own are views,
    so that all projections of the linear are computed at once."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        a, b = ([x[:, 0] for x in of] for of in (wrapper.lora_a_stacked, wrapper.lora_b_stacked))
        slots, self._widths = len(a[0]), [x.shape[1] for x in b]
        self._a, self._b = torch.stack(a), torch.cat(b, 1)
        """A[P, S, R, K] and B[S, N, R] of the P projections."""
        wrapper.lora_a_stacked = tuple(x[:, None] for x in self._a)
        wrapper.lora_b_stacked = tuple(x[:, None] for x in self._b.split(self._widths, 1))
        self.scaling: list[list[float]] = [[0.0] * slots for _ in a]
        """The scale of each projection's adapter in each slot; 0 for a slot without one."""
        self._scales = torch.zeros(len(a), slots, device=self._a.device)
        """The same in fp32, on the device: a CUDA graph reads this memory."""

    def set_scales(self, slot: int, scaling: Sequence[float]) -> None:
        """Sets the scale of each projection's adapter in a slot."""
        for p, scale in enumerate(scaling):
            self.scaling[p][slot] = scale
            self._scales[p, slot] = scale

    def add(self, x: Tensor, output: Tensor) -> Tensor:
        """output[..., N] of x[..., K], plus the update of each row's adapter."""
        self.count()
        # The rows of a CUDA graph beyond those of the batch have any slot.
        slots = self._wrapper.punica_wrapper._token_lora_indices[: x.shape[:-1].numel()]
        how = self._scales, slots.view(x.shape[:-1]), self._widths
        return profile.add_lora(output, x, self._a, self._b, *how)


def update_of(module: Any) -> Update | None:
    """What a module of a live model adds to its linear; None if no adapter can."""
    return vars(module).get("rlk_update")


def unwrapped(named: dict[str, Any]) -> dict[str, Any]:
    """Operator -> module, with the linears instead of their wrappers, and what these add."""
    updates = {name: update_of(m) for name, m in named.items() if hasattr(m, "__dict__")}
    wrapped = {name: update for name, update in updates.items() if update is not None}
    linears = {name: named[name].base_layer for name in wrapped}
    return named | linears | {f"{name}.{LORA}": update for name, update in wrapped.items()}


def patches() -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement) of each function that is patched. Raises ImportError or
    AttributeError for a vLLM that lacks one of them."""
    from vllm.lora.layers.base import BaseLayerWithLoRA
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager

    linear, packed, manager = BaseLinearLayerWithLoRA, PackedLoRALayerWeights, LoRAModelManager
    yield BaseLayerWithLoRA, "set_mapping", _mapping(BaseLayerWithLoRA.set_mapping, linear)
    yield linear, "apply", _apply
    yield LoRALayerWeights, "optimize", _unfolded
    yield packed, "optimize", _unfolded
    yield packed, "pack", classmethod(_packing(packed.pack.__func__))
    yield manager, "activate_adapter", _activating(manager.activate_adapter)


def _mapping(original: Any, linear: type) -> Any:
    @functools.wraps(original)
    def set_mapping(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(self, linear):
            vars(self)["rlk_update"] = Update(self)
        return result

    return set_mapping


def _apply(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    output = self.base_layer.quant_method.apply(self.base_layer, x, bias)
    return self.rlk_update.add(x, output)


def _unfolded(self: Any) -> Any:
    return self


def _packing(original: Any) -> Any:
    @functools.wraps(original)
    def pack(cls: Any, loras: Sequence[Any]) -> Any:
        packed = original(cls, loras)
        packed.scaling = [0.0 if lora is None else lora.scaling for lora in loras]
        return packed

    return pack


def _activating(original: Any) -> Any:
    @functools.wraps(original)
    def activate_adapter(self: Any, lora_id: int) -> bool:
        if not original(self, lora_id):
            return False
        slot, adapter = self.lora_index_to_id.index(lora_id), self._registered_adapters[lora_id]
        for name, module in self.modules.items():
            update = update_of(module)
            weights = self._get_lora_layer_weights(adapter, name)
            if update is None and weights is not None:
                raise NotSupported(
                    f"an adapter of {name}, a {type(module).__qualname__}, is not supported"
                )
            if update is not None:
                update.set_scales(slot, _scaling(weights, len(update.scaling)))
        return True

    return activate_adapter


def _scaling(weights: Any, slices: int) -> list[float]:
    """The scale of each slice of a projection's adapter; zeros without one."""
    if weights is None:
        return [0.0] * slices
    scaling = weights.scaling if weights.is_packed else [weights.scaling]
    if len(scaling) != slices:
        raise NotSupported(
            f"an adapter of {weights.module_name} in {len(scaling)} parts is not supported: the "
            f"projection has {slices}"
        )
    return [float(scale) for scale in scaling]
