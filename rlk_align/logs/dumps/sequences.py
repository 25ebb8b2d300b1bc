"""The sequences of a run in flat arrays, for diagnoses, the monitor and metrics."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk_align.logs.dumps.record import Sampling

UNKNOWN = -1
"""An integer that the dump does not record."""


@dataclass(frozen=True)
class Sequences:
    """S sequences with N tokens in all, one sequence after the other, prompts included.

    Log-probs are float64 [N] in nats; index t belongs to token t. `rollout_missing` and
    `train_missing` (bool [N]) mark those that were not recorded. Their values are NaN; a recorded
    NaN is a value that is not finite. Integers that the dump lacks are UNKNOWN.
    """

    ids: Sequence[str]
    groups: Sequence[str | None]
    offsets: NDArray[np.int64]
    """[S + 1]; sequence s has the tokens offsets[s] to offsets[s + 1]."""
    prompt_lengths: NDArray[np.int64]
    steps: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    scored: NDArray[np.bool_]
    """[N]; which tokens the loss counts."""
    rollout: NDArray[np.float64]
    train: NDArray[np.float64]
    rollout_missing: NDArray[np.bool_]
    train_missing: NDArray[np.bool_]
    rollout_versions: NDArray[np.int64]
    """[N]"""
    train_versions: NDArray[np.int64]
    """[S]"""
    position_ids: NDArray[np.int64]
    """[N]"""
    pack_indices: NDArray[np.int64]
    """[S]"""
    cached_tokens: NDArray[np.int64]
    """[S]"""
    entropy: NDArray[np.float64]
    """[N], NaN if not recorded."""
    kept_mass: NDArray[np.float64]
    """[N], NaN if not recorded."""
    rewards: NDArray[np.float64]
    """[S], NaN if not recorded."""
    mask_rewritten: NDArray[np.bool_]
    """[S]"""
    sampling: Sequence[Sampling]
    rollout_dtypes: Sequence[str | None]
    train_dtypes: Sequence[str | None]
    samplers: Sequence[str | None]
    seeds: NDArray[np.int64]
    """[N]"""
    seeds_missing: NDArray[np.bool_]
    """[N]; every number may be a seed."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """N, prompts included."""
        return len(self.token_ids)

    @property
    def sequence(self) -> NDArray[np.int64]:
        """[N]; the sequence of each token."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @property
    def position(self) -> NDArray[np.int64]:
        """[N]; the position of each token in its sequence, from 0."""
        return np.arange(self.tokens) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    def take(self, which: NDArray[np.int64]) -> "Sequences":
        """Returns the sequences with these indices, in this order."""
        tokens = np.concatenate(
            [np.arange(self.offsets[s], self.offsets[s + 1]) for s in which]
            or [np.empty(0, dtype=np.int64)]
        )
        lengths = np.diff(self.offsets)[which]
        values: dict[str, Any] = {"offsets": np.concatenate([[0], np.cumsum(lengths)])}
        for name in TOKEN_ARRAYS:
            values[name] = getattr(self, name)[tokens]
        for name in SEQUENCE_ARRAYS:
            values[name] = getattr(self, name)[which]
        for name in SEQUENCE_LISTS:
            whole = getattr(self, name)
            values[name] = [whole[s] for s in which]
        return Sequences(**values)

    @property
    def compared(self) -> NDArray[np.bool_]:
        """[N]; scored tokens for which both sides recorded a log-prob."""
        return self.scored & ~self.rollout_missing & ~self.train_missing


TOKEN_ARRAYS = (
    *("token_ids", "scored", "rollout", "train", "rollout_missing", "train_missing"),
    *("rollout_versions", "position_ids", "entropy", "kept_mass"),
    *("seeds", "seeds_missing"),
)
"""Fields of `Sequences` with the shape [N]."""
SEQUENCE_ARRAYS = (
    *("prompt_lengths", "steps", "train_versions", "pack_indices", "cached_tokens"),
    *("rewards", "mask_rewritten"),
)
"""Fields of `Sequences` with the shape [S]."""
SEQUENCE_LISTS = ("ids", "groups", "sampling", "rollout_dtypes", "train_dtypes", "samplers")
"""Fields of `Sequences` that are lists of S."""


def join(parts: Sequence[Sequences]) -> Sequences:
    """Returns the sequences of all parts, one after the other; at least one part is needed."""
    lengths = np.concatenate([np.diff(p.offsets) for p in parts])
    values: dict[str, Any] = {"offsets": np.concatenate([[0], np.cumsum(lengths)])}
    for name in (*TOKEN_ARRAYS, *SEQUENCE_ARRAYS):
        values[name] = np.concatenate([getattr(p, name) for p in parts])
    for name in SEQUENCE_LISTS:
        values[name] = [x for p in parts for x in getattr(p, name)]
    return Sequences(**values)
