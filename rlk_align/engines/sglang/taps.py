"""The hooks on the canonical sites of an SGLang decoder.

SGLang packs the tokens of all requests into one tensor `[tokens, features]`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import packed_rows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.process.ranks import Ranks
from rlk_align.engines.sglang.experts import on_choices, replay_choices
from rlk_align.engines.sglang.head import HEAD
from rlk_align.engines.sglang.places import sglang_places
from rlk_align.model.prompts import TokenBatch
from rlk_align.model.shape import ModelShape
from rlk_align.trace.writer import PassWriter


class SGLangTaps(SiteHooks):
    """Hooks on SGLang's live model, which also map each packed row to its (sample, position)."""

    def __init__(
        self,
        runner: Any,
        ranks: Ranks,
        shape: ModelShape,
        tap: PassWriter | None,
        editor: Editor | None,
        samples: dict[str, int],
        sampled: list[range],
    ) -> None:
        """`samples`: id of a request -> sample; `sampled`: per sample, the positions whose logits
        are wanted."""
        model = runner.model
        places = sglang_places(model, shape, ranks.world)
        super().__init__(model, places, tap, editor, ranks)
        self._runner, self._samples, self._sampled = runner, samples, sampled
        self._pruned = np.empty(0, dtype=np.int64)
        self._logits: LiveRows | None = None

    def install(self) -> None:
        processor = self._model.logits_processor
        # SGLang calls the outer model's `forward`, past its hooks.
        self.before(self._model.model, self._locate_rows)
        self._watch_pruning(processor)
        self.before(processor.get_submodule(HEAD), self._locate_logits)
        super().install()
        on_rotation(self, self._model, self.rope)
        replay_choices(self, self._model)
        on_choices(self, self._model, self.show)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows | None:
        return self._all if place.rows == "all" else self._logits

    def _locate_rows(self, _module: Any, inputs: Any) -> None:
        """Determines the (sample, position) of each packed row of the next forward."""
        positions, batch = inputs[1], inputs[2]
        lengths = row_counts(batch)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        owners = np.array([self._owner(rid) for rid in batch.rids])
        position = self._positions(positions, batch)
        self._last = starts[1:] - 1
        self._rows = packed_rows(owners, starts, position, self._sampled)
        self._all = LiveRows.of(self._rows, self._rows.index, positions.device)

    def _owner(self, request: str) -> int:
        """The sample of a request, by its id; -1 if it is not recorded."""
        return self._samples[request]

    def _positions(self, positions: torch.Tensor, batch: Any) -> np.ndarray:
        """int64 `[N]`: the position of each packed row. `positions`: those that the model is called
        with."""
        return positions.cpu().numpy().astype(np.int64)

    def _watch_pruning(self, processor: Any) -> None:
        """Keeps the indices of the rows whose logits SGLang computes. Its own selection of hidden
        states, called with the rows' numbers instead, returns them."""
        prune = processor._get_pruned_states

        def pruned(hidden: torch.Tensor, before: Any, aux: Any, metadata: Any) -> Any:
            numbers = torch.arange(len(hidden), device=hidden.device)[:, None]
            self._pruned = prune(numbers, None, None, metadata)[0][:, 0].cpu().numpy()
            return prune(hidden, before, aux, metadata)

        self.replace(processor, "_get_pruned_states", pruned)

    def _locate_logits(self, _module: Any, inputs: Any) -> None:
        """Determines the rows of the next logits; SGLang computes those of many rows in chunks."""
        hidden = inputs[1]
        rows, self._pruned = self._pruned[: len(hidden)], self._pruned[len(hidden) :]
        sampled = np.flatnonzero(self._rows.sampled[rows])
        chosen = rows[sampled]
        self._logits = LiveRows(
            torch.from_numpy(sampled).to(hidden.device),
            self._rows.sample[chosen],
            self._rows.position[chosen],
            len(rows),
        )

    def force(self, batch: TokenBatch) -> None:
        """Makes each request sample the batch's next token; its log-prob is SGLang's own."""
        sampler = self._runner.sampler
        original = sampler._sample_from_probs

        def sample(*args: Any, **kwargs: Any) -> Any:
            drawn = original(*args, **kwargs)
            # Newer versions return a mask too.
            drawn, *mask = drawn if isinstance(drawn, tuple) else (drawn,)
            last = zip(self._rows.sample[self._last], self._rows.position[self._last], strict=True)
            ids = [_next(batch.samples[s].ids, p) for s, p in last]
            forced = torch.tensor(ids, dtype=drawn.dtype, device=drawn.device)
            return (forced, *mask) if mask else forced

        self.replace(sampler, "_sample_from_probs", sample)


def row_counts(batch: Any) -> list[int]:
    """The number of rows of each request in a forward."""
    if batch.forward_mode.is_decode():
        return [1] * len(batch.rids)
    return list(batch.extend_seq_lens_cpu)


def _next(ids: tuple[int, ...], position: int) -> int:
    """The token after a position; after the last one, any token, which is discarded."""
    return ids[min(position + 1, len(ids) - 1)]


def on_rotation(hooks: Hooks, model: Any, see: Callable[[torch.Tensor], None]) -> None:
    """Calls `see` with each output of the rotary embedding: the queries, then the keys."""
    # Layers share one module.
    for rotary in {layer.self_attn.rotary_emb for layer in model.model.layers}:
        hooks.on_outputs(rotary, see)
