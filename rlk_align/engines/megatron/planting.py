"""The operators of a live GPTModel, for a planted fault to replace one.

S = length, B = sequences, F = features; activations are `[S, B, F]`, packed ones `[T, 1, F]`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose, choice_replaced
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.weights import Parameter, canonical
from rlk_align.engines.megatron.attention import slices_of
from rlk_align.engines.megatron.stages import Stage
from rlk_align.engines.megatron.taps import on_rotation
from rlk_align.engines.process.ranks import all_gather
from rlk_align.selftest.faults.catalogue import Chosen
from rlk_align.selftest.planting.live_operators import LiveOperators, plant
from rlk_align.selftest.planting.operands import Formula, ForwardTokens, Report, Unit, in_place_of
from rlk_align.selftest.planting.rank import Sharing
from rlk_align.selftest.planting.sparse_layers import KernelLayers, Routing, SparseLayers, swap


class MegatronOperators(LiveOperators):
    """The operators of one rank's model, built from the local spec."""

    def __init__(self, engine: Any, chosen: Chosen) -> None:
        tp = engine.grid.tp
        sharing = Sharing(
            rank=tp.rank,
            ranks=tp.world,
            gather=lambda local: all_gather(local, tp),
            rows=engine.settings.sequence_parallel,
        )
        super().__init__(engine, engine.model, engine.places, chosen, sharing)
        self._stage: Stage = engine.stage
        self.before(self._model, self._note_rows)

    def computes(self, site: str) -> bool:
        return self._stage.computes(site)

    def module(self, site: str) -> Any:
        return self._model.get_submodule(self._stage.local(self._places[site].module))

    def _watch(self, site: str, see: Callable[[Any], None]) -> None:
        if self.computes(site):
            super()._watch(site, see)
            return
        # The previous stage sent the residual stream.

        def received(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            see(kwargs["hidden_states"])

        self.before(self._layer(self._stage.first), received, with_kwargs=True)

    def _layer(self, number: int) -> Any:
        return self._model.decoder.layers[number - self._stage.first]

    @property
    def faulty(self) -> bool:
        return self._chosen.on(self._engine.ranks.rank)

    def parameter(self, name: str) -> torch.Tensor:
        plan, live = self._entries(name), self._engine.live()
        every = canonical(plan, lambda path: live[path].detach(), self._sharing.gather)
        return next(p.value for p in every if p.name == name)

    def live(self, name: str) -> tuple[torch.Tensor, Parameter]:
        entry = self._entries(name)[0]
        return self._engine.live()[entry.name].detach(), entry

    def _entries(self, name: str) -> list[Parameter]:
        return [entry for entry in self._engine.plan if name in entry.layout.ops]

    def _note_rows(self, _module: Any, args: Any) -> None:
        ids, positions = (x.t().flatten() for x in args[:2])
        self.rows = ForwardTokens(ids, positions, torch.zeros_like(ids, dtype=torch.bool))

    def sparse_layers(self) -> SparseLayers:
        kind = MegatronKernelLayers if self.with_kernels else MegatronSparseLayers
        return kind(self, self._layer, self._stage.experts)

    def on_rotation(self, see: Callable[[torch.Tensor], None]) -> None:
        on_rotation(self, self._model, see)

    def _attention(self, layer: int, formula: Formula) -> None:
        core = self._layer(layer).self_attention.core_attention
        original, scale = core.forward, core.softmax_scale

        def forward(query: Any, key: Any, value: Any, mask: Any, *args: Any, **more: Any) -> Any:
            out = original(query, key, value, mask, *args, **more)
            packed = more.get("packed_seq_params")
            slices = slices_of(query, packed, self._engine.grid.cp)
            query, key, value, new = (slices.whole(x) for x in (query, key, value, out))
            out, new = new, new.clone()
            if packed is None:
                for b in range(query.shape[1]):
                    visible = _causal(len(query), out.device)
                    if mask is not None:
                        visible = ~mask[b if mask.shape[0] > 1 else 0, 0]
                    here = (query[:, b], key[:, b], value[:, b])
                    new[:, b] = self.attended(formula, layer, out[:, b], *here, visible, scale)
                return slices.own(new)
            for start, stop in pairwise(packed.cu_seqlens_q.tolist()):
                visible = _causal(stop - start, out.device)
                here = (query[start:stop], key[start:stop], value[start:stop])
                new[start:stop] = self.attended(
                    formula, layer, out[start:stop], *here, visible, scale
                )
            return slices.own(new)

        self.replace(core, "forward", forward)

    def _logprob(self, formula: Formula) -> None:
        original = self._engine.shared_logprobs

        def report(logits: torch.Tensor, sampled: torch.Tensor, targets: torch.Tensor) -> Any:
            result = torch.from_numpy(original(logits, sampled, targets)).to(logits.device)
            rows = logits[sampled % len(logits), sampled // len(logits)]
            faulty = formula(
                Report(
                    result=result,
                    logits=self.whole("logits", rows).float(),
                    targets=targets,
                    temperature=self._engine.temperature,
                )
            )
            return (faulty if self.faulty else result).float().cpu().numpy()

        self.replace(self._engine, "shared_logprobs", report)

    def biased(self, site: str) -> bool:
        # A later operator adds the bias of the other modules.
        return super().biased(site) and not self.module(site).skip_bias_add

    def change_positions(self, change: Formula) -> None:
        def shift(_module: Any, args: Any) -> Any:
            ids, positions, *rest = args
            return (ids, change(positions), *rest)

        self.before(self._model, shift)

    def change_boundaries(self, change: Formula) -> None:
        def shift(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            packed = kwargs["packed_seq_params"]
            if len(packed.cu_seqlens_q) > 2:
                packed.cu_seqlens_q = packed.cu_seqlens_kv = change(packed.cu_seqlens_q)
            return args, kwargs

        self.before(self._model, shift, with_kwargs=True)


def _causal(length: int, device: torch.device) -> torch.Tensor:
    """bool `[length, length]`: which keys (columns) a query (row) sees."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class MegatronSparseLayers(SparseLayers):
    """The sparse layers of one rank, which has all experts or a share of them."""

    def __init__(self, hooks: Hooks, layer: Callable[[int], Any], experts: range) -> None:
        """`layer`: returns the layer of a number; `experts`: those that this rank has."""
        self._hooks, self._layer, self._experts = hooks, layer, experts

    def change_logits(self, layer: int, formula: Formula) -> None:
        router = self._layer(layer).mlp.router
        weight = router.weight.detach()

        def gating(hidden: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
            flat = result.reshape(-1, result.shape[-1])
            x = hidden.reshape(len(flat), -1)
            unit = Unit(result=flat, inputs=(x,), weight=weight, head_dim=1)
            return in_place_of(formula, unit).reshape(result.shape)

        self._after_gating(router, gating)

    def change_choice(self, layer: int, choose: Choose) -> None:
        router = self._layer(layer).mlp.router
        route = router.routing

        def routing(*args: Any, **kwargs: Any) -> Any:
            with choice_replaced(choose, len(router.weight)):
                return route(*args, **kwargs)

        self._hooks.replace(router, "routing", routing)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        router = self._layer(layer).mlp.router
        latest: list[torch.Tensor] = []

        def note(_hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            latest[:] = [logits.reshape(-1, logits.shape[-1])]
            return logits

        def see(_module: Any, _inputs: Any, output: Any) -> Any:
            weights, sent = output
            chosen = sent.nonzero(as_tuple=True)[1].reshape(len(sent), -1)
            own = weights.gather(1, chosen)
            new = change(Routing(logits=latest[0], chosen=chosen, weights=own))
            return weights.scatter(1, chosen, new.to(weights.dtype)), sent

        self._after_gating(router, note)
        self._hooks.after(router, see)

    def leave_out(self, layer: int, expert: int) -> None:
        def see(_module: Any, _inputs: Any, output: Any) -> Any:
            rows, *rest = output
            return (torch.zeros_like(rows), *rest)

        if expert in self._experts:
            self._hooks.after(self._expert(layer, expert).linear_fc2, see)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        if one not in self._experts or other not in self._experts:
            return
        weights = (self._expert(layer, e).linear_fc1.weight.detach() for e in (one, other))
        swap(self._hooks, *weights)

    def _expert(self, layer: int, number: int) -> Any:
        return self._layer(layer).mlp.experts.local_experts[number - self._experts.start]

    def _after_gating(
        self, router: Any, see: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> None:
        """Makes the router's product return `see(hidden, logits)`."""
        gating = router.gating

        def changed(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return see(hidden, gating(hidden, *args, **kwargs))

        self._hooks.replace(router, "gating", changed)


class MegatronKernelLayers(KernelLayers, MegatronSparseLayers):
    """Sparse layers of the kernels: a token's own rank adds up the rows of its experts."""

    def _chooser(self, layer: int) -> Any:
        return self._layer(layer).mlp

    _computer = _chooser


def plant_fault(engine: Any, chosen: Chosen) -> LiveOperators:
    """Plants a fault into this rank's live model; called on all ranks."""
    return plant(MegatronOperators(engine, chosen), chosen)
