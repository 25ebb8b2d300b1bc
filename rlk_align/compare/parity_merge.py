"""Weights that differ because a LoRA adapter was merged into them, or merged and unmerged again.

A trace has digests of each row of a live weight, and the checkpoint and the adapter are on disk:
the rows that a merge of these gives are computed in each way that trainers merge, and counted.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rlk_align.compare.parity_adapter import NAME
from rlk_align.compare.sides import both_ways
from rlk_align.errors import ToolError
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.dtypes import SAFETENSORS_DTYPES
from rlk_align.model.stored import stored_tensors
from rlk_align.results import Mismatch, SideName
from rlk_align.trace.digest import digest_slices
from rlk_align.trace.reader import Trace
from rlk_align.trace.schema import LoraRecord
from rlk_align.weights.adapter import LowRank, read_adapter, ways

ENOUGH_ROWS = 0.5
"""The share of rows that a merge has to give. Other merges give almost none; rows differ where the
order of sums in float32 decides how an entry is rounded."""

Kind = Literal["merged", "unmerged"]
KINDS: tuple[Kind, ...] = ("merged", "unmerged")
_WHO = {"rollout": "rollout", "train": "trainer"}


@dataclass(frozen=True, slots=True)
class Explained:
    """How a weight came about."""

    kind: Kind
    way: str
    rows: int
    """The number of rows that have the bits of that way."""
    of: int
    share: float
    """The share of entries that differ from the checkpoint's."""


def explain_merges(mismatches: Sequence[Mismatch], rollout: Trace, train: Trace) -> list[Mismatch]:
    """The mismatches; those of weights that a merge explains are replaced by one for each side and
    kind. Weights that a side merged on purpose, `merged=1`, do not stop the comparison."""
    left = list(mismatches)
    found: list[Mismatch] = []
    for side, trace, other in both_ways(rollout, train):
        # A side without an adapter may have the other side's in its weights.
        source = trace if trace.record.adapter is not None else other
        adapter = source.record.adapter
        if adapter is None:
            continue
        mine = [m.name for m in left if m.kind == "weights" and m.name in adapter.modules]
        explained = _explained(trace, source, adapter, mine)
        for kind in KINDS:
            of_kind = {name: e for name, e in explained.items() if e.kind == kind}
            if of_kind:
                found.append(_words(side, kind, of_kind, trace, other))
                left = [m for m in left if m.kind != "weights" or m.name not in of_kind]
    return [*left, *found]


def _explained(
    trace: Trace, source: Trace, adapter: LoraRecord, names: Collection[str]
) -> dict[str, Explained]:
    """`source`: the trace whose checkpoint and adapter may have been merged into the weights."""
    if not names:
        return {}
    try:
        updates = read_adapter(adapter.path).updates
        stored = dict(_stored(source, [name for name in names if name in updates]))
    except ToolError:
        # The precheck names the weights; without these files nothing explains them.
        return {}
    found = {name: _way(trace, name, updates[name], weight) for name, weight in stored.items()}
    return {name: explained for name, explained in found.items() if explained is not None}


def _stored(trace: Trace, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    shape = trace.record.shape
    tensors = stored_tensors(
        Path(trace.record.model), shape.family.modules, shape.fused_rows, shape.family.stacks
    )
    for name in names:
        at = tensors.get(tensor_name(name, shape.family.modules))
        if at is not None and at.dtype in SAFETENSORS_DTYPES:
            yield name, at.load()


def _way(trace: Trace, name: str, update: LowRank, weight: torch.Tensor) -> Explained | None:
    """The way of merging that gives most rows; None if none gives enough."""
    live, (rows, _) = trace.weights[name], trace.weight_slices(name)
    if live.shape != tuple(weight.shape):
        return None
    base = str(weight.dtype).removeprefix("torch.")
    best: Explained | None = None
    for kind in ("merged", "unmerged"):
        for way in ways(base, live.dtype):
            blocks = (
                update.merged(weight, way) if kind == "merged" else update.unmerged(weight, way)
            )
            value = torch.cat([block.value for block in blocks])
            equal = int(np.count_nonzero(digest_slices(value)[0] == rows))
            if equal >= ENOUGH_ROWS * len(rows) and (best is None or equal > best.rows):
                changed = value != weight.to(value.dtype)
                share = float(changed.double().mean())
                best = Explained(kind, str(way), equal, len(rows), share)
    return best


def _words(
    side: SideName, kind: Kind, explained: Mapping[str, Explained], trace: Trace, other: Trace
) -> Mismatch:
    """`other`: the trace of the other side."""
    mine, theirs = trace.record.adapter, other.record.adapter
    adapter = mine or theirs
    assert adapter is not None
    rows = sum(e.rows for e in explained.values())
    of = sum(e.of for e in explained.values())
    changed = sum(e.share for e in explained.values()) / len(explained)
    on_purpose = kind == "merged" and (mine is None or bool(mine.merged))
    count = f"{len(explained)} projection{'s' * (len(explained) != 1)}"
    way = next(iter(explained.values())).way
    again = ", and unmerged again" if kind == "unmerged" else ""
    measured = (
        f"{rows:,} of {of:,} rows have the bits of {way}{again}, and {changed:.1%} of their "
        "entries are not the checkpoint's"
    )
    who = f"the {_WHO[side]}"
    whose = "the other side's" if mine is None else "its"
    lacking = [site for site in adapter.modules if site not in explained]
    if kind == "unmerged":
        detail = f"{who}'s base weights were changed by merging and unmerging {whose} adapter in "
        detail += f"{count}: {measured}. Each synchronisation that merges and unmerges adds to it"
    elif on_purpose:
        detail = f"{who} computes with {whose} adapter merged into {count}: {measured}"
        if lacking:
            detail += f"; it is not merged into {len(lacking)} others, {lacking[0]} first"
        if theirs is None:
            detail += "; the other side has no adapter, and other weights than these"
    else:
        detail = f"{who}'s adapter is merged into {count} and applied beside them as well: it "
        detail += f"counts twice; {measured}"
    here = {"merged": "merged", "unmerged": "merged and unmerged"}[kind]
    return Mismatch(
        kind="weights",
        name=NAME,
        rollout=here if side == "rollout" else "as stored",
        train=here if side == "train" else "as stored",
        detail=detail,
        stops=not on_purpose or bool(lacking) or theirs is None,
    )
