"""The sequences of a run whose tokens a page shows: those with the largest |Δlogp|, and those with
the most flips."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlk_align.comparison_table import HEAD
from rlk_align.report.source import ReportSource
from rlk_align.results import EdgeResult

SHOWN = 4
"""The most sequences that are drawn."""
LONGEST = 320
"""The most tokens of a sequence that are drawn."""
_CELLS = 30_000
"""The most values of all heat maps, so that the page of a deep model stays small."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The drawn stretch of one sequence."""

    sample: int
    positions: list[int]
    ids: list[int]
    texts: list[str | None]
    sampled: list[bool]
    delta: list[float | None]
    """Δlogp of each token itself; None for tokens of the prompt."""
    errors: dict[str, list[float | None]]
    """Site -> relative L2 error of each row; None where no value was kept."""
    before: int
    """The number of tokens before the stretch."""
    after: int
    """The number of tokens after the stretch."""

    @property
    def worst(self) -> tuple[float, int]:
        """(|Δlogp|, index in the stretch) of the worst token."""
        sizes = [(_size(d), n) for n, d in enumerate(self.delta) if d is not None]
        return max(sizes, default=(0.0, 0))

    def word(self, number: int) -> str:
        """The text of a token, or its id where the text is empty or unknown."""
        return self.texts[number] or f"⟨{self.ids[number]}⟩"

    def delta_text(self, number: int) -> str:
        """A token's Δlogp; empty for one of the prompt's."""
        delta = self.delta[number]
        return "" if delta is None else f"{delta:+.2g}"


def _size(delta: float) -> float:
    return math.inf if math.isnan(delta) else abs(delta)


def deltas(source: ReportSource, edge: EdgeResult) -> np.ndarray:
    """Returns Δlogp of every sampled token of an edge, in nats."""
    table = _head(source, edge)
    dlogp = pc.subtract(table["second_logprob"], table["first_logprob"]).drop_null()
    return dlogp.to_numpy()


def _head(source: ReportSource, edge: EdgeResult, columns: Sequence[str] = ()) -> pa.Table:
    table = source.run.rows([*HEAD, *columns])
    return table.filter(pc.equal(table["edge"].cast(pa.string()), edge.name))


def layer_ends(edge: EdgeResult) -> list[str]:
    """Returns the last site of each layer, and the sites outside of layers except logprob."""
    ends: dict[object, str] = {}
    for s in edge.sites:
        if s.op != "logprob":
            ends[s.site if s.layer is None else s.layer] = s.site
    return list(ends.values())


def worst_samples(source: ReportSource, edge: EdgeResult) -> list[Stretch]:
    """Returns the SHOWN samples with the largest |Δlogp|, the largest first."""
    sites = layer_ends(edge)
    table = _head(source, edge)
    size = pc.abs(pc.subtract(table["second_logprob"], table["first_logprob"]))
    # Arrow sorts a NaN last, but a NaN is the worst value.
    size = pc.if_else(pc.is_nan(size), math.inf, size)
    worst = (
        pa.table({"sample": table["sample"], "size": size})
        .group_by("sample")
        .aggregate([("size", "max")])
        .sort_by([("size_max", "descending"), ("sample", "ascending")])
    )
    return _stretches(source, edge, worst["sample"].to_pylist()[:SHOWN], sites)


def flipped_samples(
    source: ReportSource, edge: EdgeResult, choices: Sequence[str], others: Sequence[str]
) -> list[Stretch]:
    """Returns the SHOWN samples with the most flips, the most first, without samples that have
    none. `choices`: the sites at which experts are chosen. `others`: further sites whose errors are
    kept."""
    table = _head(source, edge, choices)
    flips = sum(np.nan_to_num(table[c].to_numpy()) > 0 for c in choices)
    count = np.bincount(table["sample"].to_numpy(), weights=flips)
    order = np.argsort(-count, kind="stable")[:SHOWN]
    return _stretches(source, edge, [int(s) for s in order if count[s]], [*choices, *others])


def _stretches(
    source: ReportSource, edge: EdgeResult, chosen: Sequence[int], sites: Sequence[str]
) -> list[Stretch]:
    rows = _head(source, edge, sites)
    length = max(32, min(LONGEST, _CELLS // (max(1, len(chosen)) * max(1, len(sites)))))
    return [_stretch(rows, sample, sites, length) for sample in chosen]


def _stretch(table: pa.Table, sample: int, sites: Sequence[str], length: int) -> Stretch:
    """Returns the stretch of a long sequence around its first sampled token, with at most a third
    of it prompt where enough was sampled; or around its worst token, where that comes later."""
    rows = table.filter(pc.equal(table["sample"], sample))
    sampled = rows["response"].to_pylist()
    prompt = sampled.index(True) if True in sampled else len(sampled)
    before = max(length // 3, length - (len(sampled) - prompt))
    start = max(0, prompt - before)
    whole = pc.subtract(rows["second_logprob"], rows["first_logprob"]).to_pylist()
    # A row has the log-prob of the next token, so the row before a token has the token's own.
    dlogp = [None, *whole[:-1]]
    worst = max(range(len(dlogp)), key=lambda n: -1.0 if dlogp[n] is None else _size(dlogp[n]))
    if worst >= start + length:
        start = min(worst - length // 2, len(dlogp) - length)
    part = rows.slice(start, length)
    return Stretch(
        sample=sample,
        positions=part["position"].to_pylist(),
        ids=part["token"].to_pylist(),
        texts=part["text"].to_pylist(),
        sampled=sampled[start : start + length],
        delta=dlogp[start : start + length],
        errors={s: part[s].to_pylist() for s in sites if s in part.column_names},
        before=start,
        after=max(0, len(dlogp) - start - length),
    )
