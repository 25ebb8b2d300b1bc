"""Checks whether a capture can be trusted: does observing change it, and does it repeat itself?"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from rlk_align.compare.metrics import edge_metrics
from rlk_align.model.sites import RowIndex, Site
from rlk_align.results import Controls, Noise, NotMeasured, Observer, SideName
from rlk_align.trace.numbered import read_ahead, read_rows
from rlk_align.trace.reader import PassReader, Trace


def check_controls(
    sides: Mapping[SideName, tuple[Trace, list[str]]], index: RowIndex, sites: list[Site]
) -> Controls:
    """Checks both sides; `sides` has the trace and the names of the compared passes of each."""
    noise: dict[SideName, Noise | NotMeasured | None] = {}
    details: list[str] = []
    violated, shifted, unknown, once = False, False, False, list[str]()
    for side, (trace, passes) in sides.items():
        floor: Noise | None = None
        measured = [name for name in passes if not _ran_once(trace, name)]
        once += [f"{side} {name}: {_once(trace)}" for name in passes if name not in measured]
        unknown |= bool(trace.record.imported)
        for name in measured:
            observed, repeat_noise = trace.read_pass(name), None
            if trace.has_pass(f"{name}.repeat"):
                repeat_noise = _noise(
                    name, observed, trace.read_pass(f"{name}.repeat"), index, sites
                )
                # `not <=`: a NaN is the worst noise of all.
                if repeat_noise and (
                    floor is None or not repeat_noise.max_abs_dlogp <= floor.max_abs_dlogp
                ):
                    floor = repeat_noise
            if not trace.has_pass(f"{name}.untapped"):
                details.append(f"{side} {name}: there is no pass without taps to compare with")
                violated = True
                continue
            shift = _logprob_shift(observed, trace.read_pass(f"{name}.untapped"), index)
            if shift is not None:
                details.append(
                    f"{side} {name}: log-probs with and without taps differ by up to "
                    f"{np.max(shift):.3g}"
                )
                repeat = f"{name}.repeat"
                shifted = True
                violated |= repeat_noise is None or not is_noise(
                    shift, _logprob_shift(observed, trace.read_pass(repeat), index)
                )
            for site in _moved(trace, name, index):
                details.append(f"{side} {name}: {site} with and without taps differs")
                violated = True
        repeated = bool(measured) and all(trace.has_pass(f"{name}.repeat") for name in measured)
        noise[side] = floor if floor or repeated else "not measured"
    observer: Observer = "violated" if violated else "within noise floor" if shifted else "bitwise"
    if unknown and not violated:
        observer = "not measured"
    return Controls(observer=observer, observer_detail=details + once, noise=noise)


def _ran_once(trace: Trace, name: str) -> bool:
    """Whether a pass has no controls because a job that recorded itself cannot sample twice. What
    scored the same sequences, in the same engine and with the same taps, has them. An imported pass
    has none."""
    return bool(trace.record.imported) or (bool(trace.record.recorded) and name == "decode")


def _once(trace: Trace) -> str:
    """Why a pass has no controls."""
    if trace.record.imported:
        return f"the files of {trace.record.imported} have no pass without its hooks"
    return f"{trace.record.recorded} sampled once, with taps"


def is_noise(shift: np.ndarray, noise: np.ndarray | None) -> bool:
    """Whether the |Δ| that taps cause, `[N]`, may be another draw of the engine's own |Δ| between
    repetitions, `[N]`. Then each is the larger one at about half of the tokens, and the largest
    values have the same order of magnitude. False for NaN, and for different tokens."""
    if noise is None or shift.shape != noise.shape or not np.isfinite([shift, noise]).all():
        return False
    if not shift.max() <= _MAX_OVER_NOISE * noise.max():
        return False
    unequal = shift != noise
    tokens = int(unequal.sum())
    larger = int((shift > noise).sum())
    return larger <= max(_SHARE * tokens, tokens / 2 + _DEVIATIONS * math.sqrt(tokens) / 2)


_MAX_OVER_NOISE = 32.0
"""Between two draws of a large noise on 36 tokens, the ratio of the largest values was above 12
once in 10,000."""
_SHARE, _DEVIATIONS = 0.75, 4.8
"""The share of tokens that may be further off without taps: chance exceeds the deviations once in a
million, and the fixed share allows for tokens that move together."""


def _noise(
    name: str, first: PassReader, repeat: PassReader, index: RowIndex, sites: list[Site]
) -> Noise | None:
    rows, first_site = 0, ""
    for site, (a, b) in zip(sites, read_ahead((first, repeat), sites, index), strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or not np.array_equal(a.number, b.number):
            differ = abs((len(a.number) if a else 0) - (len(b.number) if b else 0)) or 1
        else:
            differ = int((a.rows.digest[a.at] != b.rows.digest[b.at]).any(axis=1).sum())
        rows += differ
        first_site = first_site or (site.name if differ else "")
    if not rows:
        return None
    metrics = edge_metrics(*paired_logprobs(first, repeat, index)[1:])
    return Noise(
        passname=name,
        rows=rows,
        first_site=first_site,
        max_abs_dlogp=metrics.max_abs_dlogp,
        mean_abs_dlogp=metrics.mean_abs_dlogp,
    )


def paired_logprobs(
    first: PassReader, repeat: PassReader, index: RowIndex
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rows of the batch whose log-prob counts and is in both passes, and the log-probs
    of both passes."""
    a, b = read_rows(first, "logprob", index), read_rows(repeat, "logprob", index)
    if a is None or b is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    number, i, j = np.intersect1d(a.number, b.number, assume_unique=True, return_indices=True)
    counts = index.counted[number]
    number, i, j = number[counts], i[counts], j[counts]
    return (
        number,
        first.values("logprob", a.rows, a.at[i])[:, 0].numpy(),
        repeat.values("logprob", b.rows, b.at[j])[:, 0].numpy(),
    )


def _moved(trace: Trace, name: str, index: RowIndex) -> Iterator[str]:
    """Yields the sites beside the log-probs that the pass without taps has, with other bits than
    the pass with taps repeats: what a pipeline stage that has no log-probs sends to the next."""
    observed, untapped = trace.read_pass(name), trace.read_pass(f"{name}.untapped")
    for site in untapped.record.sites.keys() - {"logprob"}:
        a, b = read_rows(observed, site, index), read_rows(untapped, site, index)
        same = a is not None and b is not None and np.array_equal(a.number, b.number)
        if same and a and b and np.array_equal(a.rows.digest[a.at], b.rows.digest[b.at]):
            continue
        if trace.has_pass(f"{name}.repeat"):
            c = read_rows(trace.read_pass(f"{name}.repeat"), site, index)
            repeats = a and c and np.array_equal(a.rows.digest[a.at], c.rows.digest[c.at])
            if same and not repeats:
                continue  # The engine does not repeat itself, which is its noise.
        yield site


def _logprob_shift(observed: PassReader, other: PassReader, index: RowIndex) -> np.ndarray | None:
    """Returns the |Δ| of every token, `[N]`. Returns None where the log-probs are bitwise equal or
    the engine cannot show them, and infinity where the passes have different rows."""
    if all("logprob" in p.record.unexposed for p in (observed, other)):
        return None
    a, b = read_rows(observed, "logprob", index), read_rows(other, "logprob", index)
    if a is None or b is None or a.strays or b.strays or not np.array_equal(a.number, b.number):
        return np.array([np.inf])
    if np.array_equal(a.rows.digest[a.at], b.rows.digest[b.at]):
        return None
    _, first, second = paired_logprobs(observed, other, index)
    return np.abs(second.astype(np.float64) - first.astype(np.float64))
