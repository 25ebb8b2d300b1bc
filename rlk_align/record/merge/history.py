"""Which side of a job has an old value of a parameter that the sides do not share, by what the
trainer recorded at earlier steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlk_align.errors import CorruptTrace


class Digests(NamedTuple):
    """The digests of a parameter."""

    whole: str
    rows: np.ndarray
    """int64 `[R]`: those of its slices along dimension 0."""


Weights = Mapping[str, Digests]


def read_digests(about: Path) -> dict[str, Digests]:
    """The digests of the live parameters of a recorded step. Raises CorruptTrace."""
    path = about / "weights.parquet"
    try:
        table = pq.read_table(
            path, columns=["name", "digest", "rows"], page_checksum_verification=True
        )
    except (OSError, ValueError, pa.ArrowException) as error:
        raise CorruptTrace(f"{path} cannot be read: {error}") from error
    rows = (row.values.to_numpy() for row in table["rows"])
    named = zip(table["name"].to_pylist(), table["digest"].to_pylist(), rows, strict=True)
    return {name: Digests(whole, of_rows) for name, whole, of_rows in named}


def old_values(
    rollout: Weights, train: Weights, earlier: Sequence[tuple[int, Weights]]
) -> dict[str, str]:
    """Parameter -> the words that name the side with an old value. earlier: the steps that the
    trainer recorded before, and its weights there. Parameters of which the steps say nothing are
    left out."""
    differ = [
        name for name in rollout.keys() & train.keys() if rollout[name].whole != train[name].whole
    ]
    found: dict[str, str] = {}
    for step, before in sorted(earlier, key=lambda each: -each[0]):
        trained = any(name in before and before[name].whole != d.whole for name, d in train.items())
        for name in differ:
            if name in found or name not in before or not trained:
                continue
            if before[name].whole == rollout[name].whole:
                found[name] = f"the rollout is stale: it has what the trainer had at step {step}"
            elif _unchanged(rollout[name].rows, train[name].rows, before[name].rows):
                found[name] = (
                    f"the trainer is stale: it has had these rows since step {step}, and other "
                    "parameters changed"
                )
    return found


def _unchanged(rollout: np.ndarray, train: np.ndarray, before: np.ndarray) -> bool:
    """Whether the rows in which the sides differ are those of an earlier step of the trainer."""
    if not len(rollout) == len(train) == len(before):
        return False
    differ = rollout != train
    return bool(differ.any() and (train[differ] == before[differ]).all())
