"""The hooks on the canonical sites of megatron-core's GPTModel.

Activations are `[S, B, F]`. Outputs of column-parallel linears have some features of every row. The
residual stream has every feature, of every row or, under sequence parallelism, of some. The hooks
of each rank take part in gathering; the first of the ranks that share weights taps the rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.common.site_hooks import LiveRows, SiteHooks
from rlk_align.engines.megatron.experts import on_experts
from rlk_align.engines.megatron.grid import Grid
from rlk_align.engines.megatron.stages import Stage
from rlk_align.trace.writer import PassWriter


class MegatronTaps(SiteHooks):
    """Hooks on a live GPTModel."""

    def __init__(
        self,
        model: Any,
        places: list[Place],
        tap: PassWriter | None,
        editor: Editor | None,
        grid: Grid,
        stage: Stage,
        sharded_rows: bool,
    ) -> None:
        """`places`: of this stage; `sharded_rows`: whether ranks share the sequence (sp=1)."""
        super().__init__(model, places, tap, editor, grid.tp)
        self._grid, self._sharded_rows = grid, sharded_rows
        self.first_rank = grid.neighbours[0]
        self._stage = stage

    def at(self, rows: ForwardRows, device: torch.device) -> None:
        """Declares the rows of a `[S, B]` output that the next forward computes."""
        # The next stage overwrites a value that is overwritten only after that stage has read it.
        self._late = []
        self._all = LiveRows.of(rows, rows.index, device)
        sampled = rows.sampled
        wanted = torch.from_numpy(rows.index[sampled]).to(device)
        self._sampled = LiveRows(wanted, rows.sample[sampled], rows.position[sampled], rows.cells)
        share = rows.cells // self._ranks.world
        local = rows.index // share == self._ranks.rank
        index = torch.from_numpy(rows.index[local] % share).to(device)
        self._local = LiveRows(index, rows.sample[local], rows.position[local], share)
        if self._tap is not None and self._observing:
            self._record_rows(self._tap)

    def _record_rows(self, tap: PassWriter) -> None:
        """Records the rows that this rank has, unless every rank has all rows."""
        if not self._sharded_rows and self._grid.cp.world == self._grid.dp.world == 1:
            return
        every = self._grid.all.world == self._grid.tp.world
        sharing = [] if every else self._grid.neighbours
        rows = self._local if self._sharded_rows else self._all
        for sample in np.unique(rows.sample).tolist():
            positions = np.sort(rows.position[rows.sample == sample])
            for run in np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1):
                consecutive = range(int(run[0]), int(run[-1]) + 1)
                tap.computes(self._grid.all.rank, sample, consecutive, sharing)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows:
        if place.rows == "sampled":
            return self._sampled
        return self._local if self._shares_rows(place) else self._all

    def _shares_rows(self, place: Place) -> bool:
        """Whether each rank has only some rows."""
        return self._sharded_rows and place.layout is None

    def replicated(self, place: Place) -> bool:
        return not self._shares_rows(place)

    def observe(self, place: Place, value: torch.Tensor, rows: LiveRows) -> None:
        if self._shares_rows(place):
            parts = self.gather(value)
            value, rows = value if parts is None else torch.cat(parts), self._all
        if self._ranks.rank == 0 or not self._shares_rows(place):
            super().observe(place, value, rows)

    def counts_overwritten(self, place: Place, site: str) -> bool:
        return self._shares_rows(place) or super().counts_overwritten(place, site)

    def install(self) -> None:
        super().install()
        if self._stage.number and self._editor is not None and self._editor.late:
            self._on_received(self._editor)
        on_rotation(self, self._model, self.rope)
        on_experts(self, self._model, self._grid.ep)

    def _on_received(self, editor: Editor) -> None:
        """Overwrites the residual stream that this stage receives, if it is to be overwritten only
        after this stage has read it."""
        site = f"layers.{self._stage.first - 1}.mlp_residual"
        if site not in editor.late or not editor.wants(site):
            return
        place = Place(sites=(site,), module="decoder.layers.0", end="input")

        def received(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            value = kwargs["hidden_states"]
            self._late = [(place, value, value, self.live_rows(place, value))]

        self.before(self._model.decoder.layers[0], received, with_kwargs=True)


def on_rotation(hooks: Hooks, model: Any, see: Callable[[torch.Tensor], None]) -> None:
    """Calls `see` with each output of the rotary embedding, which is a function of megatron-core's
    attention module: in each attention the query, then the key."""
    from megatron.core.transformer import attention, multi_latent_attention

    original = attention.apply_rotary_pos_emb

    def observed(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        see(out)
        return out

    for module in (attention, multi_latent_attention):
        hooks.replace(module, "apply_rotary_pos_emb", observed)
    # The kernels' attention rotates both with a module of its own.
    for layer in model.decoder.layers:
        if hasattr(layer.self_attention, "rope"):
            hooks.on_outputs(layer.self_attention.rope, see)
