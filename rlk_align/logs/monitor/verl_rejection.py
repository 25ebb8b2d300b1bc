"""verl's metrics of rejection sampling, `rollout_corr/rollout_rs_*`, as of 0.9.1
(verl/trainer/ppo/rollout_corr_helper.py).

verl has no threshold by default. These are the options and thresholds of its own presets: a token,
or a sequence's sum or mean of k1 = −d, is kept where its k1 lies between two logarithms.
"""

import numpy as np

from rlk_align.logs.monitor.pairs import Floats, Pairs

PRESETS: dict[str, tuple[float, float]] = {
    "token_k1": (0.5, 2.0),
    "seq_sum_k1": (0.5, 2.0),
    "seq_mean_k1": (0.999, 1.001),
}
"""Option -> the ratios between which it keeps."""
_BOUND = 20.0
"""verl clamps the log-ratio of each token at it."""


def rejection(p: Pairs) -> dict[str, float]:
    """Returns the metrics of every preset."""
    k1 = -np.clip(p.d, -_BOUND, _BOUND)
    found: dict[str, float] = {}
    for option, ratios in PRESETS.items():
        low, high = np.log(ratios)
        if option == "token_k1":
            of_sequence, of_token = p.means(k1), k1
            units = of_token
        else:
            of_sequence = p.sums(k1) if option == "seq_sum_k1" else p.means(k1)
            of_token = of_sequence[p.sequence]
            units = of_sequence
        kept = (of_token >= low) & (of_token <= high)
        figures = {
            "mean": of_token.mean(),
            "max": units.max(),
            "min": units.min(),
            "fraction_high": (units > high).mean(),
            "fraction_low": (units < low).mean(),
            "std": np.clip(of_token, low, high).std(),
            **_of_sequences(of_sequence, float(low), float(high)),
            "masked_fraction": 1 - kept.mean(),
            "seq_masked_fraction": (p.sums(~kept) > 0).mean(),
        }
        found |= {f"rollout_rs_{option}_{name}": float(v) for name, v in figures.items()}
    return found


def _of_sequences(values: Floats, low: float, high: float) -> dict[str, float]:
    return {
        "seq_mean": values.mean(),
        "seq_std": values.std(ddof=1) if len(values) > 1 else 0.0,
        "seq_max": values.max(),
        "seq_min": values.min(),
        "seq_max_deviation": np.abs(values).max(),
        "seq_fraction_high": (values > high).mean(),
        "seq_fraction_low": (values < low).mean(),
    }
