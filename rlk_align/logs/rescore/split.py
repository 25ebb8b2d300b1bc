"""Splits the dump's mismatch along a chain of log-probs of the same ids.

g are the rollout's log-probs in the dump, R those of the rollout engine's prefill, T those of the
training engine, and t those of the trainer in the dump. An edge is the difference of two
neighbours, so the edges of a token add up to its t − g.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlk_align.compare.metrics import edge_metrics
from rlk_align.interval import Floats, ratio
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.diagnose.evidence import C_STATISTIC
from rlk_align.logs.diagnose.explain import Breach, Explanation, Status, explain
from rlk_align.logs.dumps.sequences import Sequences
from rlk_align.logs.rescore.choose import Choice
from rlk_align.logs.rescore.record import Rescored, SplitEdge, SplitName
from rlk_align.logs.rescore.words import next_step, sentence
from rlk_align.results import EngineRecord, SideName

NAMES: dict[tuple[str, str], SplitName] = {
    ("g", "R"): "decode_vs_prefill",
    ("g", "T"): "decode_vs_train",
    ("R", "T"): "prefill_vs_train",
    ("R", "t"): "prefill_vs_dump",
    ("T", "t"): "train_vs_dump",
}
_KEYS: dict[SideName, str] = {"rollout": "R", "train": "T"}


@dataclass(frozen=True)
class Scores:
    """A side's log-probs of the chosen sequences."""

    values: Floats
    """[N]"""
    missing: NDArray[np.bool_]
    """[N]"""
    dtype: str


@dataclass(frozen=True)
class _Column:
    key: str
    values: Floats
    dtypes: Sequence[str | None]


def split(
    choice: Choice,
    explained: Explanation,
    scores: Mapping[SideName, Scores],
    engines: Mapping[SideName, EngineRecord],
    contract: RunContract,
) -> Rescored:
    """Judges the dump by the contract for runs, and finds the edge that carries its mismatch."""
    run = choice.sequences
    wanted = run.compared & (run.position > 0)
    used = wanted.copy()
    for side in scores.values():
        used &= ~side.missing
    columns = [_Column("g", run.rollout, run.rollout_dtypes)]
    for name, side in sorted(scores.items()):
        columns.append(_Column(_KEYS[name], side.values, [side.dtype] * len(run)))
    columns.append(_Column("t", run.train, run.train_dtypes))
    sums = _sums(run, used, columns)
    edges = tuple(
        _edge(run, used, ends, sums, k, contract) for k, ends in enumerate(pairwise(columns))
    )
    odd = _odd_engine(columns, used, contract)
    carrier = "prefill_vs_train" if odd else _carrier(edges, sums)
    dump_metrics = edge_metrics(run.rollout[used], run.train[used])
    missing = int((wanted & ~used).sum())
    doubts = [
        *explained.doubts,
        *_doubts(edges, dump_metrics.mean_abs_dlogp, missing, wanted, contract),
    ]
    breaches = tuple(_breaches(edges))
    if not doubts and not breaches and explained.status == "pass":
        doubts += _unsure(edges)
    failed = bool(explained.breaches or breaches)
    status: Status = "inconclusive" if doubts else "fail" if failed else "pass"
    return Rescored(
        explained=explained,
        edges=edges,
        own=dump_metrics,
        carrier=carrier,
        odd=odd,
        sentence=sentence(edges, carrier, odd, bool(doubts)),
        next=next_step(edges, carrier, engines, status),
        status=status,
        doubts=tuple(doubts),
        breaches=breaches,
        chosen=len(run),
        worst=choice.worst,
        usable=choice.usable,
        missing=missing,
        temperature=choice.temperature,
        engines=engines,
        notes=choice.notes,
    )


def _sums(run: Sequences, used: NDArray[np.bool_], columns: Sequence[_Column]) -> list[Floats]:
    """Σ |Δ| of each edge and each sequence, [S], over the tokens whose values are all finite."""
    finite = used & np.all([np.isfinite(c.values) for c in columns], axis=0)
    sums = []
    for first, second in pairwise(columns):
        size = np.zeros(len(finite))
        size[finite] = np.abs(second.values[finite] - first.values[finite])
        sums.append(np.bincount(run.sequence, size, len(run)).astype(np.float64))
    return sums


def _edge(
    run: Sequences,
    used: NDArray[np.bool_],
    ends: tuple[_Column, _Column],
    sums: Sequence[Floats],
    k: int,
    contract: RunContract,
) -> SplitEdge:
    first, second = ends
    dtypes = (first.dtypes, second.dtypes)
    if any(name is None for names in dtypes for name in names):
        # If a dtype is unknown, the lowest precision is assumed.
        dtypes = ([None] * len(run), [None] * len(run))
    part = replace(
        run,
        scored=used,
        rollout=first.values,
        train=second.values,
        rollout_missing=~used,
        train_missing=~used,
        rollout_dtypes=dtypes[0],
        train_dtypes=dtypes[1],
    )
    alone = explain([part], contract)
    metrics = edge_metrics(first.values[used], second.values[used])
    named = alone.diagnoses[0].name if alone.diagnoses else None
    counts = np.bincount(run.sequence, used, len(run)).astype(np.float64)
    whole = np.sum(sums, axis=0)
    return SplitEdge(
        name=NAMES[first.key, second.key],
        metrics=metrics,
        mean=ratio(sums[k], counts),
        share=ratio(sums[k], whole),
        mean_ratio=alone.mean_ratio,
        c=alone.c,
        c_limit=contract.limit("quantisation", dtype=alone.dtype),
        # Engines that are equal bit for bit are not copies, because each side was computed.
        diagnosis=None if named == "vacuous" else named,
        nonfinite=int((~np.isfinite(second.values - first.values))[used].sum()),
    )


def _carrier(edges: Sequence[SplitEdge], sums: Sequence[Floats]) -> SplitName | None:
    whole = np.sum(sums, axis=0)
    for k, edge in enumerate(edges):
        others = [s for j, s in enumerate(sums) if j != k]
        if all(ratio(sums[k] - other, whole).above(0.0) for other in others):
            return edge.name
    return None


def _breaches(edges: Sequence[SplitEdge]) -> Iterator[tuple[SplitName, Breach]]:
    for edge in edges:
        if edge.nonfinite:
            what = "log-probs that are not finite"
            yield edge.name, ("finite", what, float(edge.nonfinite), 0.0)
        if edge.c.above(edge.c_limit):
            yield edge.name, ("quantisation", C_STATISTIC, edge.c.value, edge.c_limit)


def _unsure(edges: Sequence[SplitEdge]) -> Iterator[str]:
    """Yields a doubt for each edge that may be above or below its limit."""
    for edge in edges:
        if not edge.c.value <= edge.c_limit:
            yield (
                f"{edge.name}: c is {edge.c.value:.2g}, more than {edge.c_limit:g}, and may be "
                f"{edge.c.low:.2g} to {edge.c.high:.2g}: the sequences are too few or too different"
            )


def _odd_engine(
    columns: Sequence[_Column], used: NDArray[np.bool_], contract: RunContract
) -> SideName | None:
    """The engine that differs from both of its neighbours, although these agree."""
    factor = contract.threshold("rescored.odd")
    if len(columns) != 4:
        return None
    finite = used & np.all([np.isfinite(c.values) for c in columns], axis=0)
    if not finite.any():
        return None
    g, rollout, train, t = (c.values[finite] for c in columns)
    sides: tuple[tuple[SideName, Floats, Floats, Floats], ...] = (
        ("rollout", g, rollout, train),
        ("train", rollout, train, t),
    )
    for side, before, own, after in sides:
        distances = [float(np.abs(own - other).mean()) for other in (before, after)]
        if min(distances) > factor * float(np.abs(after - before).mean()):
            return side
    return None


def _doubts(
    edges: Sequence[SplitEdge],
    own: float,
    missing: int,
    wanted: NDArray[np.bool_],
    contract: RunContract,
) -> list[str]:
    """The reasons why nothing about the dump follows from the edges."""
    doubts = []
    which = "rescored" if contract.asks("missing", "rescored") else "null"
    allowed = contract.limit("missing", which)
    if not missing <= allowed * int(wanted.sum()):
        doubts.append(
            f"{missing:,} of {int(wanted.sum()):,} tokens were not scored again: the values of "
            "their logits were not recorded (raise --trace-budget, or take fewer --sequences), or "
            "the engine does not expose its log-probs"
        )
    ends = (edges[0], edges[-1])
    far = min(e.mean.value for e in ends) > contract.threshold("rescored.odd") * own
    if far and any(not e.c.value <= e.c_limit for e in ends):
        doubts.append(
            "the engines agree with neither side of the dump, and these are closer to each other: "
            "the engines score another model than the run's. Name the checkpoint of that step "
            "with --model"
        )
    return doubts
