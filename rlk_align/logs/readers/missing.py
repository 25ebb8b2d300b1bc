"""Values of a dump that stand for log-probs that were not recorded."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlk_align.logs.readers.values import replaced_by_null

SENTINEL = -9999.0
"""The value that callers of vLLM write for a missing log-prob."""
ZERO_IS_MISSING = (
    "a 0.0 of the rollout is missing outside of the mask; within the mask it is a value, and "
    "explain and monitor test whether it is a log-prob"
)


def _without_missing(
    rollout: pa.Array, train: pa.Array, scored: NDArray[np.bool_]
) -> tuple[pa.Array, pa.Array]:
    """Returns both sides with null for values that were not recorded.

    Token 0 has no log-prob, and frameworks write 0.0 or log(1/V) for it.
    """
    first = np.zeros(len(rollout), dtype=bool)
    first[:1] = True
    g = _values(rollout)
    absent = first | ((g == 0.0) & ~scored) | (g == SENTINEL)
    train = replaced_by_null(train, first | (_values(train) == SENTINEL))
    return replaced_by_null(rollout, absent), train


def prompt_digest(token_ids: pa.Array, prompt: int) -> str:
    """Returns a name for the group of samples with this prompt, for dumps without groups."""
    ids = np.ascontiguousarray(np.asarray(token_ids[:prompt]), dtype="<i8")
    return hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()


def compared_columns(
    token_ids: pa.Array,
    scored: NDArray[np.bool_],
    rollout: pa.Array,
    train: pa.Array,
    prompt: int | None = None,
) -> dict[str, Any]:
    """Returns the columns of a row that are compared. Without `prompt`, the prompt's length, the
    prompt ends before the first scored token."""
    if prompt is None:
        prompt = int(scored.argmax()) if scored.any() else len(scored)
    rollout, train = _without_missing(rollout, train, scored)
    return {
        "group": prompt_digest(token_ids, prompt),
        "prompt_length": prompt,
        "token_ids": token_ids,
        "mask": pa.array(scored),
        "rollout_logprobs": rollout,
        "train_logprobs": train,
    }


def _values(array: pa.Array) -> NDArray[np.float64]:
    return np.asarray(array.fill_null(np.nan), dtype=np.float64)
