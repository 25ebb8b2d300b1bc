"""Whether a capture can be trusted: does observing change it, and does it repeat itself?"""

from collections.abc import Mapping

import numpy as np

from rlk_align.compare.metrics import edge_metrics
from rlk_align.compare.pairing import read_rows
from rlk_align.model.sites import RowIndex, Site
from rlk_align.results import Controls, Noise, NotMeasured, Observer, SideName
from rlk_align.trace.reader import PassReader, Trace


def check_controls(
    sides: Mapping[SideName, tuple[Trace, list[str]]], index: RowIndex, sites: list[Site]
) -> Controls:
    """`sides`: by name, the trace and the observed passes that matter."""
    noise: dict[SideName, Noise | NotMeasured | None] = {}
    details: list[str] = []
    violated = False
    for side, (trace, passes) in sides.items():
        floor: Noise | None = None
        for name in passes:
            observed, found = trace.read_pass(name), None
            if trace.has_pass(f"{name}.repeat"):
                found = _noise(name, observed, trace.read_pass(f"{name}.repeat"), index, sites)
                # `not <=`: a NaN is the worst noise of all.
                if found and (floor is None or not found.max_abs_dlogp <= floor.max_abs_dlogp):
                    floor = found
            if not trace.has_pass(f"{name}.untapped"):
                details.append(f"{side} {name}: no pass without taps to compare with")
                violated = True
                continue
            shift = _logprob_shift(observed, trace.read_pass(f"{name}.untapped"), index)
            if shift is not None:
                largest, mean = shift
                details.append(
                    f"{side} {name}: with and without taps log-probs differ by up to {largest:.3g}"
                )
                violated |= found is None or not (
                    largest <= _MAX_OVER_NOISE * found.max_abs_dlogp
                    and mean <= _MEAN_OVER_NOISE * found.mean_abs_dlogp
                )
        repeated = all(trace.has_pass(f"{name}.repeat") for name in passes)
        noise[side] = floor if floor or repeated else "not measured"
    observer: Observer = "violated" if violated else "within noise floor" if details else "bitwise"
    return Controls(observer=observer, observer_detail=details, noise=noise)


_MAX_OVER_NOISE, _MEAN_OVER_NOISE = 8.0, 4.0
"""How far beyond an engine's own noise a pass with taps may be from one without: both are draws
of that noise, and the largest of a few hundred tokens varies more than their mean."""


def _noise(
    name: str, once: PassReader, again: PassReader, index: RowIndex, sites: list[Site]
) -> Noise | None:
    rows, first_site = 0, ""
    for site in sites:
        a, b = read_rows(once, site.name, index), read_rows(again, site.name, index)
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
    metrics = edge_metrics(*paired_logprobs(once, again, index)[1:])
    return Noise(
        passname=name,
        rows=rows,
        first_site=first_site,
        max_abs_dlogp=metrics.max_abs_dlogp,
        mean_abs_dlogp=metrics.mean_abs_dlogp,
    )


def paired_logprobs(
    once: PassReader, again: PassReader, index: RowIndex
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of the batch that both passes have log-probs of, and both passes' log-probs."""
    a, b = read_rows(once, "logprob", index), read_rows(again, "logprob", index)
    if a is None or b is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    number, i, j = np.intersect1d(a.number, b.number, assume_unique=True, return_indices=True)
    return (
        number,
        once.values("logprob", a.rows, a.at[i])[:, 0].numpy(),
        again.values("logprob", b.rows, b.at[j])[:, 0].numpy(),
    )


def _logprob_shift(
    observed: PassReader, untapped: PassReader, index: RowIndex
) -> tuple[float, float] | None:
    """None where the log-probs are bitwise equal, or where the engine has none of that kind to
    show; else the largest and the mean |Δ|; Inf for other rows."""
    if all("logprob" in p.record.unexposed for p in (observed, untapped)):
        return None
    a, b = read_rows(observed, "logprob", index), read_rows(untapped, "logprob", index)
    if a is None or b is None or a.strays or b.strays or not np.array_equal(a.number, b.number):
        return float("inf"), float("inf")
    if np.array_equal(a.rows.digest[a.at], b.rows.digest[b.at]):
        return None
    metrics = edge_metrics(*paired_logprobs(observed, untapped, index)[1:])
    return metrics.max_abs_dlogp, metrics.mean_abs_dlogp
