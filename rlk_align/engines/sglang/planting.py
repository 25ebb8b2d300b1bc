"""The operators of SGLang's live decoder, for a planted fault to replace one.

T = packed tokens of all requests; activations are `[T, F]`.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from rlk_align.engines.common.experts import Choose
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import first
from rlk_align.engines.common.products import Method
from rlk_align.engines.common.weights import Parameter
from rlk_align.engines.process.ranks import all_gather
from rlk_align.engines.sglang.experts import replace_choice, sparse_blocks
from rlk_align.engines.sglang.places import sglang_places
from rlk_align.engines.sglang.taps import on_rotation, row_counts
from rlk_align.engines.sglang.weights import live_parameter, parameter_plan, product_method
from rlk_align.selftest.faults.catalogue import Chosen
from rlk_align.selftest.planting.fused_operators import FusedOperators
from rlk_align.selftest.planting.live_operators import plant
from rlk_align.selftest.planting.operands import Formula, ForwardTokens, Report, Unit, in_place_of
from rlk_align.selftest.planting.rank import Sharing
from rlk_align.selftest.planting.sparse_layers import KernelLayers, Routing, SparseLayers, swap


class SGLangOperators(FusedOperators):
    """The operators of the model in this process."""

    def __init__(self, engine: Any, chosen: Chosen) -> None:
        self._runner, self._ranks = engine.runner, engine.ranks
        ranks = self._ranks
        sharing = Sharing(rank=ranks.rank, ranks=ranks.world, gather=self._gather)
        places = sglang_places(engine.model, engine.shape, ranks.world)
        super().__init__(engine, engine.model, places, chosen, sharing)
        self.before(self._model.model, self._note_rows)

    def _gather(self, local: torch.Tensor) -> list[torch.Tensor]:
        return all_gather(local, self._ranks)

    def plan(self) -> Iterable[Parameter]:
        return parameter_plan(self._model, self.shape, self._ranks.world)

    def tensor(self, path: str) -> torch.Tensor | None:
        return live_parameter(self._model, path)

    def method(self, path: str) -> Method:
        return product_method(self._model, path)

    def _note_rows(self, _module: Any, inputs: Any) -> None:
        ids, positions, batch = inputs[:3]
        lengths = torch.tensor(row_counts(batch), device=ids.device)
        alone = torch.repeat_interleave(lengths == 1, lengths)
        self.rows = ForwardTokens(ids, positions, alone & (positions > 0))

    def sparse_layers(self) -> SparseLayers:
        kind = SGLangKernelLayers if self.with_kernels else SGLangSparseLayers
        return kind(self, self._model)

    def on_rotation(self, see: Callable[[torch.Tensor], None]) -> None:
        on_rotation(self, self._model, see)

    def _attention(self, layer: int, formula: Formula) -> None:
        module = self._model.model.layers[layer].self_attn.attn
        original, pool = module.forward, self._runner.token_to_kv_pool
        table = self._runner.req_to_token_pool.req_to_token

        def forward(query: Any, key: Any, value: Any, batch: Any, *args: Any, **more: Any) -> Any:
            out = original(query, key, value, batch, *args, **more)
            q = query.reshape(len(query), -1, self.shape.head_dim)
            new, start = out.clone(), 0
            for r, count in enumerate(row_counts(batch)):
                rows, length = slice(start, start + count), int(batch.seq_lens[r])
                slots = table[batch.req_pool_indices[r], :length].long()
                keys, values = (buffer[slots] for buffer in pool.get_kv_buffer(module.layer_id))
                positions = torch.arange(length, device=out.device)
                visible = positions <= positions[length - count :, None]
                new[rows] = self.attended(
                    formula, layer, out[rows], q[rows], keys, values, visible, module.scaling
                )
                start += count
            return new

        self.replace(module, "forward", forward)

    def _logprob(self, formula: Formula) -> None:
        """The log-probs of sampled tokens are the sampler's, those of prompts the logits
        processor's."""
        self._sampled_logprob(formula)
        self._prompt_logprob(formula)

    def _sampled_logprob(self, formula: Formula) -> None:
        sampler = self._runner.sampler
        original = sampler.forward

        def forward(
            output: Any, info: Any, return_logprob: bool, *more: Any, **options: Any
        ) -> Any:
            logits = output.next_token_logits.clone()
            ids = original(output, info, return_logprob, *more, **options)
            output.next_token_logprobs = formula(_report(output.next_token_logprobs, logits, ids))
            return ids

        self.replace(sampler, "forward", forward)

    def _prompt_logprob(self, formula: Formula) -> None:
        scorer = self._model.logits_processor.input_logprob_processor
        original = scorer._forward_by_chunk

        def forward(
            states: Any,
            samples: Any,
            scored: torch.Tensor,
            owners: Any,
            head: Any,
            get_logits: Any,
            metadata: Any,
            *more: Any,
            **options: Any,
        ) -> Any:
            chunks: list[torch.Tensor] = []

            def kept(*inputs: Any, **settings: Any) -> torch.Tensor:
                chunks.append(get_logits(*inputs, **settings))
                return chunks[-1]

            result, last = original(
                states, samples, scored, owners, head, kept, metadata, *more, **options
            )
            targets = metadata.extend_input_logprob_token_ids_gpu
            report = _report(result.token_logprobs, torch.cat(chunks)[scored], targets)
            result.token_logprobs = formula(report)
            return result, last

        self.replace(scorer, "_forward_by_chunk", forward)


def _report(result: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> Report:
    return Report(result=result.clone(), logits=logits, targets=targets.long(), temperature=1.0)


class SGLangSparseLayers(SparseLayers):
    """The sparse layers of the model in this process."""

    def __init__(self, hooks: Hooks, model: Any) -> None:
        self._hooks, self._blocks = hooks, sparse_blocks(model)

    def change_logits(self, layer: int, formula: Formula) -> None:
        gate = self._blocks[layer].gate
        weight = gate.weight.detach()

        def see(_module: Any, inputs: Any, output: Any) -> Any:
            unit = Unit(result=first(output), inputs=(inputs[0],), weight=weight, head_dim=1)
            return (in_place_of(formula, unit), *output[1:])

        self._hooks.after(gate, see)

    def change_choice(self, layer: int, choose: Choose) -> None:
        replace_choice(self._hooks, self._blocks[layer], choose)

    def change_weights(self, layer: int, change: Callable[[Routing], torch.Tensor]) -> None:
        def weigh(routed: Any) -> torch.Tensor:
            routing = Routing(
                logits=routed.router_logits,
                chosen=routed.topk_ids.long(),
                weights=routed.topk_weights,
            )
            return change(routing).to(routed.topk_weights.dtype)

        self._replace_weights(layer, weigh)

    def leave_out(self, layer: int, expert: int) -> None:
        """The experts get the weight 0; what the router shows is unchanged."""

        def without(_module: Any, inputs: Any) -> Any:
            hidden, routed, *more = inputs
            weights = routed.topk_weights.masked_fill(routed.topk_ids == expert, 0)
            return (hidden, routed._replace(topk_weights=weights), *more)

        self._hooks.before(self._blocks[layer].experts, without)

    def swap_experts(self, layer: int, one: int, other: int) -> None:
        weight = self._blocks[layer].experts.w13_weight.detach()
        swap(self._hooks, weight[one], weight[other])

    def _replace_weights(self, layer: int, weigh: Callable[[Any], torch.Tensor]) -> None:
        topk = self._blocks[layer].topk
        original = topk.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            routed = original(*args, **kwargs)
            return routed._replace(topk_weights=weigh(routed))

        self._hooks.replace(topk, "forward", forward)


class SGLangKernelLayers(KernelLayers, SGLangSparseLayers):
    """Sparse layers that the kernels compute, from the router to the sum of the experts' rows."""

    def _chooser(self, layer: int) -> Any:
        return self._blocks[layer]

    _computer = _chooser


def plant_fault(engine: Any, chosen: Chosen) -> ExitStack:
    """Plants a fault into the live model. Raises BadOption if the model lacks its operator."""
    return plant(SGLangOperators(engine, chosen), chosen)
