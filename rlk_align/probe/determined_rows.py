"""The determined rows of a unit: those in which it certainly computed on recorded inputs."""

import numpy as np
import torch

from rlk_align.model.sites import RowIndex
from rlk_align.probe.graft import GraftedEnd
from rlk_align.probe.graph import UnitGraph
from rlk_align.trace.values import RecordedRows


class RecordedEnd:
    """One engine of an edge: the rows of its capture and of its graft passes."""

    def __init__(self, end: GraftedEnd, index: RowIndex) -> None:
        self.end = end
        self.name = f"{end.side} {end.passname}"
        self.captured, self.self_grafted, self.cross_grafted = (
            RecordedRows(p, index) for p in (end.captured, end.self_grafted, end.cross_grafted)
        )

    def dtype(self, site: str) -> torch.dtype:
        return getattr(torch, self.end.captured.record.sites[site].dtype)

    def not_reproduced(self, site: str) -> int:
        """The number of rows that it does not reproduce if it is grafted with its own inputs."""
        present = self.captured.present(site)
        same = (self.captured.digests(site) == self.self_grafted.digests(site)).all(axis=1)
        return int((present & ~(same & self.self_grafted.present(site))).sum())


def determined_rows(
    index: RowIndex,
    graph: UnitGraph,
    grafted: RecordedEnd,
    source: RecordedEnd,
    expected: np.ndarray,
) -> tuple[np.ndarray, str]:
    """Returns the mask of the rows in which the unit certainly read recorded inputs and of which
    every output is recorded, and why other rows are left out."""
    none = np.zeros(len(index), dtype=bool)
    for site in graph.sites:
        wrong = grafted.not_reproduced(site.name)
        if wrong:
            return none, (
                f"{grafted.name}, grafted with its own inputs, does not reproduce {wrong} rows of "
                f"its {site.name}"
            )
    rows = expected.copy()
    reasons = {}
    for name in graph.inputs + graph.prefix_inputs:
        valued, live = source.captured.has_value(name), grafted.cross_grafted.present(name)
        if not live.any():
            return none, f"{grafted.name} shows no {name}"
        to_write = int((valued & live).sum())
        written = grafted.end.cross_grafted.record.overwritten.get(name, 0)
        if written < to_write:
            return none, f"{grafted.name} overwrote {written} of {to_write} rows of {name}"
        if valued.any() and not _exact(source.dtype(name), grafted.dtype(name)):
            return none, (
                f"{name} of {source.name} is {source.dtype(name)}, which {grafted.name} rounds to "
                f"{grafted.dtype(name)}"
            )
        at = {f"{source.name} keeps no value of {name}": valued}
        at[f"{grafted.name} does not compute {name}"] = live
        for reason, good in at.items():
            mask = index.prefix_all(good) if name in graph.prefix_inputs else good
            reasons[reason] = rows & ~mask
            rows &= mask
    for site in graph.sites:
        outputs = {source.name: source.captured, grafted.name: grafted.captured}
        outputs[f"the graft pass of {grafted.name}"] = grafted.cross_grafted
        for who, recorded in outputs.items():
            good = recorded.has_value(site.name)
            reasons[f"{who} keeps no value of {site.name}"] = rows & ~good
            rows &= good
    why_not = [f"{int(m.sum())} rows: {why}" for why, m in reasons.items() if m.any()]
    return rows, "; ".join(why_not)


def _exact(source_dtype: torch.dtype, live_dtype: torch.dtype) -> bool:
    """Whether the live dtype has every value of the source's dtype."""
    return torch.promote_types(source_dtype, live_dtype) == live_dtype
