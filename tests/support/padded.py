"""Log-probs of both sides as frameworks store them: padded [B, T], with a mask of several turns."""

import numpy as np


def padded(
    seed: int = 0, count: int = 16, length: int = 23
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the rollout's log-probs, the trainer's, and the mask; some ratios are beyond every
    clip."""
    rng = np.random.default_rng(seed)
    g = -rng.exponential(1.0, size=(count, length))
    t = g + 0.4 * -np.expm1(g) * rng.standard_t(3, size=g.shape)
    t = np.minimum(t, -1e-9)
    g[:, 0], t[:, 0] = 0.0, 0.0
    mask = np.ones(g.shape, dtype=bool)
    mask[:, 0] = False
    for row, end in enumerate(rng.integers(9, length, size=count)):
        mask[row, end:] = False
        mask[row, 4:6] = False  # what a tool said
    return g, t, mask
