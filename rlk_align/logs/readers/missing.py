"""Log-probs that were not recorded, although the dump has a value there."""

import hashlib

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlk_align.logs.readers.values import replaced_by_null

SENTINEL = -9999.0
"""The value that callers of vLLM write for a missing log-prob."""
ZERO_IS_MISSING = (
    "0.0 of the rollout is read as missing outside of the mask; inside of it, it is a value, and "
    "explain and monitor tell whether it is a log-prob"
)


def without_missing(
    rollout: pa.Array, train: pa.Array | None, scored: NDArray[np.bool_]
) -> tuple[pa.Array, pa.Array | None]:
    """Returns both sides with null for values that were not recorded.

    Token 0 has no log-prob: frameworks write 0.0 or log(1/V) there.
    """
    first = np.zeros(len(rollout), dtype=bool)
    first[:1] = True
    g = _values(rollout)
    if train is not None:
        train = replaced_by_null(train, first | (_values(train) == SENTINEL))
    absent = first | ((g == 0.0) & ~scored) | (g == SENTINEL)
    return replaced_by_null(rollout, absent), train


def first_scored(scored: NDArray[np.bool_]) -> int:
    """Returns the length of the prompt: the number of tokens before the first scored one."""
    return int(scored.argmax()) if scored.any() else len(scored)


def prompt_digest(token_ids: pa.Array, prompt: int) -> str:
    """Returns a name for a prompt that the dump does not name: the samples of a group share it."""
    ids = np.ascontiguousarray(np.asarray(token_ids[:prompt]), dtype="<i8")
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


def _values(array: pa.Array) -> NDArray[np.float64]:
    return np.asarray(array.fill_null(np.nan), dtype=np.float64)
