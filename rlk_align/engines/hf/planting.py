"""The operators of a live HF decoder, for a planted fault to replace one.

B = sequences, T = tokens of each in this forward, H = heads, D = features of a head.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from rlk_align.engines.common.experts import Choose, gate_and_up, has_kernels
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.kernel_delta_nets import (
    change_convolution_on_kernels,
    change_rule_on_kernels,
)
from rlk_align.engines.common.transformers_rope import on_rotation
from rlk_align.engines.common.weights import unfused
from rlk_align.engines.hf.delta_net import CONVOLUTIONS, RULES, delta_nets
from rlk_align.engines.hf.experts import replace_choice, router_of, routing, sparse_blocks
from rlk_align.engines.hf.mamba import SCANS, mambas
from rlk_align.engines.hf.places import hf_places
from rlk_align.errors import BadOption
from rlk_align.selftest.faults.catalogue import Chosen
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
from rlk_align.selftest.planting.rank import ALONE, Sharing
from rlk_align.selftest.planting.sparse_layers import (
    KernelLayers,
    Routing,
    SparseLayers,
    swap,
    without_gate,
)


class HFOperators(LiveOperators):
    """The operators of a transformers model; every tensor except attention's is `[B, T, F]`."""

    def __init__(self, engine: Any, chosen: Chosen, sharing: Sharing = ALONE) -> None:
        places = hf_places(engine.model, engine.shape)
        super().__init__(engine, engine.model, places, chosen, sharing)
        layer = self._model.model.layers[engine.shape.first_attention]
        attention = getattr(layer, engine.shape.family.parent("o_proj"))
        self._modeling = sys.modules[type(attention).__module__]
        self.before(self._model, self._note_rows, with_kwargs=True)

    def _note_rows(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        positions, cache = kwargs.get("position_ids"), kwargs.get("past_key_values")
        if positions is None:
            past = cache.get_seq_length() if cache is not None else 0
            positions = torch.arange(ids.shape[1], device=ids.device)[None] + past
        positions = positions.expand_as(ids).flatten()
        decoding = (positions > 0) & (ids.shape[1] == 1)
        self.rows = ForwardTokens(ids.flatten(), positions, decoding)

    def parameter(self, name: str) -> torch.Tensor:
        return dict(unfused(self._model, self._places.values()))[name]

    def live(self, name: str) -> tuple[torch.Tensor, None]:
        return self.parameter(name), None

    def sparse_layers(self) -> SparseLayers:
        kind = HFKernelLayers if self.with_kernels else HFSparseLayers
        return kind(self, self._model)

    def on_rotation(self, see: Callable[[torch.Tensor], None]) -> None:
        on_rotation(self, self._model, see)

    def _attention(self, layer: int, formula: Formula) -> None:
        interface = self._modeling.ALL_ATTENTION_FUNCTIONS
        outer = self

        class Replaced:
            @staticmethod
            def get_interface(name: str, default: Any) -> Any:
                original = interface.get_interface(name, default)

                def attend(
                    module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any
                ) -> Any:
                    out, weights = original(module, query, key, value, mask, **more)
                    if module.layer_idx == layer:
                        out = outer._attended(
                            formula, layer, out, query, key, value, mask, more["scaling"]
                        )
                    return out, weights

                return attend

        self.replace(self._modeling, "ALL_ATTENTION_FUNCTIONS", Replaced)

    def _attended(
        self, formula: Formula, layer: int, out: Any, query: Any, key: Any, value: Any, mask: Any,
        scale: float,
    ) -> torch.Tensor:  # fmt: skip
        """`[B, T, H, D]`; query, key and value are `[B, H, T, D]`."""
        length, context = query.shape[2], key.shape[2]
        positions = torch.arange(context, device=query.device)
        causal = positions <= positions[context - length :, None]
        new = []
        for b in range(len(query)):
            visible = causal
            if mask is not None:
                row = mask[b, 0, :, :context] if mask.shape[0] > 1 else mask[0, 0, :, :context]
                visible = row if row.dtype == torch.bool else row == 0
            q, k, v = (x[b].transpose(0, 1) for x in (query, key, value))
            new.append(self.attended(formula, layer, out[b].flatten(1), q, k, v, visible, scale))
        return torch.stack(new).reshape(out.shape)

    def _delta_rule(self, layer: int, formula: Formula) -> None:
        net = dict(delta_nets(self._model))[layer]
        if has_kernels(net):
            change_rule_on_kernels(self, net, lambda **unit: formula(Recurrence(**unit)))
        else:
            self._in_net(layer, RULES, functools.partial(_ruled, formula))

    def _state_space(self, layer: int, formula: Formula) -> None:
        modeling = sys.modules[type(self._nets()[layer]).__module__]

        def scanned(compute: Any, x: Any, dt: Any, *args: Any, **kwargs: Any) -> Any:
            # Once for all tokens, as the parts of the formula are not whole sequences.
            bias = kwargs.pop("dt_bias")
            step = modeling.F.softplus(dt + bias.to(dt.dtype))
            own = {"dt_bias": None, "dt_softplus": False}
            return _scanned(formula, compute, x, step, *args, **(kwargs | own))

        self._in_net(layer, SCANS[:1], scanned)

    def _convolution(self, layer: int, formula: Formula) -> None:
        name = f"layers.{layer}.conv"
        weight = self.parameter(name)
        bias = self.parameter(f"{name}.bias") if self.biased(name) else None
        net = self._nets()[layer]
        if has_kernels(net):

            def change(**unit: Any) -> torch.Tensor:
                return in_place_of(formula, Convolution(weight=weight, **unit))

            change_convolution_on_kernels(self, net, change)
            return

        def convolved(compute: Any, mixed: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            out = compute(mixed, *args, **kwargs)
            each = [
                in_place_of(
                    formula, Convolution(result=y.T, inputs=x.T, weight=weight, bias=bias)
                ).T
                for y, x in zip(out, mixed, strict=True)
            ]
            return torch.stack(each)

        self._in_net(layer, CONVOLUTIONS[:1], convolved)

    def _nets(self) -> dict[int, Any]:
        """Layer -> its gated delta net or its state-space model."""
        return dict((*delta_nets(self._model), *mambas(self._model)))

    def _in_net(self, layer: int, names: tuple[str, ...], computed: Callable[..., Any]) -> None:
        """Replaces functions of the modeling module in one layer; `computed` gets the original
        function before its arguments."""
        nets = self._nets()
        modeling = sys.modules[type(nets[layer]).__module__]
        running: list[int] = []
        for i, net in nets.items():
            self.before(net, lambda *_, i=i: running.__setitem__(slice(None), [i]))
        for name in names:
            original = getattr(modeling, name)

            @functools.wraps(original)
            def replaced(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                if running != [layer]:
                    return original(*args, **kwargs)
                return computed(original, *args, **kwargs)

            self.replace(modeling, name, replaced)

    def _logprob(self, formula: Formula) -> None:
        original = self._engine.logprobs

        def report(logits: torch.Tensor, target: torch.Tensor) -> Any:
            unit = Report(
                result=torch.from_numpy(original(logits, target)).to(logits.device),
                logits=logits,
                targets=target,
                temperature=self._engine.temperature,
            )
            return formula(unit).float().cpu().numpy()

        self.replace(self._engine, "logprobs", report)

    def change_positions(self, change: Formula) -> None:
        def shift(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if "position_ids" in kwargs:
                kwargs = kwargs | {"position_ids": change(kwargs["position_ids"])}
            return args, kwargs

        self.before(self._model, shift, with_kwargs=True)


class HFSparseLayers(SparseLayers):
    """The sparse layers of a transformers model."""

    def __init__(self, hooks: Hooks, model: Any) -> None:
        self._hooks = hooks
        self._blocks = dict(sparse_blocks(model))

    def change_logits(self, layer: int, formula: Formula) -> None:
        """A router's product is its only call of `torch.nn.functional.linear`."""
        gate, functional = router_of(self._blocks[layer]), torch.nn.functional
        route, product = gate.forward, functional.linear

        def linear(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            result = product(x, weight, bias)
            unit = Unit(result=result, inputs=(x,), weight=weight.detach(), bias=bias, head_dim=1)
            return in_place_of(formula, unit)

        def forward(*args: Any, **kwargs: Any) -> Any:
            functional.linear = linear
            try:
                return route(*args, **kwargs)
            finally:
                functional.linear = product

        self._hooks.replace(gate, "forward", forward)

    def change_choice(self, layer: int, choose: Choose) -> None:
        replace_choice(self._hooks, self._blocks[layer], choose)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        def see(_module: Any, _inputs: Any, output: Any) -> Any:
            logits, weights, chosen = routing(output)
            new = change(Routing(logits=logits, chosen=chosen, weights=weights))
            return output[0], new.to(weights.dtype), output[2]

        self._hooks.after(router_of(self._blocks[layer]), see)

    def leave_out(self, layer: int, expert: int) -> None:
        def see(_module: Any, inputs: Any) -> Any:
            hidden, chosen, weights = inputs
            return hidden, chosen, weights.masked_fill(chosen == expert, 0)

        self._hooks.before(self._blocks[layer].experts, see)

    def leave_out_gate(self, layer: int) -> None:
        block, gate = self._blocks[layer], self._blocks[layer].shared_expert_gate
        # While the layer runs the weight is whole, also where ranks share it.
        without_gate(self._hooks, block.shared_expert, lambda: gate.weight.detach())

    def drop_biases(self, layer: int) -> None:
        self._hooks.replace(self._blocks[layer].experts, "has_bias", False)

    def leave_out_clamp(self, layer: int) -> None:
        experts = self._blocks[layer].experts

        def apply(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_and_up(gate_up, -1, not experts.is_concatenated)
            return (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))

        self._hooks.replace(experts, "_apply_gate", apply)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        weight = self._blocks[layer].experts.gate_up_proj.detach()
        swap(self._hooks, weight[one], weight[other])

    def weigh_before_activation(self, layer: int) -> None:
        """For transformers' `grouped_mm`, whose rows are sorted by expert."""
        experts = self._blocks[layer].experts
        sorted_weights: list[torch.Tensor] = []

        def note(_module: Any, inputs: Any) -> Any:
            hidden, chosen, weights = inputs
            order = torch.sort(chosen.reshape(-1))[1]
            sorted_weights[:] = [weights.reshape(-1)[order, None]]
            return hidden, chosen, torch.ones_like(weights)

        def apply(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return experts.act_fn(gate * sorted_weights[0]) * up

        self._hooks.before(experts, note)
        self._hooks.replace(experts, "_apply_gate", apply)


class HFKernelLayers(KernelLayers, HFSparseLayers):
    """Sparse layers that the kernels compute."""

    def _chooser(self, layer: int) -> Any:
        return router_of(self._blocks[layer])

    def _computer(self, layer: int) -> Any:
        return self._blocks[layer].experts


def _scanned(
    formula: Formula, compute: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, **kwargs: Any
) -> Any:
    """The formula's result in place of a state-space scan's by steps dt: its output `[B, T, H, V]`
    and, where the caller asks for them, the states `[B, H, V, D]`."""
    states, outputs, after = kwargs["initial_states"], [], []
    for i in range(len(x)):

        def some(
            at: slice, state: torch.Tensor | None, _: Any, i: int = i
        ) -> tuple[torch.Tensor, torch.Tensor]:
            here = slice(i, i + 1), at
            own = {
                "initial_states": None if state is None else state[None],
                "return_final_states": True,
            }
            out, last = compute(x[here], dt[here], a, b[here], c[here], **{**kwargs, **own})
            return out[0], last[0]

        unit = Recurrence(
            length=x.shape[1],
            state=None if states is None else states[i],
            decay=dt[i].float() * a,
            compute=some,
        )
        out, last = formula(unit)
        outputs.append(out)
        after.append(last)
    out = torch.stack(outputs)
    return (out, torch.stack(after)) if kwargs.get("return_final_states") else out


def _ruled(
    formula: Formula, compute: Any, query: Any, key: Any, value: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula's result in place of a gated delta rule's: its output `[B, T, H, V]`, and the
    states `[B, H, D, V]`."""
    g, beta, states = kwargs["g"], kwargs["beta"], kwargs["initial_state"]
    outputs, after = [], []
    for b in range(len(query)):

        def some(
            at: slice, state: torch.Tensor | None, other: torch.Tensor | None, b: int = b
        ) -> tuple[torch.Tensor, torch.Tensor]:
            here = slice(b, b + 1), at
            own = {
                "g": g[here] if other is None else other[None],
                "beta": beta[here],
                "initial_state": None if state is None else state[None],
                "output_final_state": True,
            }
            out, last = compute(query[here], key[here], value[here], **{**kwargs, **own})
            return out[0], last[0]

        state = None if states is None else states[b]
        length = query.shape[1]
        unit = Recurrence(length=length, state=state, decay=g[b], compute=some)
        out, last = formula(unit)
        outputs.append(out)
        after.append(last)
    return torch.stack(outputs), torch.stack(after)


class FSDPOperators(HFOperators):
    """Those of a model whose parameters ranks share."""

    def __init__(self, engine: Any, chosen: Chosen) -> None:
        # Each rank computes whole operators, of samples of its own.
        super().__init__(engine, chosen, Sharing(rank=engine.ranks.rank))

    def parameter(self, name: str) -> torch.Tensor:
        self._engine.reshard()
        weight = super().parameter(name)
        if not isinstance(weight, DTensor):
            return weight
        return weight.full_tensor().to(getattr(torch, self._engine.compute_dtype))

    def change_weight(self, site: str, change: Formula) -> None:
        if self._chosen.rank is not None:
            raise BadOption(f"fault={self._chosen}: ranks share this weight", "leave @rank out")
        before = self.parameter(site)
        live = super().parameter(site)
        self.callback(live.copy_, live.clone())
        live.copy_(distribute_tensor(change(before.clone()), live.device_mesh, live.placements))

    def sparse_layers(self) -> SparseLayers:
        if self._chosen.fault.expected == "precheck":
            raise BadOption(
                f"fault={self._chosen}: ranks share the weights of experts", "plant it in hf"
            )
        return super().sparse_layers()


def plant_fault(engine: Any, chosen: Chosen) -> LiveOperators:
    """Plants a fault into the live model of this process."""
    return plant(HFOperators(engine, chosen), chosen)


def plant_fault_in_shards(engine: Any, chosen: Chosen) -> LiveOperators:
    """Plants a fault into the live model of this process, which has a part of each parameter."""
    return plant(FSDPOperators(engine, chosen), chosen)
