"""The operators of vLLM's live decoder, for a planted fault to replace one.

T = packed tokens of all requests, padding included; activations are `[T, F]`.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose, has_kernels, router_path
from rlk_align.engines.common.fused_places import attention_of
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.kernel_delta_nets import (
    change_convolution_on_kernels,
    change_rule_on_kernels,
)
from rlk_align.engines.common.places import first
from rlk_align.engines.common.products import Method
from rlk_align.engines.common.weights import Parameter
from rlk_align.engines.process.ranks import all_gather
from rlk_align.engines.vllm import mamba_changes
from rlk_align.engines.vllm.delta_changes import change_convolution, change_rule
from rlk_align.engines.vllm.delta_net import convolution_weight, delta_nets
from rlk_align.engines.vllm.experts import replace_choice, sparse_blocks
from rlk_align.engines.vllm.latent import COPIES, absorbed, core_of
from rlk_align.engines.vllm.latent_changes import change_core
from rlk_align.engines.vllm.parallel import tensor_parallel
from rlk_align.engines.vllm.places import adds_in_norms, sliding_window, vllm_places
from rlk_align.engines.vllm.taps import on_rotation
from rlk_align.engines.vllm.weights import (
    linear_weight,
    live_parameter,
    parameter_plan,
    product_method,
)
from rlk_align.errors import BadOption
from rlk_align.model.shape import ModelShape
from rlk_align.selftest.faults.catalogue import Chosen, choose
from rlk_align.selftest.planting.fused_operators import FusedOperators
from rlk_align.selftest.planting.live_operators import LiveOperators, plant
from rlk_align.selftest.planting.operands import (
    Convolution,
    Formula,
    ForwardTokens,
    Recurrence,
    Report,
    Unit,
    in_place_of,
)
from rlk_align.selftest.planting.rank import Sharing
from rlk_align.selftest.planting.sparse_layers import (
    KernelLayers,
    Routing,
    SparseLayers,
    swap,
    without_gate,
)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A fault and its model, as vLLM sends them to the worker processes."""

    fault: str
    """The value of `fault=` in the engine's spec."""
    shape: ModelShape
    model_path: Path


class VLLMOperators(FusedOperators):
    """The operators of the model in one worker."""

    def __init__(self, plan: FaultPlan, runner: Any, chosen: Chosen) -> None:
        self._runner, self._ranks = runner, tensor_parallel()
        model, ranks = runner.get_model(), self._ranks
        sharing = Sharing(rank=ranks.rank, ranks=ranks.world, gather=self._gather)
        places = vllm_places(model, plan.shape, ranks.world)
        self.norms_add = adds_in_norms(model, plan.shape)
        super().__init__(plan, model, places, chosen, sharing)
        self.around(self._model, self._note_rows)

    def _gather(self, local: torch.Tensor) -> list[torch.Tensor]:
        return all_gather(local, self._ranks)

    def plan(self) -> Iterable[Parameter]:
        return parameter_plan(self._model, self.shape, self._ranks.world)

    def tensor(self, path: str) -> torch.Tensor | None:
        return live_parameter(self._model, path)

    def method(self, path: str) -> Method:
        return product_method(self._model, path)

    def _note_rows(self, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        decoding = torch.zeros_like(positions, dtype=torch.bool)
        attention = attention_of(self._layer(self.shape.first_attention))
        metadata = self._metadata(core_of(attention))
        if metadata is not None:
            starts = metadata.query_start_loc.long()
            alone = starts[:-1][starts.diff() == 1]
            decoding[alone] = positions[alone] > 0
        self.rows = ForwardTokens(ids, positions, decoding)

    @staticmethod
    def _metadata(attention: Any) -> Any:
        """The attention metadata of the running forward; None in vLLM's warm-up."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        return metadata[attention.layer_name] if isinstance(metadata, dict) else None

    def _layer(self, layer: int) -> Any:
        return self._model.model.layers[layer]

    def sparse_layers(self) -> SparseLayers:
        kind = VLLMKernelLayers if self.with_kernels else VLLMSparseLayers
        return kind(self, self._model)

    def on_rotation(self, see: Callable[[torch.Tensor], None]) -> None:
        on_rotation(self, self._model, see)

    def change_weight(self, site: str, change: Formula) -> None:
        at = self.sites[site]
        if at.operator.formula == "latent_attention":
            attention = attention_of(self._layer(at.layer or 0))
            if not attention.kv_b_proj.weight.numel():
                raise BadOption(
                    f"vLLM keeps packed copies of {site} alone: no fault is planted there"
                )
        super().change_weight(site, change)

    def change_copy(self, site: str, change: Formula) -> None:
        at = self.sites[site]
        if at.operator.formula != "latent_attention":
            super().change_copy(site, change)
            return
        core = core_of(attention_of(self._layer(at.layer or 0)))
        if absorbed(core) is None:
            raise BadOption(f"vLLM keeps packed copies of {site} alone: no fault is planted there")
        by_head = change(self.parameter(site)).unflatten(0, (self.shape.heads, -1))
        keys, values = by_head.split([self.shape.unrotated_width, self.shape.value_width], 1)
        # They may be views of the parameter, which stays.
        for name, new in zip(COPIES, (keys, values.mT), strict=True):
            self.callback(setattr, core, name, getattr(core, name))
            setattr(core, name, torch.nn.Parameter(new.contiguous(), requires_grad=False))

    def _latent_attention(self, layer: int, formula: Formula) -> None:
        core = core_of(attention_of(self._layer(layer)))

        def change(
            result: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
            visible: torch.Tensor,
        ) -> torch.Tensor:  # fmt: skip
            return self.attended(formula, layer, result, q, k, v, visible, core.scale)

        weight = self.parameter(f"layers.{layer}.latent_attn")
        change_core(self, core, self._metadata, weight, self.shape, change)

    def _attention(self, layer: int, formula: Formula) -> None:
        if self.shape.latent:
            self._latent_attention(layer, formula)
            return
        module = attention_of(self._layer(layer)).attn
        window = sliding_window(module)
        original = module.forward
        cache = _Cache()

        def forward(query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
            out = original(query, key, value, *args, **more)
            metadata = self._metadata(module)
            if metadata is None:
                return out
            width = self.shape.at(layer).head_dim
            q, k, v = (x.reshape(len(x), -1, width) for x in (query, key, value))
            cache.write(metadata.slot_mapping, k, v)
            new = out.clone()
            starts = metadata.query_start_loc.tolist()
            for r, length in enumerate(metadata.seq_lens.tolist()):
                rows = slice(starts[r], starts[r + 1])
                keys, values = cache.read(metadata.block_table[r], length, self._block_size)
                positions = torch.arange(length, device=out.device)
                query_positions = positions[length - (rows.stop - rows.start) :]
                visible = positions <= query_positions[:, None]
                if window is not None:
                    visible &= positions > query_positions[:, None] - window
                new[rows] = self.attended(
                    formula, layer, out[rows], q[rows], keys, values, visible, module.impl.scale
                )
            return new

        self.replace(module, "forward", forward)

    def _delta_rule(self, layer: int, formula: Formula) -> None:
        def change(**unit: Any) -> Any:
            return formula(Recurrence(**unit))

        if not self.faulty:
            return
        net = dict(delta_nets(self._model))[layer]
        if has_kernels(net):
            change_rule_on_kernels(self, net, change)
        else:
            change_rule(self, self._model, layer, change)

    def _state_space(self, layer: int, formula: Formula) -> None:
        mamba_changes.change_scan(
            self, self._model, layer, lambda **unit: formula(Recurrence(**unit))
        )

    def _convolution(self, layer: int, formula: Formula) -> None:
        if self.shape.family.state_space:
            name = f"layers.{layer}.conv"
            bias = self.parameter(f"{name}.bias") if self.biased(name) else None
            own = {"weight": self.parameter(name), "bias": bias}
            mamba_changes.change_convolution(
                *(self, self._model, layer),
                lambda **unit: in_place_of(formula, Convolution(**own, **unit)),
            )
            return
        net = dict(delta_nets(self._model))[layer]
        # A rank's own heads, whose channels the convolution never mixes.
        weight = convolution_weight(net.conv1d)

        def change(**unit: Any) -> torch.Tensor:
            return in_place_of(formula, Convolution(weight=weight, **unit))

        if not self.faulty:
            return
        if has_kernels(net):
            change_convolution_on_kernels(self, net, change)
        else:
            change_convolution(self, self._model, layer, change)

    @property
    def _block_size(self) -> int:
        return int(self._runner.cache_config.block_size)

    def _logprob(self, formula: Formula) -> None:
        """The older runner computes all log-probs and gathers those of given tokens in two methods,
        for prompts and for samples."""
        sampler = self._runner.sampler
        if not hasattr(sampler, "gather_logprobs"):
            self._logprob_of_newer_runner(formula)
            return
        compute, gather = sampler.compute_logprobs, sampler.gather_logprobs
        latest: list[torch.Tensor] = []

        def note(logits: torch.Tensor) -> torch.Tensor:
            latest[:] = [logits]
            return compute(logits)

        def report(logprobs: torch.Tensor, count: int, token_ids: torch.Tensor) -> Any:
            tensors = gather(logprobs, count, token_ids)
            result = tensors.logprobs[:, 0].clone()
            unit = Report(result=result, logits=latest[0], targets=token_ids, temperature=1.0)
            tensors.logprobs[:, 0] = formula(unit)
            return tensors

        self.replace(sampler, "compute_logprobs", note)
        self.replace(sampler, "gather_logprobs", report)

    def _logprob_of_newer_runner(self, formula: Formula) -> None:
        """The newer runner does both in one function, which two modules import by name; the name
        differs between vLLM 0.26 and 0.32."""
        from vllm.v1.worker.gpu.sample import prompt_logprob, sampler

        for module in (prompt_logprob, sampler):
            names = [
                n for n in ("compute_topk_scores", "compute_topk_logprobs") if hasattr(module, n)
            ]
            for name in names:
                self.replace(module, name, _reporting(getattr(module, name), formula))


def _reporting(original: Any, formula: Formula) -> Any:
    """Wraps vLLM's function from logits to log-probs; the first of each row is the scored one."""

    def report(
        logits: torch.Tensor, count: int, token_ids: torch.Tensor, *args: Any, **more: Any
    ) -> Any:
        tensors = original(logits, count, token_ids, *args, **more)
        result = tensors.logprobs[:, 0].clone()
        unit = Report(result=result, logits=logits, targets=token_ids.long(), temperature=1.0)
        tensors.logprobs[:, 0] = formula(unit)
        return tensors

    return report


class _Cache:
    """Keys and values by their slot in vLLM's cache, whose own layout depends on the backend."""

    def __init__(self) -> None:
        self._stored: list[torch.Tensor] = []

    def write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """`slots` `[T]`, -1 for padding; key and value `[T, KV, D]`."""
        slots = slots[: len(key)]
        real = slots >= 0
        size = int(slots.max()) + 1
        if not self._stored or len(self._stored[0]) < size:
            grown = [key.new_zeros(2 * size, *key.shape[1:]) for _ in range(2)]
            for new, old in zip(grown, self._stored, strict=False):
                new[: len(old)] = old
            self._stored = grown
        for target, source in zip(self._stored, (key, value), strict=True):
            target[slots[real]] = source[: len(slots)][real]

    def read(
        self, blocks: torch.Tensor, length: int, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first `length` tokens of a request, `[length, KV, D]` each."""
        positions = torch.arange(length, device=blocks.device)
        slots = blocks[positions // block_size].long() * block_size + positions % block_size
        return self._stored[0][slots], self._stored[1][slots]


class VLLMSparseLayers(SparseLayers):
    """The sparse layers of a model in a single worker."""

    def __init__(self, hooks: Hooks, model: Any) -> None:
        self._hooks = hooks
        self._blocks = {i: block for i, _, block in sparse_blocks(model)}

    def change_logits(self, layer: int, formula: Formula) -> None:
        block = self._blocks[layer]
        gate = getattr(block, router_path(block))
        weight = live_parameter(gate, "weight")

        def see(_module: Any, inputs: Any, output: Any) -> Any:
            unit = Unit(
                result=first(output), inputs=(inputs[0],), weight=weight, bias=gate.bias, head_dim=1
            )
            new = in_place_of(formula, unit)
            return (new, *output[1:]) if isinstance(output, tuple) else new

        self._hooks.after(gate, see)

    def change_choice(self, layer: int, choose: Choose) -> None:
        replace_choice(self._hooks, self._blocks[layer].experts, choose)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        router = self._router(layer)
        route = router._compute_routing

        def compute(hidden: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            weights, chosen = route(hidden, logits, *args, **kwargs)
            new = change(Routing(logits=logits, chosen=chosen.long(), weights=weights))
            return new.to(weights.dtype), chosen

        self._hooks.replace(router, "_compute_routing", compute)

    def leave_out(self, layer: int, expert: int) -> None:
        routed = self._blocks[layer].experts.routed_experts
        compute = routed.forward_modular

        def forward(*, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **kwargs: Any) -> Any:
            weights = topk_weights.masked_fill(topk_ids == expert, 0)
            return compute(topk_weights=weights, topk_ids=topk_ids, **kwargs)

        self._hooks.replace(routed, "forward_modular", forward)

    def leave_out_gate(self, layer: int) -> None:
        block = self._blocks[layer]
        weight = linear_weight(block.shared_expert_gate).detach()
        without_gate(self._hooks, block.shared_expert, lambda: weight)

    def drop_biases(self, layer: int) -> None:
        routed = self._blocks[layer].experts.routed_experts
        config = routed.quant_method.moe_kernel.fused_experts.quant_config
        for product in (config._w1, config._w2):
            self._hooks.replace(product, "bias", None)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        # Packed or not, each expert's weight is a separate block.
        weight = self._blocks[layer].experts.routed_experts.w13_weight.detach()
        swap(self._hooks, weight[one], weight[other])

    def _router(self, layer: int) -> Any:
        return self._blocks[layer].experts.router


class VLLMKernelLayers(KernelLayers, VLLMSparseLayers):
    """Sparse layers that the kernels compute. The router's product is a module here as well."""

    change_logits = VLLMSparseLayers.change_logits

    def _chooser(self, layer: int) -> Any:
        return self._blocks[layer].experts

    _computer = _chooser


def plant_fault(engine: Any, chosen: Chosen) -> ExitStack:
    """Plants a fault into the models of all workers. Raises BadOption if the model lacks the
    fault's operator, and for compiled code."""
    if engine.production:
        raise BadOption("a fault cannot be planted in compiled code", "--no-production")
    plan = FaultPlan(str(chosen), engine.shape, engine.model_path)
    errors = engine.llm.collective_rpc("rlk_plant", args=(partial(_plant_in_worker, plan),))
    for error in filter(None, errors):
        raise error
    planted = ExitStack()
    planted.callback(engine.llm.collective_rpc, "rlk_remove_fault")
    return planted


def _plant_in_worker(plan: FaultPlan, runner: Any) -> LiveOperators:
    """Plants the fault into the live model of this worker process."""
    chosen = choose("vllm", plan.fault)
    return plant(VLLMOperators(plan, runner, chosen), chosen)
