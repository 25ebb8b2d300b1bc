"""Where the operators of a live GPTModel lie, for a planted fault to stand in for one.

S = length, B = sequences, F = features; activations are `[S, B, F]`, packed ones `[T, 1, F]`.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from rlk_align.engines.common.weights import Parameter, canonical
from rlk_align.engines.faults.catalogue import Chosen
from rlk_align.engines.faults.operators import Operators, plant
from rlk_align.engines.faults.sharing import Sharing
from rlk_align.engines.faults.unit import Formula, ForwardTokens, Report
from rlk_align.engines.megatron.attention import slices_of
from rlk_align.engines.megatron.input import ModelInput
from rlk_align.engines.megatron.sparse_layers import MegatronKernelLayers, MegatronSparseLayers
from rlk_align.engines.megatron.stages import Stage
from rlk_align.engines.megatron.taps import on_rotation
from rlk_align.engines.process.ranks import all_gather


class MegatronOperators(Operators):
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
        # The residual stream that the stage before sent.

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

    def sparse_layers(self) -> MegatronSparseLayers:
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
        original = self._engine._logprobs

        def report(logits: torch.Tensor, inputs: ModelInput) -> Any:
            result = torch.from_numpy(original(logits, inputs)).to(logits.device)
            rows = logits[
                inputs.sampled % len(inputs.ids),
                inputs.sampled // len(inputs.ids),
            ]
            faulty = formula(
                Report(
                    result=result,
                    logits=self.whole("logits", rows).float(),
                    targets=inputs.targets,
                    temperature=self._engine.temperature,
                )
            )
            return (faulty if self.faulty else result).float().cpu().numpy()

        self.replace(self._engine, "_logprobs", report)

    def biased(self, site: str) -> bool:
        # Whatever follows adds the bias of the others.
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


def plant_fault(engine: Any, chosen: Chosen) -> Operators:
    """Into this rank's live model; called on all ranks."""
    return plant(MegatronOperators(engine, chosen), chosen)
