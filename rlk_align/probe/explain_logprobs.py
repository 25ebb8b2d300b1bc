"""Finds the transformation of the logits that gives the log-probs that an engine reported. It is
needed if log-probs differ although the logits do not.

N = rows, V = vocabulary. Everything is float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlk_align.model.sites import RowIndex
from rlk_align.probe.transformations import (
    AS_STATED,
    Logits,
    Stated,
    TokenContext,
    Transformation,
    resolution,
    transformations,
)
from rlk_align.trace.reader import Trace
from rlk_align.trace.values import RecordedRows

BLOCK_ELEMENTS = 1 << 24
"""Logits that are transformed at once."""
LEAST_SHARE = 0.5
"""The share of rows that a transformation must reproduce for the others to be its exceptions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """How the reported log-probs of some rows were computed."""

    name: str | None
    """The transformation that fits, e.g. `temperature twice`; None if there is none."""
    words: str
    rows: int
    explained: int
    """Rows that the transformation reproduces, without its exceptions."""
    largest_residual: float
    """The largest |reported - computed| of these rows."""
    exceptions: dict[str, int]
    """Kind of exception, e.g. `zero` -> the number of its rows."""
    also: tuple[str, ...] = ()
    """Other transformations that fit as well: these rows do not distinguish them."""


def explain(
    logits: torch.Tensor, reported: torch.Tensor, rows: TokenContext, stated: Stated
) -> Explanation:
    """Explains reported log-probs `[N]`, in their own dtype, by logits `[N, V]`.

    The candidates are the stated transformation and those that are one mistake away from it, in
    the order of `transformations`. If several fit, the first one is named.
    """
    count = len(reported)
    if not count:
        return _none("there are no rows", 0)
    reported = reported.double()
    step = max(1, BLOCK_ELEMENTS // logits.shape[-1])
    computed: dict[Transformation, list[torch.Tensor]] = {}
    limits, other = [], []
    # A transformation with a parameter fits it to the first rows.
    tried = transformations(logits[:step], reported[:step], rows[:step], stated)
    for start in range(0, count, step):
        part = slice(start, start + step)
        block = logits[part].double()
        limits.append(resolution(logits[part]))
        other.append(_other_token(block, reported[part], stated, limits[-1]))
        sorted_once = Logits(block)
        for one in tried:
            computed.setdefault(one, []).append(one(sorted_once, rows[part]))
    limit, another = torch.cat(limits), torch.cat(other)
    fits = [_Fit(t, torch.cat(values), reported, limit, another) for t, values in computed.items()]
    whole = [f for f in fits if f.whole]
    if not whole:
        nearest = max(fits, key=lambda f: f.explained)
        words = f"no known transformation reproduces them; the nearest, {nearest.words}, "
        return _none(f"{words}explains {nearest.explained} of {count} rows", count)
    most = max(f.explained for f in whole)
    best = [f for f in whole if f.explained == most]
    chosen = best[0]
    also = () if chosen.name == AS_STATED else tuple(f.name for f in best[1:])
    return Explanation(
        name=chosen.name,
        words=_description(chosen, also, count),
        rows=count,
        explained=chosen.explained,
        largest_residual=chosen.largest_residual,
        exceptions=chosen.exceptions,
        also=also,
    )


class _Fit:
    """How well one transformation reproduces the reported values."""

    def __init__(
        self,
        transformation: Transformation,
        computed: torch.Tensor,
        reported: torch.Tensor,
        limit: torch.Tensor,
        another: torch.Tensor,
    ) -> None:
        self.name, self.words = transformation.name, transformation.words
        residual = (computed - reported).abs()
        if transformation.bf16:
            # Two computations may differ by an ulp of bf16, and both give a bf16 number.
            limit = limit + torch.finfo(torch.bfloat16).eps * reported.abs()
            limit = torch.where(reported == reported.bfloat16(), limit, -1.0)
        # A NaN is not reproduced.
        hit = residual <= limit
        self.explained = int(hit.sum())
        self.largest_residual = float(residual[hit].max()) if self.explained else float("nan")
        rest = ~hit
        zero, unlabelled = reported == 0, computed.isnan()
        kinds = {
            "zero": rest & zero,
            "no label": rest & ~zero & unlabelled,
            "another token": rest & ~zero & ~unlabelled & another,
        }
        self.exceptions = {name: int(m.sum()) for name, m in kinds.items() if m.any()}
        enough = self.explained >= LEAST_SHARE * len(reported)
        excused = self.explained + sum(self.exceptions.values())
        self.whole = enough and excused == len(reported)


def _other_token(
    logits: torch.Tensor, reported: torch.Tensor, stated: Stated, limit: torch.Tensor
) -> torch.Tensor:
    """bool `[N]`: rows whose value is the stated log-prob of one of the two likeliest tokens. This
    happens if a token that was sampled there is scored instead of the target."""
    likeliest = (logits / stated.temperature).log_softmax(-1).topk(2, -1).values
    return ((likeliest - reported[:, None]).abs() <= limit[:, None]).any(-1)


def _description(fit: _Fit, also: Sequence[str], count: int) -> str:
    text = f"the log-probs are {fit.words}: {fit.explained} of {count} rows, "
    text += f"within {fit.largest_residual:.2g}"
    phrases = {
        "zero": "report 0, as for a missing value",
        "another token": "are scored against another token, one of the two likeliest",
        "no label": "have no such label",
    }
    for name, number in fit.exceptions.items():
        text += f"; {number} {phrases[name]}"
    if also:
        text += f"; {', '.join(also)} explains these rows as well"
    return text


def _none(words: str, rows: int) -> Explanation:
    return Explanation(
        name=None,
        words=words,
        rows=rows,
        explained=0,
        largest_residual=float("nan"),
        exceptions={},
    )


def explain_pass(trace: Trace, passname: str) -> Explanation:
    """Explains the rows of a pass whose logits and log-prob are both recorded."""
    reader = trace.read_pass(passname)
    for site, name in (("logits", "logits"), ("logprob", "log-probs")):
        if site not in reader.record.sites:
            return _none(f"{passname} has no {name}", 0)
    index = RowIndex(trace.tokens)
    recorded = RecordedRows(reader, index)
    number = np.flatnonzero(recorded.has_value("logits") & recorded.has_value("logprob"))
    if not len(number):
        return _none(f"no row of {passname} keeps both its logits and its log-prob", 0)
    ends = index.offsets[index.sample[number] + 1]

    def label(offset: int) -> torch.Tensor:
        at = number + offset
        ids = index.token[np.minimum(at, len(index) - 1)]
        return torch.from_numpy(np.where(at < ends, ids, -1))

    rows = TokenContext(targets=label(1), before=label(0), after=label(2))
    return explain(
        recorded.values("logits", number),
        recorded.values("logprob", number).squeeze(-1),
        rows,
        Stated.of(trace.record.attributes),
    )
