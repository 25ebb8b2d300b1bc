"""Whole sequences of a run in flat arrays: what diagnoses, monitors and metrics compute on."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlk_align.dumps.record import Sampling

UNKNOWN = -1
"""Stands for an integer that the dump does not say."""


@dataclass(frozen=True)
class Sequences:
    """S sequences with N tokens in all, one sequence behind the other, prompts included.

    Log-probs are float64 [N] in nats; index t belongs to token t. `rollout_missing` and
    `train_missing` (bool [N]) say which were not recorded: their values are NaN there, but a
    recorded NaN is a value that is not finite. Integers are UNKNOWN where the dump is silent.
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
    """[N], NaN where it is not recorded."""
    kept_mass: NDArray[np.float64]
    """[N], NaN where it is not recorded."""
    rewards: NDArray[np.float64]
    """[S], NaN where it is not recorded."""
    mask_rewritten: NDArray[np.bool_]
    """[S]"""
    sampling: Sequence[Sampling]
    rollout_dtypes: Sequence[str | None]
    train_dtypes: Sequence[str | None]

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
        """[N]; the place of each token in its sequence, from 0."""
        return np.arange(self.tokens) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    @property
    def compared(self) -> NDArray[np.bool_]:
        """[N]; scored tokens of which both sides recorded a log-prob."""
        return self.scored & ~self.rollout_missing & ~self.train_missing
