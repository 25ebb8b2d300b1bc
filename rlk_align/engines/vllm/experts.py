"""The sparse layers of a vLLM decoder: what of them can be seen, and the experts' weights.

vLLM computes a layer's experts in one kernel, from the choice to the sum: their rows are never
tensors.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlk_align.engines.common.experts import by_ascending_id, has_kernels, on_kernels
from rlk_align.engines.common.hooks import Hooks

FUSED = "vLLM computes a layer's experts in one kernel, which never writes their rows"


def sparse_blocks(model: Any) -> Iterator[tuple[int, str, Any]]:
    """(layer, the path of its block within the layer, the block) of every sparse layer."""
    for i, layer in enumerate(model.model.layers):
        for path in ("mlp", "block_sparse_moe"):
            block = getattr(layer, path, None)
            if block is not None and hasattr(block, "experts"):
                yield i, path, block


def on_choices(hooks: Hooks, model: Any, show: Callable[[str, torch.Tensor], None]) -> None:
    """`show(site, value)` of each token's experts and their weights: the router is no module."""
    for i, _, block in sparse_blocks(model):
        if has_kernels(block.experts):
            on_kernels(hooks, block.experts, i, show)
            continue
        router = block.experts.router
        hooks.replace(router, "select_experts", _shown(router.select_experts, i, show))


def _shown(select: Callable[..., Any], layer: int, show: Callable[..., None]) -> Callable[..., Any]:
    def select_experts(*args: Any, **kwargs: Any) -> Any:
        weights, chosen = select(*args, **kwargs)
        ids, by_id = by_ascending_id(chosen, weights)
        show(f"layers.{layer}.experts", ids)
        show(f"layers.{layer}.routing_weights", by_id)
        return weights, chosen

    return select_experts


def expert_weights(model: Any, inner: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The canonical parameters of the experts; `inner`: the inner size of one, beyond which vLLM
    pads."""
    for i, _, block in sparse_blocks(model):
        routed = block.experts.routed_experts
        gate_up, down = (_unpacked(routed, name) for name in ("w13_weight", "w2_weight"))
        half = gate_up.shape[1] // 2
        for e in range(len(gate_up)):
            yield f"layers.{i}.experts.{e}.gate_proj", gate_up[e, :inner]
            yield f"layers.{i}.experts.{e}.up_proj", gate_up[e, half : half + inner]
        for e in range(len(down)):
            yield f"layers.{i}.experts.{e}.down_proj", down[e, :, :inner]


def _unpacked(routed: Any, name: str) -> torch.Tensor:
    """A stacked weight `[E, out, in]` as the checkpoint has it.

    On CPUs vLLM packs it into another order. Packing moves entries and changes none, so the place
    of each is found by packing their numbers, 12 bits at a time: patterns that are no NaN.
    """
    weight = getattr(routed, name).detach()
    if weight.device.type != "cpu":
        return weight
    from vllm._custom_ops import cpu_prepack_moe_weight

    isa = _instructions(routed)
    if isa is None:
        return weight
    numbers = torch.arange(weight[0].numel(), dtype=torch.int64)
    carrier = torch.int16 if weight.element_size() == 2 else torch.int32
    source = torch.zeros_like(numbers)
    for shift in (0, 12, 24):
        digits = ((numbers >> shift) & 0xFFF).to(carrier).view(weight.dtype)
        packed = cpu_prepack_moe_weight(digits.reshape(1, *weight.shape[1:]), isa)
        source |= packed.view(carrier).flatten().long() << shift
    out = torch.empty_like(weight.reshape(len(weight), -1))
    out[:, source] = weight.reshape(len(weight), -1)
    return out.reshape(weight.shape)


def _instructions(routed: Any) -> str | None:
    """What the layer's kernel is packed for; None where it packs nothing."""
    kernel = routed.quant_method.moe_kernel
    if kernel is None:
        return None  # ours take the weights as they are
    experts = kernel.fused_experts
    return None if getattr(experts, "_use_zentorch", False) else getattr(experts, "isa", None)
