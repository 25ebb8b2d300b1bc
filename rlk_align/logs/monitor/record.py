"""The record of a monitored step."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rlk_align.moments import Moments

_FROZEN = ConfigDict(frozen=True, extra="forbid")
Level = Literal["warn", "fail", "inconclusive"]


class Interval(BaseModel):
    """A value, and the interval that very probably contains the true value."""

    model_config = _FROZEN

    value: float
    low: float
    high: float

    @classmethod
    def exactly(cls, value: float) -> "Interval":
        """A value without an interval."""
        return cls(value=value, low=value, high=value)


class Band(BaseModel):
    """The noise of the tokens whose probability lies between two bounds."""

    model_config = _FROZEN

    low: float
    """The smallest p of the band, which is exp of the rollout's log-prob."""
    high: float
    tokens: int
    c: float
    """mean |d| / mean (1 − p)"""
    signed: float
    """mean d / mean (1 − p)"""


class Finding(BaseModel):
    """A limit that a step breaks, or a trend that it continues."""

    model_config = _FROZEN

    level: Level
    name: str
    """The limit's or the trend's name."""
    value: float
    limit: float
    since: int | None = None
    """For a trend, the first step that shows it."""
    why: str
    """The observation and its meaning in a sentence."""


class StepRecord(BaseModel):
    """The metrics of one training step over its compared tokens.

    A value is NaN if it cannot be computed, or if a log-prob is not finite. It is None if the dump
    lacks its data.
    """

    model_config = _FROZEN

    step: int
    sequences: int | None = None
    """Sequences with at least one compared token; None for a log of metrics."""
    tokens: int | None = None
    """Compared tokens; None for a log of metrics."""
    missing: int = 0
    """Scored tokens for which a side recorded no log-prob, or another value in its place."""
    not_finite: int = 0
    """Compared tokens with a log-prob that is NaN or infinite."""
    ratio_error: Interval | None = None
    """E[ρ] − 1. It is 0 with any numerics if the rollout's log-probs are those of the sampled
    distribution."""
    c: Interval | None = None
    """mean |d| / mean (1 − p): the noise, independent of how sure the model is."""
    excess: float | None = None
    """The largest |d| / (1 − p) of a token, in multiples of c."""
    noise_logs: Moments | None = None
    """The logarithm of c of each distinct answer with a large enough Σ(1 − p)."""
    k2_scaled: Interval | None = None
    """mean d² / mean (1 − p)²: k2, independent of how sure the model is."""
    mean_abs: float | None = None
    k1: float | None = None
    """mean (−d)"""
    k2: float | None = None
    """mean ½d²"""
    k3: Interval | None = None
    """mean (ρ − 1 − d)"""
    ess: float | None = None
    """The effective sample size of the tokens' ratios, as a share."""
    clip_fraction: float | None = None
    """Share of tokens with ρ outside [0.8, 1.2]."""
    kl_entropy: float | None = None
    """k3 / mean entropy"""
    outliers: float | None = None
    """Share of sequences whose c is far above the median sequence's."""
    duplicated: float | None = None
    """Share of groups whose samples are copies of one another."""
    profile: list[Band] = []
    version_lag: float | None = None
    """The mean number of versions by which the trainer's weights were ahead of the rollout's."""
    version_lag_max: int | None = None
    reward: float | None = None
    frameworks: dict[str, dict[str, float]] = {}
    """Framework -> its metrics under their own names."""
    findings: list[Finding] = []
