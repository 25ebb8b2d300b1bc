"""Observes and overwrites the sites of a live model, by its engine's table of places.

A live tensor is `[*cells, *features]`: one or two dimensions of rows, then features. New values are
written into the live tensor itself, which also changes the residual stream that a decoder layer
keeps in a variable. By then the old values were observed, and so copied.
N = rows of the trace in one forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from rlk_align.engines.common.edits import Editor
from rlk_align.engines.common.experts import Choose
from rlk_align.engines.common.hooks import Hooks
from rlk_align.engines.common.places import Place
from rlk_align.engines.common.rows import ForwardRows
from rlk_align.engines.process.ranks import ALONE, Ranks, all_gather, gather
from rlk_align.trace.digest import digest_rows
from rlk_align.trace.schema import copy_name
from rlk_align.trace.writer import PassWriter


@dataclass(frozen=True, slots=True)
class LiveRows:
    """The rows of a live tensor that are rows of the trace."""

    index: torch.Tensor | None
    """int64 `[N]`: the index of each among the tensor's rows; None for all rows, in order."""
    sample: np.ndarray
    position: np.ndarray
    cells: int
    """The number of rows of the tensor; further rows are padding."""

    @classmethod
    def of(cls, rows: ForwardRows, index: np.ndarray, device: torch.device) -> "LiveRows":
        """The recorded rows of a forward, at `index` in the tensor."""
        recorded = rows.sample >= 0
        index = index[recorded]
        everything = np.array_equal(index, np.arange(rows.cells))
        at = None if everything else torch.from_numpy(index).to(device)
        return cls(at, rows.sample[recorded], rows.position[recorded], rows.cells)

    def part(self, at: slice) -> "LiveRows":
        """Those in a tensor that has these of the packed rows, none of which are padding."""
        if self.index is None:
            sample, position = self.sample[at], self.position[at]
            return LiveRows(None, sample, position, len(sample))
        index = self.index - at.start
        within = (index >= 0) & (index < at.stop - at.start)
        kept = within.cpu().numpy()
        cells = at.stop - at.start
        return LiveRows(index[within], self.sample[kept], self.position[kept], cells)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """`[N, F]`: these rows, with all features of a row in one dimension."""
        rows = value.reshape(value.shape[: _row_dims(value, self.cells)].numel(), -1)
        return rows[: self.cells] if self.index is None else rows[self.index]

    def write(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Overwrites these rows with `[N, F]`."""
        dims = _row_dims(target, self.cells)
        index = self.index
        if index is None:
            index = torch.arange(self.cells, device=target.device)
        at = torch.unravel_index(index, target.shape[:dims])
        # Detached: an output may be a view that autograd guards.
        target.detach()[at] = rows.reshape(len(rows), *target.shape[dims:])


def _row_dims(value: torch.Tensor, cells: int) -> int:
    """The number of leading dimensions that count a tensor's rows; it has at least `cells` rows."""
    dims = 1
    while value.shape[:dims].numel() < cells:
        dims += 1
        assert dims < value.dim(), (tuple(value.shape), cells)
    return dims


class SiteHooks(Hooks):
    """Hooks on a live model while the context is entered. Without a tap no hooks are installed,
    unless a subclass does it because this process takes part in gathering."""

    def __init__(
        self,
        model: Any,
        places: Iterable[Place],
        tap: PassWriter | None,
        editor: Editor | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`tap`: the writer of the rows and of the numbers of overwritten rows; `ranks`: those that
        share the features of the model's values."""
        super().__init__()
        self._model, self._places = model, list(places)
        self._tap, self._editor, self._ranks = tap, editor, ranks
        self._observing = editor is None or editor.observed
        self._turns: dict[str, list[Place]] = {}
        self._inside: dict[str, Place] = {}
        self._turn: list[Place] = []
        self._late: list[tuple[Place, Any, torch.Tensor, LiveRows]] = []

    def __enter__(self) -> Self:
        if self._tap is not None:
            self.install()
        return self

    def install(self) -> None:
        for place in self._places:
            if place.unexposed:
                continue
            self._hook(self._model.get_submodule(place.module), place)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows | None:
        """The rows of a value that are rows of the trace, which each engine determines itself. None
        if the pass needs none of them."""
        raise NotImplementedError

    first_rank = 0
    """The first of the ranks that gather values here, numbered among all ranks of the engine."""

    def gather(self, local: torch.Tensor) -> list[torch.Tensor] | None:
        """The tensors of all ranks, on a rank that records values; None on the others."""
        return gather(local, self._ranks)

    def replicated(self, place: Place) -> bool:
        """Whether all ranks have the same rows of a place without a layout."""
        return True

    def _unequal(self, place: Place, local: torch.Tensor) -> list[torch.Tensor] | None:
        """The tensors of all ranks for a replicated place, if they are not all equal; returned on a
        rank that records values."""
        if self._ranks.world == 1 or not self.replicated(place):
            return None
        digests = all_gather(digest_rows(local), self._ranks)
        if all(torch.equal(digests[0], other) for other in digests[1:]):
            return None
        return self.gather(local)

    def counts_overwritten(self, place: Place, site: str) -> bool:
        """Whether this rank reports the number of overwritten rows, so that each counts once."""
        holder = 0 if place.layout is None else place.layout.holders(site)[0][0]
        return self._ranks.rank == holder

    def _hook(self, module: Any, place: Place) -> None:
        def before(_module: Any, inputs: Any) -> None:
            self.visit(place, inputs[0])

        def after(_module: Any, _inputs: Any, output: Any) -> Any:
            return self.visit(place, output)

        def enter(*_: Any) -> None:
            self._turn = list(self._turns[place.module])

        if place.end == "input":
            self.before(module, before)
        elif place.end == "output":
            self.after(module, after)
        elif place.end == "inside":
            self._inside |= dict.fromkeys(place.sites, place)
        else:
            if place.module not in self._turns:
                self.before(module, enter)
            self._turns.setdefault(place.module, []).append(place)

    def rope(self, rotated: torch.Tensor) -> None:
        """Takes the next output of the rotary embedding in the attention that is running."""
        self.visit(self._turn.pop(0), rotated)

    def show(self, site: str, value: torch.Tensor, part: slice | None = None) -> None:
        """Takes a value inside a module, `[cells, F]`, or those rows of it that `part` says."""
        place = self._inside[site]
        rows = self.live_rows(place, value)
        if rows is not None and part is not None:
            rows = rows.part(part)
        if rows is not None and self._observing:
            self.observe(place, value, rows)

    def visit_inside(self, site: str, value: torch.Tensor, part: slice | None = None) -> None:
        """Takes a value inside a module, `[*cells, F]`, or those rows of it that `part` says, and
        overwrites it where the pass changes it."""
        place = self._inside[site]
        if place.unexposed:
            return
        rows = self.live_rows(place, value)
        if rows is None:
            return
        if part is not None:
            rows = rows.part(part)
        self._visit(place, value, rows)

    def recorded_choice(self, site: str) -> Choose | None:
        """A function that replaces the engine's choice of experts by the recorded one; None if the
        site is not overwritten. A row that has the recorded experts already keeps its order."""
        editor = self._editor
        if editor is None or not editor.wants(site):
            return None

        def choose(_scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            rows = self.live_rows(self._inside[site], chosen)
            assert rows is not None, site
            live = rows.read(chosen).clone()
            recorded, which = editor(site, live, rows.sample, rows.position, 0)
            at = torch.from_numpy(which).to(live.device)
            same = (live[at].sort(dim=1).values == recorded).all(dim=1, keepdim=True)
            live[at] = torch.where(same, live[at], recorded)
            out = chosen.clone()
            rows.write(out, live)
            if self._tap is not None:
                self._tap.overwritten(site, int(which.sum()))
            return out

        return choose

    def visit(self, place: Place, passed: Any) -> Any:
        """Observes and overwrites a module's input or output; returns the new output."""
        value = place.access.read(passed)
        rows = self.live_rows(place, value)
        return passed if rows is None else self._visit(place, passed, rows)

    def _visit(self, place: Place, passed: Any, rows: LiveRows) -> Any:
        value = place.access.read(passed)
        if self._observing:
            self.observe(place, value, rows)
        late, self._late = self._late, []
        if self._editor is not None and any(map(self._editor.wants, place.sites)):
            if self._editor.late.isdisjoint(place.sites):
                passed = self._overwrite(place, passed, value, rows)
            else:
                assert place.access.target(passed) is value, place.sites
                self._late = [(place, passed, value, rows)]
        for earlier in late:
            self._overwrite(*earlier)
        return passed

    def observe(self, place: Place, value: torch.Tensor, rows: LiveRows) -> None:
        """Passes the rows of a place, assembled from all ranks, to the tap."""
        local = rows.read(value)
        shared = place.layout is not None
        parts = self.gather(local) if shared else self._unequal(place, local) or [local]
        if parts is None or self._ranks.rank or self._tap is None:
            return
        for site in place.sites:
            recorded = parts[0] if place.layout is None else place.layout.assemble(site, parts, 1)
            self._tap(site, recorded, rows.sample, rows.position)
            for rank, copy in self._copies(place, site, recorded, parts):
                other = (digest_rows(copy) != digest_rows(recorded)).any(1).cpu()
                at = other.numpy()
                if at.any():
                    name = copy_name(site, self.first_rank + rank)
                    self._tap(name, copy[other], rows.sample[at], rows.position[at])

    @staticmethod
    def _copies(
        place: Place, site: str, recorded: torch.Tensor, parts: list[torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(rank, the site's value with that rank's copies), for each rank with copies of features
        that are recorded from another rank."""
        if place.layout is None:
            yield from enumerate(parts[1:], 1)
            return
        for rank, pieces in place.layout.copies(site):
            copy = recorded.clone()
            for at, piece in pieces:
                copy[:, piece.start : piece.stop] = parts[rank][:, at : at + piece.size]
            yield rank, copy

    def _overwrite(self, place: Place, passed: Any, value: torch.Tensor, rows: LiveRows) -> Any:
        assert self._editor is not None
        target, local = place.access.target(passed), rows.read(value).clone()
        for site, at, start, size in self._pieces(place, local.shape[1]):
            if not self._editor.wants(site):
                continue
            live = local[:, at : at + size]
            new, chosen = self._editor(site, live, rows.sample, rows.position, start)
            # Recorded logits end with the vocabulary; the padding after it is unchanged.
            live[torch.from_numpy(chosen).to(live.device), : new.shape[1]] = new
            if self._tap is not None and start == 0 and self.counts_overwritten(place, site):
                self._tap.overwritten(site, int(chosen.sum()))
        if target is not value:
            target.detach().copy_(value)
        rows.write(target, local)
        return place.access.after_write(passed)

    def _pieces(self, place: Place, features: int) -> list[tuple[str, int, int, int]]:
        """(site, offset in this rank's tensor, first feature, number of features) of each piece."""
        if place.layout is None:
            return [(place.sites[0], 0, 0, features)]
        local = place.layout.local(self._ranks.rank)
        return [(p.op, at, p.start, p.size) for at, p in local if p.size]


class ForwardHooks(SiteHooks):
    """Hooks of an engine that declares the rows of each forward before it runs."""

    def at(self, rows: ForwardRows, device: torch.device) -> None:
        """Declares the rows that the next forward computes."""
        self._rows, self._device = rows, device
        self._all = LiveRows.of(rows, rows.index, device)

    def live_rows(self, place: Place, value: torch.Tensor) -> LiveRows:
        if place.rows == "all":
            return self._all
        r = self._rows
        # A decode step computes the logits of the last rows only.
        cells = value.shape[:-1].numel()
        index = torch.from_numpy(r.index[r.sampled] - (r.cells - cells)).to(self._device)
        return LiveRows(index, r.sample[r.sampled], r.position[r.sampled], cells)
