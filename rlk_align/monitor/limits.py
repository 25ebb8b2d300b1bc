"""What a step may be, and when several steps are a trend.

A limit on a value with an interval is broken where the whole interval lies beyond it. The numbers
are the contract's; these stand until it says otherwise.
"""

from dataclasses import dataclass
from typing import Literal

Metric = Literal["ratio_error", "c", "k3", "mean_abs", "outliers", "missing_share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimit:
    """A bound on a step's metric; a value beyond it, or a NaN, breaks it."""

    name: str
    metric: Metric
    """`missing_share` is that of the scored tokens. Where k3 is not known, `k3` is k2, or else k1:
    all three estimate one KL divergence."""
    warn: float
    fail: float
    means: str
    """What a value beyond the limit means."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrendLimits:
    """When k2 is said to rise, in multiples of its own earlier values."""

    warn: float
    """A rise is one to at least so many times the level before it."""
    fail: float
    """From so many times the level on, it fails."""
    spread: float
    """And beyond so many standard deviations of the steps before it."""
    smallest: float
    """And to at least this k2, scaled by (1 − p)²."""
    slow_factor: float
    """A slow rise is one to at least so many times the level of the run's first steps."""
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorLimits:
    """All that a run is held to while it trains."""

    steps: tuple[StepLimit, ...]
    trend: TrendLimits


_HEALTHY = "measured: four NeMo-RL dumps of bf16 runs, 42,349 tokens, 0.8B and 2B"

DEFAULT = MonitorLimits(
    steps=(
        StepLimit(
            name="ratio-mean",
            metric="ratio_error",
            warn=0.002,
            fail=0.005,
            means="the rollout's log-probs are not those of the law that was sampled: look for a "
            "shift, a mask, a temperature or a truncation on one side",
            source=f"{_HEALTHY}: at most 1.0e-3; a temperature of 0.9 on one side gives 1.8e-2",
        ),
        StepLimit(
            name="noise",
            metric="c",
            warn=0.15,
            fail=0.5,
            means="the two sides differ by more than rounding in bf16 explains",
            source=f"{_HEALTHY}: 0.031 to 0.072; simulated quantisation 0.18 to 0.20",
        ),
        StepLimit(
            name="k3",
            metric="k3",
            warn=0.01,
            fail=0.15,
            means="the policies have parted",
            source="published: prime-rl's CI asks for at most 0.01, and 0.15 in its loosest test",
        ),
        StepLimit(
            name="mean-dlogp",
            metric="mean_abs",
            warn=0.05,
            fail=0.1,
            means="the two sides differ by more than rounding in bf16 explains",
            source="published: slime's CI asks for at most 0.1; 0.01 is usual",
        ),
        StepLimit(
            name="outliers",
            metric="outliers",
            warn=0.01,
            fail=0.1,
            means="some sequences differ far more than the rest: look at what they share",
            source=f"{_HEALTHY}: 0; published: 15 to 20 % in NeMo-RL 2100 (broken decode)",
        ),
        StepLimit(
            name="missing",
            metric="missing_share",
            warn=0.0,
            fail=0.01,
            means="scored tokens have no log-prob on one side",
            source="derived: a healthy dump records every scored token",
        ),
    ),
    trend=TrendLimits(
        warn=1.3,
        fail=2.0,
        spread=4.0,
        smallest=1e-6,
        slow_factor=8.0,
        source="derived: k2 of weights that are never synced grows with the square of the steps",
    ),
)
