"""Log-probs: the histogram of Δlogp, and a table of the figures and their limits."""

import math
from collections.abc import Iterator

import numpy as np
from markupsafe import Markup

from rlk_align.judge.checks import LimitCheck
from rlk_align.judge.verdict import Verdict
from rlk_align.report.html.figure import Figure
from rlk_align.report.html.svg import chart, el, figure, text
from rlk_align.results import (
    CLIP_HIGH,
    CLIP_LOW,
    Comparison,
    EdgeMetrics,
    EdgeResult,
    Noise,
)

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 1120.0, 58.0, 10.0, 40.0, 170.0
_BINS = 61
_QUANTILES = (0.5, 0.9, 0.99, 0.999)

_NEAR_ONE = ("ratio_mean", "ratio_max", "ess_fraction", "token_mult_prob_error")
WORDS = {
    "tokens": "tokens",
    "max_abs_dlogp": "max |Δ|",
    "mean_abs_dlogp": "mean |Δ|",
    "p99_abs_dlogp": "p99 |Δ|",
    "p999_abs_dlogp": "p99.9 |Δ|",
    "k1": "k1, mean(−Δ)",
    "k3": "k3, KL",
    "ratio_mean": "mean ρ",
    "ratio_mean_error": "|mean ρ − 1|",
    "ratio_max": "max ρ",
    "clip_fraction": "share of ρ outside [0.8, 1.2]",
    "ess_fraction": "effective sample size / N",
    "token_mult_prob_error": "mean exp |Δ|",
    "bit_mismatches": "log-probs whose bits differ",
}
LAW_WORDS = {
    "noise_c": "c, mean |Δ| / mean (1 − p)",
    "ratio_bias": "|mean ρ − 1| beyond chance",
    "excess": "largest |Δ| / (1 − p), in c",
    "token_excess": "largest mean |Δ| of a token of the vocabulary, in that of a typical one",
}
"""Figures that relate a value to the noise of the run, which are shown where a contract limits
them."""
DISTRIBUTION_WORDS = {
    "kl": "KL(first ‖ second), all tokens of the vocabulary",
    "reverse_kl": "KL(second ‖ first)",
    "total_variation": "total variation",
    "max_abs_dlogp": "max |Δ| of any token of the vocabulary",
    "top1_disagreement": "share of other most probable tokens",
    "top20_disagreement": "share of other tokens among the 20 most probable",
    "worst_token": "largest mean |Δ| of a token",
    "typical_token": "mean |Δ| of a typical token",
}
"""Figures of `results.Distribution`, which are shown where passes keep logits."""


def metric_rows(
    verdict: Verdict, edges: list[EdgeResult]
) -> list[tuple[str, list[tuple[str, LimitCheck | None]]]]:
    """Returns each metric in words, with its value on each edge and the check of that value."""
    checks = {(c.edge, c.metric): c for c in verdict.checks if c.site is None}
    raw = [
        (words, [(metric_value(e.metrics, name), checks.get((e.name, name))) for e in edges])
        for name, words in WORDS.items()
    ]
    of_law = {c.metric for c in verdict.checks if c.metric in LAW_WORDS}
    law = [
        (
            words,
            [(_law_value(checks.get((e.name, name))), checks.get((e.name, name))) for e in edges],
        )
        for name, words in LAW_WORDS.items()
        if name in of_law
    ]
    return [*raw, *law, *_distribution_rows(edges, checks)]


def _distribution_rows(
    edges: list[EdgeResult], checks: dict[tuple[str, str], LimitCheck]
) -> Iterator[tuple[str, list[tuple[str, LimitCheck | None]]]]:
    """Yields the figures over the whole vocabulary; nothing without logits."""
    names = {"max_abs_dlogp": "vocabulary_max_abs_dlogp"}
    if not any(e.distribution and e.distribution.positions for e in edges):
        return
    for name, words in DISTRIBUTION_WORDS.items():
        values = [
            figure(getattr(e.distribution, name)) if e.distribution is not None else "–"
            for e in edges
        ]
        of_edges = [checks.get((e.name, names.get(name, name))) for e in edges]
        yield words, list(zip(values, of_edges, strict=True))


def _law_value(check: LimitCheck | None) -> str:
    """Writes a figure of the law of noise, with the low end of its interval."""
    if check is None:
        return "–"
    return figure(check.value) + ("" if check.low is None else f", at least {figure(check.low)}")


def metric_value(metrics: EdgeMetrics, name: str) -> str:
    """Writes a metric of WORDS in few digits."""
    value = getattr(metrics, name)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if name in _NEAR_ONE else figure(value)


def largest_bound(verdict: Verdict, edge: EdgeResult) -> float | None:
    """Returns the contract's bound on max |Δ| of an edge; None without one."""
    bounds = [c.fail for c in verdict.checks if c.edge == edge.name and c.metric == "max_abs_dlogp"]
    return min(bounds, default=None)


def noise_floor(comparison: Comparison) -> float:
    """Returns the largest difference between repetitions of one side; 0 where both repeat
    bitwise."""
    noise = comparison.controls.noise.values() if comparison.controls else ()
    return max((n.max_abs_dlogp for n in noise if isinstance(n, Noise)), default=0.0)


def histogram(delta: np.ndarray, bound: float | None, noise: float, edge: str) -> Figure:
    """Draws `delta`, float64 `[N]`; `bound`: that on the largest |Δ|; `noise`: the noise floor. All
    are in nats."""
    finite = delta[np.isfinite(delta)]
    span = max(float(np.abs(finite).max(initial=0.0)), bound or 0.0) * 1.05 or 1e-3
    counts, bounds = np.histogram(finite, bins=_BINS, range=(-span, span))
    plot = _HistogramPlot(counts, span)
    lost = len(delta) - len(finite)
    caption = [
        f"Δ = log-prob of the second pass − log-prob of the first, {len(delta):,} sampled tokens. "
        "Counts on a logarithmic scale."
    ]
    if lost:
        caption.append(f"{lost:,} tokens are omitted here: their Δ is NaN or infinite.")
    title = f"Δlogp of {edge}"
    desc = (
        "Histogram: Δlogp to the right, number of tokens upwards by logarithm; above, the "
        "importance ratio ρ = exp Δ."
    )
    size = np.abs(finite) if len(finite) else np.zeros(1)
    quantiles = [(f"p{q * 100:g} of |Δ|", float(np.quantile(size, q))) for q in _QUANTILES]
    bins = [
        [f"{low:+.3g} to {high:+.3g}", str(count)]
        for low, high, count in zip(bounds, bounds[1:], counts.tolist(), strict=False)
        if count
    ]
    return Figure(
        name="histogram",
        title=title,
        caption=caption,
        svg=chart(
            "histogram",
            (_WIDTH, _TOP + _HEIGHT + 30),
            title,
            desc,
            plot.draw(bound, noise, quantiles),
        ),
        legend=[
            ("bar", "tokens"),
            *([("limit", "the contract's bound on max |Δ|")] if bound is not None else []),
            ("quantile", ", ".join(f"{name} {value:.2g}" for name, value in quantiles)),
            *([("noisy", f"noise floor, ±{noise:.2g}")] if noise else []),
        ],
        columns=["Δlogp", "tokens"],
        rows=[*bins, *([name, figure(value)] for name, value in quantiles)],
    )


class _HistogramPlot:
    def __init__(self, counts: np.ndarray, span: float) -> None:
        self.counts, self.span = counts, span
        self.top = max(1.0, math.log10(max(1, int(counts.max(initial=1)))) * 1.05)

    def x(self, delta: float) -> float:
        return _LEFT + (delta / self.span + 1) / 2 * (_WIDTH - _LEFT - _RIGHT)

    def y(self, count: float) -> float:
        """Returns the height of a count; one token is a little above the axis."""
        high = (math.log10(count) + 0.15) / (self.top + 0.15) if count else 0.0
        return _TOP + _HEIGHT * (1 - high)

    def draw(
        self, bound: float | None, noise: float, quantiles: list[tuple[str, float]]
    ) -> Iterator[Markup]:
        bottom = _TOP + _HEIGHT
        if noise:
            # A NaN, or noise beyond the chart, fills it.
            reach = noise if noise <= self.span else self.span
            left, right = self.x(-reach), self.x(reach)
            band = {"x": left, "y": _TOP, "width": right - left, "height": _HEIGHT}
            yield el("rect", class_="noisy", **band)
        for power in range(int(self.top) + 1):
            y = self.y(10**power)
            yield el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid")
            yield text(_LEFT - 6, y + 4, f"{10**power:,}", class_="label end")
        width = (_WIDTH - _LEFT - _RIGHT) / len(self.counts)
        for n, count in enumerate(self.counts.tolist()):
            if count:
                y = self.y(count)
                x = _LEFT + n * width
                bar = {"x": x + 0.5, "y": y, "width": width - 1, "height": bottom - y}
                yield el("rect", el("title", f"{count:,} tokens"), class_="bar", **bar)
        yield el("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=bottom, y2=bottom, class_="axis")
        yield from self._ticks(bottom)
        for _, value in quantiles:
            for x in {self.x(value), self.x(-value)}:
                yield el("line", x1=x, x2=x, y1=bottom, y2=bottom + 6, class_="quantile")
        for at in (-bound, bound) if bound else ():
            x = self.x(at)
            yield el("line", x1=x, x2=x, y1=_TOP - 4, y2=bottom, class_="limit")
            side = "" if at < 0 else " end"
            yield text(
                x + (4 if at < 0 else -4), _TOP + 8, f"limit {at:+.3g}", class_=f"label{side}"
            )

    def _ticks(self, bottom: float) -> Iterator[Markup]:
        step = 10 ** math.floor(math.log10(self.span))
        step = step / 5 if self.span / step < 2 else step / 2 if self.span / step < 5 else step
        for n in range(-int(self.span / step), int(self.span / step) + 1):
            x, delta = self.x(n * step), n * step
            middle = {"class_": "label middle"}
            yield text(x, bottom + 20, f"{delta:+.3g}" if n else "0", **middle)
            yield text(x, _TOP - 10, f"{math.exp(min(delta, 700.0)):.3g}", **middle)
        yield text(_LEFT - 6, _TOP - 10, "ρ", class_="label end")
        yield text(_LEFT - 6, bottom + 20, "Δlogp", class_="label end")
        for ratio in (CLIP_LOW, CLIP_HIGH):
            if abs(math.log(ratio)) < self.span:
                x = self.x(math.log(ratio))
                yield el("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="clip")
                yield text(x, _TOP + 22, f"clipped at ρ = {ratio:g}", class_="label middle")
