"""Draws a request's tokens again from an engine's logits, and finds where they part from the
recorded ones, and why.

N = tokens, V = vocabulary
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlk_align.logs.replay.record import LogitDifference, Parting, Reason, Replay
from rlk_align.logs.replay.request import RecordedRequest
from rlk_align.results import EngineRecord

Draw = Callable[..., Any]
"""`engines.patch.redraw`."""
ROWS = 64
"""Rows that are drawn at once; no draw depends on it."""
Rows = Sequence[torch.Tensor | None]
"""The logits [V] of each token; None where there are none."""


def replay(
    request: RecordedRequest, logits: Rows, before: Rows, engine: EngineRecord, draw: Draw
) -> Replay:
    """logits: the engine's; before: those of the record."""
    there = [n for n, row in enumerate(logits) if row is not None]
    parting: Parting | None = None
    otherwise, others = 0, list[int]()
    compared = 0
    for start in range(0, len(there), ROWS):
        block = there[start : start + ROWS]
        rows = torch.stack([logits[n] for n in block])
        tokens = torch.tensor([request.ids[request.at[n]] for n in block])
        where = (torch.from_numpy(x[block]) for x in (request.seeds, request.at))
        drawn = draw(rows, tokens, *where, request.temperature, request.limits)
        scored = drawn.processed if request.processed else drawn.raw
        for i, n in enumerate(block):
            known = not np.isnan(request.logprobs[n])
            compared += known
            if known and float(scored[i]) != np.float32(request.logprobs[n]):
                others.append(int(request.at[n]))
            if int(drawn.ids[i]) == int(tokens[i]):
                continue
            otherwise += 1
            if parting is None:
                parting = _parting(request, n, i, rows[i], before[n], drawn, float(scored[i]))
    seeds = dict.fromkeys(request.seeds.tolist())
    return Replay(
        request=request.name, engine=engine,
        settings={"temperature": request.temperature, **request.limits}, seeds=tuple(seeds),
        tokens=len(there), missing=len(logits) - len(there), otherwise=otherwise,
        other_logprobs=len(others), compared_logprobs=compared,
        first_other_logprob=others[0] if others else None, parting=parting,
    )  # fmt: skip


def _parting(
    request: RecordedRequest, n: int, i: int, row: torch.Tensor, before: torch.Tensor | None,
    drawn: Any, logprob: float,
) -> Parting:  # fmt: skip
    """That of token n of the request, which is row i of what was drawn."""
    position = int(request.at[n])
    recorded, other = request.ids[position], int(drawn.ids[i])
    said = request.logprobs[n]
    known = None if np.isnan(said) else float(said)
    difference = None if before is None else _difference(before, row)
    same = None if before is None else difference is None
    kept = bool(drawn.kept[i, recorded])
    reason: Reason = "unknown"
    if same is not None:
        reason = "another logit" if not same else "another draw" if kept else "another kept set"
    elif not kept:
        reason = "another kept set"
    elif known is not None:
        reason = "another draw" if logprob == np.float32(known) else "another logit"
    return Parting(
        number=n, position=position, recorded=recorded, drawn=other,
        gap=float(row[other].double() - row[recorded].double()), kept=int(drawn.kept[i].sum()),
        mass=float(drawn.mass[i]), recorded_is_kept=kept, recorded_logprob=known, logprob=logprob,
        logits=difference, same_logits=same, reason=reason,
    )  # fmt: skip


def _difference(before: torch.Tensor, after: torch.Tensor) -> LogitDifference | None:
    """None if all values are equal."""
    distance = (after.double() - before.double()).abs()
    differing = before.double() != after.double()
    if not differing.any():
        return None
    largest = int(distance.nan_to_num(torch.inf).argmax())
    return LogitDifference(
        differing=int(differing.sum()), of=len(after), largest=float(distance[largest]),
        token=largest,
    )  # fmt: skip
