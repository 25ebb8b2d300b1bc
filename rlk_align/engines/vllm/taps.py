"""The hooks on the canonical sites of a vLLM decoder.

vLLM packs the tokens of all requests into one tensor `[tokens, features]`.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common import transformers_rope
from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.fused_places import attentions
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import packed_rows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.process.ranks import Ranks, all_gather
from rlk_align.engines.vllm.delta_net import on_delta_nets
from rlk_align.engines.vllm.experts import on_choices, replay_choices
from rlk_align.engines.vllm.mamba import on_mambas
from rlk_align.engines.vllm.places import of_transformers, vllm_places
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.trace.writer import PassWriter


class VLLMTaps(SiteHooks):
    """Hooks on vLLM's live model, which also map each packed row to its (sample, position)."""

    reasons: Mapping[str, str] = MappingProxyType({})
    """Module -> why its values are not recorded."""

    def __init__(
        self,
        runner: Any,
        ranks: Ranks,
        shape: ModelShape,
        tap: PassWriter | None,
        editor: Editor | None,
        samples: dict[str, int],
        sampled: list[range],
        kind: str,
    ) -> None:
        """`tap`: the writer of rank 0; None on the other ranks, which take part in gathering."""
        model = runner.get_model()
        super().__init__(model, self.places_of(model, shape, ranks.world), tap, editor, ranks)
        self._runner, self._samples = runner, samples
        self._sampled, self._kind = sampled, kind
        self._batch: Any = None
        self._logits: LiveRows | None = None

    def places_of(self, model: Any, shape: ModelShape, world: int) -> Iterable[Place]:
        return vllm_places(model, shape, world)

    def install(self) -> None:
        self._watch_batches()
        self.around(self._model, self._locate_rows, self._keep_hidden)
        self.before(self._model.logits_processor, self._locate_logits)
        super().install()
        on_rotation(self, self._model, self.rope)
        on_delta_nets(self, self._model, self._kind == "decode")
        on_mambas(self, self._model)
        replay_choices(self, self._model)
        on_choices(self, self._model, self.show)

    def gather(self, local: torch.Tensor) -> list[torch.Tensor]:
        return all_gather(local, self._ranks)

    def replicated(self, place: Place) -> bool:
        # Some ranks get no logits.
        return place.rows == "all"

    def live_rows(self, place: Place, value: torch.Tensor | None) -> LiveRows | None:
        if place.rows == "all":
            return self._all
        # Some ranks get no logits.
        return None if value is None else self._logits

    def _watch_batches(self) -> None:
        """Keeps the layout of each batch, which vLLM's newer runner returns from `prepare_inputs`;
        the older runner has it as attributes."""
        if not hasattr(self._runner, "prepare_inputs"):
            return
        original = self._runner.prepare_inputs

        def prepare_inputs(*args: Any, **kwargs: Any) -> Any:
            self._batch = original(*args, **kwargs)
            return self._batch

        self.replace(self._runner, "prepare_inputs", prepare_inputs)

    def _locate_rows(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Determines the (sample, position) of each packed row of the next forward."""
        runner = self._runner
        if self._batch is not None:
            count, starts = self._batch.num_reqs, self._batch.query_start_loc_np
            requests = self._batch.req_ids
        else:
            count, starts = runner.input_batch.num_reqs, runner.query_start_loc.np
            requests = runner.input_batch.req_ids
        starts = np.asarray(starts[: count + 1])
        owners = np.array([self._owner(str(r)) for r in requests[:count]])
        self._last = starts[1:] - 1
        positions = kwargs["positions"] if "positions" in kwargs else args[1]
        if positions.dim() == 2:
            # The three positions of text are equal.
            positions = positions[0]
        position = self._positions(positions[: starts[-1]], starts)
        self._rows = packed_rows(owners, starts, position, self._sampled)
        self._all = LiveRows.of(self._rows, self._rows.index, positions.device)

    def _owner(self, request: str) -> int:
        """The sample of a request, by its id in vLLM's runner; -1 if it is not recorded. The
        outputs call a request `17`, and the runner calls it `17-8cdd...`."""
        return self._samples[request.split("-")[0]]

    def _positions(self, positions: torch.Tensor, starts: np.ndarray) -> np.ndarray:
        """int64 `[N]`: the position of each packed row. `positions`: those that the model is called
        with; `starts`: the first row of each request, and the end."""
        return positions.cpu().numpy().astype(np.int64)

    def _keep_hidden(self, out: torch.Tensor) -> None:
        self._hidden = out

    def force(self, batch: TokenBatch) -> None:
        """Makes each request sample the batch's next token. Both runners draw a token for each
        request by their sampler's `sample`, and look up log-probs afterwards."""
        sampler = self._runner.sampler
        original = sampler.sample

        def sample(*args: Any, **kwargs: Any) -> Any:
            drawn, processed = original(*args, **kwargs)
            ids = [
                self._next(batch.samples[s].ids, p)
                for s, p in zip(
                    self._rows.sample[self._last], self._rows.position[self._last], strict=True
                )
            ]
            return torch.tensor(ids, dtype=drawn.dtype, device=drawn.device), processed

        self.replace(sampler, "sample", sample)

    @staticmethod
    def _next(ids: tuple[int, ...], position: int) -> int:
        """The token after a position; after the last one, any token, which is discarded."""
        return ids[min(position + 1, len(ids) - 1)]

    def _locate_logits(self, _module: Any, inputs: Any) -> None:
        """Determines the rows of the next logits. vLLM computes logits of each request's last row
        in order to sample, and of slices of the prompt in order to score it; a decode pass needs
        the former, a prefill pass the latter."""
        hidden, self._logits = inputs[1], None
        is_slice = hidden.untyped_storage().data_ptr() == self._hidden.untyped_storage().data_ptr()
        if is_slice != (self._kind == "prefill"):
            return
        if is_slice:
            first = hidden.storage_offset() // self._hidden.stride(0)
            rows = np.arange(first, first + hidden.shape[0])
            rows = rows[rows < self._rows.cells]
        else:
            rows = self._last
        sampled = np.flatnonzero(self._rows.sampled[rows])
        chosen = rows[sampled]
        self._logits = LiveRows(
            torch.from_numpy(sampled).to(hidden.device),
            self._rows.sample[chosen],
            self._rows.position[chosen],
            len(rows),
        )


def on_rotation(hooks: Hooks, model: Any, see: Callable[[torch.Tensor], None]) -> None:
    """Calls `see` with each output of the rotary embedding: the queries, then the keys."""
    if of_transformers(model):
        transformers_rope.on_rotation(hooks, model, see)
        return
    # All layers share one module, unless a patch has changed that; some families do not rotate.
    every = attentions(model).values()
    for rotary in {getattr(attention, "rotary_emb", None) for attention in every} - {None}:
        hooks.on_outputs(rotary, see)
