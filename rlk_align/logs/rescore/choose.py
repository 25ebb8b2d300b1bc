"""Chooses the sequences that are scored again: all of a small dump, or else the worst ones and a
seeded sample of the others."""

import shlex
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.imported_run import ImportedRun
from rlk_align.logs.dumps.sequences import Sequences, join


@dataclass(frozen=True)
class Choice:
    """The sequences that are scored again, and how they were chosen."""

    sequences: Sequences
    temperature: float
    """The temperature by which the engines divide their logits."""
    worst: int
    """The number of sequences with the largest mean |Δ|; the others were sampled. 0 if all
    sequences were taken."""
    usable: int
    """The number of sequences that could be chosen."""
    total: int
    """The number of sequences in the dump."""
    notes: tuple[str, ...]


def choose(run: ImportedRun, count: int, seed: int, temperature: float | None) -> Choice:
    """Reads the dump twice: to rank its sequences, and to take the chosen ones.

    If `temperature` is None, it is the one that the dump states for most sequences, or else 1.
    Raises DumpError if no token can be scored again, or if none has both sides' log-probs.
    """
    sizes, stated = _survey(run)
    notes: list[str] = []
    usable = ~np.isnan(sizes)
    if temperature is None:
        temperature, usable = _temperature(stated, usable, notes)
    if not usable.any():
        raise DumpError(f"{run.folder}: no scored token has both log-probs", _what_is_missing(run))
    number, worst = _indices(sizes, usable, count, seed)
    return Choice(
        sequences=_take(run, number),
        temperature=temperature,
        worst=worst,
        usable=int(usable.sum()),
        total=len(sizes),
        notes=tuple(notes),
    )


def _what_is_missing(run: ImportedRun) -> str:
    return f"rlk-align explain {shlex.quote(str(run.folder))} reports what the dump lacks"


def _survey(run: ImportedRun) -> tuple[NDArray[np.float64], list[float | None]]:
    """The mean |Δ| of each sequence, and the temperature that the dump states for it. The mean is
    infinite if a value is not finite, and NaN if there is no token to score."""
    sizes: list[NDArray[np.float64]] = []
    stated: list[float | None] = []
    scored = {"rollout": 0, "trainer": 0}
    for batch in run.sequences():
        scored["rollout"] += int((batch.scored & ~batch.rollout_missing).sum())
        scored["trainer"] += int((batch.scored & ~batch.train_missing).sum())
        # An engine cannot score the first token of a sequence.
        used = batch.compared & (batch.position > 0)
        with np.errstate(invalid="ignore"):
            size = np.abs(batch.train - batch.rollout)
        size = np.where(used, np.where(np.isfinite(size), size, np.inf), 0.0)
        counts = np.bincount(batch.sequence, used, len(batch))
        sums = np.bincount(batch.sequence, size, len(batch))
        with np.errstate(invalid="ignore"):
            sizes.append(np.where(counts > 0, sums / counts, np.nan))
        stated += [s.temperature for s in batch.sampling]
    for side, count in scored.items():
        if not count:
            raise DumpError(
                f"{run.folder}: no scored token has a log-prob of the {side}: there is no mismatch "
                "to split",
                _what_is_missing(run),
            )
    return np.concatenate(sizes), stated


def _temperature(
    stated: list[float | None], usable: NDArray[np.bool_], notes: list[str]
) -> tuple[float, NDArray[np.bool_]]:
    """The temperature of most usable sequences, and the mask of the sequences with it."""
    counts = Counter(t for t, u in zip(stated, usable, strict=True) if u)
    if not counts:
        return 1.0, usable
    common = counts.most_common(1)[0][0]
    chosen = usable & np.array([t == common for t in stated])
    if len(counts) > 1:
        notes.append(
            f"{int(usable.sum() - chosen.sum()):,} sequences with another temperature are omitted"
        )
    if common is None:
        notes.append(
            "the dump does not state its temperature, so 1 is assumed: set another with "
            "temperature=T in a SPEC"
        )
    elif not common > 0:
        notes.append("the dump was sampled greedily, at temperature 0: 1 is used")
    return common if common else 1.0, chosen


def _indices(
    sizes: NDArray[np.float64], usable: NDArray[np.bool_], count: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """The chosen sequences, in the dump's order, and the number of the worst ones among them."""
    known = np.flatnonzero(usable)
    if len(known) <= count:
        return known, 0
    order = known[np.argsort(-sizes[known], kind="stable")]
    worst = (count + 1) // 2
    drawn = np.random.default_rng(seed).permutation(order[worst:])[: count - worst]
    return np.sort(np.concatenate([order[:worst], drawn])), worst


def _take(run: ImportedRun, number: NDArray[np.int64]) -> Sequences:
    parts: list[Sequences] = []
    start = 0
    for batch in run.sequences():
        here = number[(number >= start) & (number < start + len(batch))] - start
        if len(here):
            parts.append(batch.take(here))
        start += len(batch)
    return join(parts)
