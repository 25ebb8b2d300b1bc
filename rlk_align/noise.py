"""The law of healthy noise of tokens: E|Δ| = c · (1 − p), with one c for all tokens of two engines.

Rounding and summation order move the logits by about as much for every token. To first order Δ is
Σ (δ_ij − p_j) dz_j, which is in proportion to 1 − p, so c depends on the engines and the model,
and not on how sure the model is of its tokens.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rlk_align.interval import Floats

Figure = TypeVar("Figure", float, "Floats")


def scaled_errors(size: "Floats", room: "Floats", least: float) -> "Floats":
    """|Δ| / (1 − p) of each token, from |Δ| and 1 − p, `[N]` both. A smaller 1 − p counts as
    `least`: such a token is too sure to have a measurable error of its own."""
    import numpy as np  # which the gate does without

    return np.asarray(size / np.maximum(room, least))


def excess(scaled: Figure, c: float, floor: float) -> Figure:
    """|Δ| / (1 − p) in multiples of c, which counts as `floor` at least. A NaN stays a NaN."""
    return scaled / max(c, floor)
