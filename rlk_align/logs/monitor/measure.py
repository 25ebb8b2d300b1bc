"""The metrics of one step, all in float64 and unclipped; NaN stays NaN."""

from dataclasses import replace

import numpy as np

from rlk_align.interval import Estimate, Moments, ratio
from rlk_align.logs.diagnose.contract import RunContract
from rlk_align.logs.diagnose.fills import count_zeros, filled_tokens, not_finite
from rlk_align.logs.diagnose.repeats import repeats
from rlk_align.logs.dumps.sequences import UNKNOWN, Sequences
from rlk_align.logs.monitor.pairs import Floats, Pairs, pairs_of
from rlk_align.logs.monitor.record import Band, Interval, Spread, StepRecord

CLIP_LOW, CLIP_HIGH = 0.8, 1.2
"""The ratios outside of which `clip_fraction` counts a token."""
BANDS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0)
"""Bounds of the profile's bands of p."""


def measure(step: int, sequences: Sequences, contract: RunContract) -> StepRecord:
    """Returns the metrics of a step. In a step without compared tokens they are None, and so is a
    metric that the contract does not ask for."""
    sequences = without_fills(sequences, contract)
    pairs = pairs_of(sequences)
    tokens = len(pairs.g)
    missing = int(sequences.scored.sum()) - tokens
    rewards = sequences.rewards[~np.isnan(sequences.rewards)]
    reward = float(rewards.mean()) if len(rewards) else None
    if not tokens:
        return StepRecord(step=step, sequences=0, tokens=0, missing=missing, reward=reward)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        size = np.abs(pairs.d)
        counts = pairs.by_answer(np.ones(tokens))
        k3 = _interval(ratio(pairs.by_answer(pairs.k3), counts))
        lag = version_lag(sequences)
        return StepRecord(
            step=step,
            sequences=len(pairs.counts),
            tokens=tokens,
            missing=missing,
            not_finite=int((~(np.isfinite(pairs.g) & np.isfinite(pairs.t))).sum()),
            ratio_error=_interval(ratio(pairs.by_answer(pairs.ratio), counts), minus=1.0),
            c=(c := _noise(size, pairs, 1)),
            excess=_excess(size, pairs, c, contract),
            noise_logs=_noise_logs(size, pairs, contract),
            k2_scaled=_noise(size**2, pairs, 2),
            mean_abs=float(size.mean()),
            k1=float(-pairs.d.mean()),
            k2=float((pairs.d**2).mean() / 2),
            k3=k3,
            ess=float(pairs.ratio.sum() ** 2 / (tokens * (pairs.ratio**2).sum())),
            clip_fraction=float((~_inside(pairs.ratio)).mean()),
            kl_entropy=kl_entropy(k3.value, pairs),
            outliers=outliers(pairs, contract),
            duplicated=duplicated(sequences, contract),
            profile=profile(pairs),
            version_lag=float(lag.mean()) if len(lag) else None,
            version_lag_max=int(lag.max()) if len(lag) else None,
            reward=reward,
        )


def without_fills(sequences: Sequences, contract: RunContract) -> Sequences:
    """Returns a step without the values in place of log-probs, which count as missing. NaN and
    infinite values were computed, and stay."""
    rollout, train = filled_tokens(sequences, count_zeros(sequences, contract))
    rollout &= ~not_finite(sequences.rollout)
    train &= ~not_finite(sequences.train)
    if not (rollout.any() or train.any()):
        return sequences
    return replace(
        sequences,
        rollout_missing=sequences.rollout_missing | rollout,
        train_missing=sequences.train_missing | train,
    )


def duplicated(sequences: Sequences, contract: RunContract) -> float | None:
    """Returns the share of groups whose samples are copies of one another; None if no group has two
    samples, or if the contract does not ask."""
    if not contract.asks("duplicated", "chance"):
        return None
    found = repeats(sequences, contract)
    if not found.groups:
        return None
    return 0.0 if found.greedy else len(found.repeated) / found.groups


def _inside(ratios: Floats) -> np.ndarray:
    return (ratios >= CLIP_LOW) & (ratios <= CLIP_HIGH)


def _noise(values: Floats, pairs: Pairs, power: int) -> Interval | None:
    """mean of values / mean (1 − p)^power; None if the model is sure of every token."""
    q = pairs.by_answer(pairs.q**power)
    return None if q.sum() == 0 else _interval(ratio(pairs.by_answer(values), q))


def _excess(size: Floats, pairs: Pairs, c: Interval | None, contract: RunContract) -> float | None:
    """The largest |d| / (1 − p) of a token in multiples of c, by the floor of bf16; None if the
    contract does not ask."""
    limit = contract.single_token("bfloat16")
    if limit is None or limit.floor is None or c is None:
        return None
    room = np.maximum(pairs.q, contract.threshold("noise.token-q"))
    return float((size / room).max() / np.fmax(c.value, limit.floor))


def _noise_logs(size: Floats, pairs: Pairs, contract: RunContract) -> Spread:
    noise, q = pairs.by_answer(size), pairs.by_answer(pairs.q)
    known = (q >= contract.threshold("monitor.sequence-q")) & (noise > 0) & np.isfinite(noise)
    logs = Moments.of(np.log(noise / q)[known])
    return Spread(count=logs.count, mean=logs.mean, squares=logs.squares)


def _interval(estimate: Estimate, minus: float = 0.0) -> Interval:
    return Interval(
        value=estimate.value - minus, low=estimate.low - minus, high=estimate.high - minus
    )


def kl_entropy(k3: float, pairs: Pairs) -> float | None:
    """Returns k3 over the mean entropy of the tokens that have one; None if no token has one."""
    known = pairs.entropy[~np.isnan(pairs.entropy)]
    return float(k3 / known.mean()) if len(known) else None


def outliers(pairs: Pairs, contract: RunContract) -> float:
    """Returns the share of sequences that are far noisier than the median one.

    Only sequences with a large enough Σ(1 − p) count. A sequence whose noise is not finite is an
    outlier.
    """
    threshold = contract.threshold
    q = pairs.sums(pairs.q)
    counts = ~(q < threshold("monitor.sequence-q"))
    noise = pairs.sums(np.abs(pairs.d))[counts] / q[counts]
    if not len(noise):
        return 0.0
    usual = max(float(np.median(noise)), threshold("monitor.quiet"))
    return float((~(noise <= threshold("monitor.outlier") * usual)).mean())


def profile(pairs: Pairs) -> list[Band]:
    """Returns the noise in each band of p that has tokens."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        band = np.searchsorted(BANDS[1:-1], np.exp(pairs.g), side="right")
        size = len(BANDS) - 1
        tokens = np.bincount(band, minlength=size)
        q = np.bincount(band, weights=pairs.q, minlength=size)
        c = np.bincount(band, weights=np.abs(pairs.d), minlength=size) / q
        signed = np.bincount(band, weights=pairs.d, minlength=size) / q
    return [
        Band(low=low, high=high, tokens=int(n), c=float(x), signed=float(y))
        for low, high, n, x, y in zip(BANDS, BANDS[1:], tokens, c, signed, strict=False)
        if n
    ]


def version_lag(sequences: Sequences) -> np.ndarray:
    """Returns the trainer's weight version minus the rollout's, of the compared tokens that have
    both."""
    train = sequences.train_versions[sequences.sequence]
    known = sequences.compared & (train != UNKNOWN) & (sequences.rollout_versions != UNKNOWN)
    return (train - sequences.rollout_versions)[known]
