"""The sparse layers of a vLLM decoder: the values that can be observed, and the experts' weights.

vLLM computes a layer's experts in one kernel, from the choice to the sum, so their rows are never
tensors.
"""

from collections.abc import Iterator
from typing import Any

import torch

from rlk_align.engines.common.experts import (
    PRODUCTS,
    Choose,
    Show,
    by_ascending_id,
    choice_replaced,
    choose_on_kernels,
    gate_and_up,
    has_kernels,
    on_kernels,
    router_path,
)
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.site_hooks import SiteHooks
from rlk_align.engines.common.weights import shared_evenly
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.errors import EngineFailed
from rlk_align.model.shape import ModelShape

FUSED = "vLLM computes a layer's experts in one kernel, which never writes their rows"
PARTIAL = "vLLM's ranks add up their shares of shared experts together with those of the experts"


def sparse_blocks(model: Any) -> Iterator[tuple[int, str, Any]]:
    """(index of the layer, path of its block within the layer, the block) of each sparse layer."""
    for i, layer in enumerate(model.model.layers):
        for path in ("mlp", "block_sparse_moe"):
            block = getattr(layer, path, None)
            if block is not None and hasattr(block, "experts"):
                yield i, path, block


def on_choices(hooks: Hooks, model: Any, show: Show) -> None:
    """Calls `show(site, value)` with each token's experts and their weights."""
    for i, _, block in sparse_blocks(model):
        if has_kernels(block.experts):
            on_kernels(hooks, block.experts, i, show)
        else:
            # vLLM may scale the sum of a token's rows instead of their weights.
            _Router(i, show, block.experts.routed_scaling_factor).watch(hooks, block.experts.router)


class _Router:
    """One layer's router, and vLLM's own record of its choice: the experts that it returns to
    clients if `enable_return_routed_experts` is set."""

    def __init__(self, layer: int, show: Show, scale: float) -> None:
        """`scale`: the factor of the sum of the rows, which belongs to their weights."""
        self._name, self._show, self._scale = f"layers.{layer}", show, scale
        self._captured: torch.Tensor | None = None

    def watch(self, hooks: Hooks, router: Any) -> None:
        select = router.select_experts
        hooks.replace(router, "capture_fn", self._capture)

        def select_experts(*args: Any, **kwargs: Any) -> Any:
            weights, chosen = select(*args, **kwargs)
            self._check(chosen)
            ids, by_id = by_ascending_id(chosen, weights)
            self._show(f"{self._name}.experts", ids)
            self._show(f"{self._name}.routing_weights", by_id * self._scale)
            return weights, chosen

        hooks.replace(router, "select_experts", select_experts)

    def _capture(self, chosen: torch.Tensor) -> None:
        self._captured = chosen.clone()

    def _check(self, chosen: torch.Tensor) -> None:
        if self._captured is None or not torch.equal(self._captured.long(), chosen.long()):
            raise EngineFailed(
                f"{self._name}: vLLM computes other experts than it records for its clients",
                "check the patch, and leave expert parallel load balancing off",
            )
        self._captured = None


def replay_choices(hooks: SiteHooks, model: Any) -> None:
    """Makes the routers whose choice is overwritten choose the recorded experts."""
    for i, _, block in sparse_blocks(model):
        choose = hooks.recorded_choice(f"layers.{i}.experts")
        if choose is not None:
            replace_choice(hooks, block.experts, choose)


def replace_choice(hooks: Hooks, runner: Any, choose: Choose) -> None:
    """Replaces the choice of a layer's router. Unless the kernels compute it, the router raises
    EngineFailed as it runs if it does not choose by `torch.topk`."""
    if has_kernels(runner):
        choose_on_kernels(hooks, runner, choose)
        return
    router = runner.router
    route, experts = router._compute_routing, router.global_num_experts

    def compute(*args: Any, **kwargs: Any) -> Any:
        with choice_replaced(choose, experts) as calls:
            routed = route(*args, **kwargs)
        if len(calls) != 1:
            raise EngineFailed(
                "this vLLM chooses experts inside a kernel, which accepts no choice from outside",
                "replay in the other engine: --edges prefill_vs_train,decode_vs_train",
            )
        return routed

    hooks.replace(router, "_compute_routing", compute)


def expert_weights(model: Any, shape: ModelShape, ranks: Ranks) -> Iterator[LiveParameter]:
    """The canonical parameters of the experts, and the corrections of the scores for their choice;
    called on all ranks."""
    tp = ranks.world
    inner, interleaved = shape.expert_intermediate // tp, shape.family.stacks.interleaved
    for i, _, block in sparse_blocks(model):
        # MiniMax-M2's block has the correction itself.
        holders = getattr(block, router_path(block)), block
        corrections = (getattr(holder, "e_score_correction_bias", None) for holder in holders)
        if (correction := next((c for c in corrections if c is not None), None)) is not None:
            # vLLM leaves out a dimension of size 1.
            copies = all_gather(correction.detach().reshape(shape.correction(i)), ranks)
            yield LiveParameter(f"layers.{i}.experts", copies[0], replicas=tuple(copies[1:]))
        routed = block.experts.routed_experts
        gate_up, down = (unpacked(routed, name) for name in ("w13_weight", "w2_weight"))
        # With the kernels, the ranks share the rows of down_proj.
        dim = 0 if tp > 1 and has_kernels(block.experts) else 1
        for e in range(len(gate_up)):
            of = f"layers.{i}.experts.{e}"
            # vLLM pads the inner size.
            for op, rows in zip(PRODUCTS, gate_and_up(gate_up[e], 0, interleaved), strict=False):
                yield shared_evenly(f"{of}.{op}", rows[:inner], 0, ranks)
            columns = down[e] if dim == 0 else down[e, :, :inner]
            yield shared_evenly(f"{of}.down_proj", columns, dim, ranks)
            if hasattr(routed, "w13_bias"):
                # The experts of one rank: `check_vllm` refuses more.
                biases = *gate_and_up(routed.w13_bias[e], 0, interleaved), routed.w2_bias[e]
                for op, bias in zip(PRODUCTS, biases, strict=True):
                    yield LiveParameter(f"{of}.{op}.bias", bias.detach())


def unpacked(routed: Any, name: str) -> torch.Tensor:
    """A stacked weight `[E, out, in]` in the checkpoint's order.

    On CPUs vLLM packs it in another order. Packing moves entries and changes none, so packing their
    indices shows where each entry goes. The indices are packed 12 bits at a time, as bit patterns
    that are not NaN.
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
    """The instruction set that the layer's weights are packed for; None if they are not packed."""
    kernel = routed.quant_method.moe_kernel
    if kernel is None:
        return None  # our kernels take the weights as they are
    experts = kernel.fused_experts
    return None if getattr(experts, "_use_zentorch", False) else getattr(experts, "isa", None)
