"""prime-rl: `token_exports/step_{s}/rank_{r}.jsonl`, a packed sequence a line.

A step's folder is complete once it has a file STABLE. Index t scores token t; index 0 of each
sequence is log(1/V), or a value of the sequence that was packed before it.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.readers.base import Reader
from rlk_align.logs.readers.files import first_object, json_object, read_lines, require
from rlk_align.logs.readers.missing import ZERO_IS_MISSING, compared_columns
from rlk_align.logs.readers.values import (
    WrongValue,
    cut,
    exactly,
    flags,
    integers,
    numbers,
    whole_number,
)
from rlk_align.progress import Progress
from rlk_align.text import printable

SCHEMA_VERSION = 1
STABLE = "STABLE"
FIELDS = (
    *("schema_version", "step", "token_ids", "position_ids", "loss_mask"),
    *("inference_logprobs", "trainer_logprobs"),
)


def read(files: list[Path], findings: Findings, progress: Progress) -> Iterator[Row]:
    """Yields the sequences of all stable steps. Raises DumpError if no step is stable."""
    findings.version = f"schema {SCHEMA_VERSION}"
    findings.note(ZERO_IS_MISSING)
    findings.note("prime-rl writes null for NaN and infinite values: they are read as missing")
    stable = [path for path in files if (path.parent / STABLE).is_file()]
    for folder in sorted({path.parent for path in files} - {path.parent for path in stable}):
        findings.skip(f"{folder}: it has no {STABLE}, so the step may be incomplete")
    if not stable:
        raise DumpError(
            f"{files[0].parent} has no {STABLE}: the trainer may still be writing the step",
            "wait until prime-rl has written it",
        )
    for path in sorted(stable, key=_order):
        yield from read_lines(path, findings, progress, partial(_row, path.stem))


def _order(path: Path) -> tuple[Any, ...]:
    """A sorting key: steps and ranks as numbers, not as text."""
    keys: list[Any] = [str(path.parent.parent)]
    for name in (path.parent.name, path.stem):
        word, _, number = name.rpartition("_")
        keys += [int(number) if number.isdigit() else -1, word]
    return tuple(keys)


def _row(rank: str, line: bytes, _number: int) -> Row:
    record = json_object(line)
    require(record, FIELDS)
    if record["schema_version"] != SCHEMA_VERSION:
        raise WrongValue(f"schema_version is not {SCHEMA_VERSION}, which is the known one")
    ids = integers(record["token_ids"], "token_ids")
    length = len(ids)
    columns = {
        name: exactly(numbers(record[name], name), length, name)
        for name in ("inference_logprobs", "trainer_logprobs", "entropy")
        if name in FIELDS or record.get(name) is not None
    }
    scored = _mask(record, length)
    sides = columns["inference_logprobs"], columns["trainer_logprobs"]
    pack_index = record.get("micro_sequence_idx")
    place = [record.get(key) for key in ("run_id", "export_step", "micro_step")]
    return compared_columns(ids, scored, *sides) | {
        "id": ":".join(printable(p) for p in (*place, pack_index, rank) if p is not None),
        "step": whole_number(record["step"], "step"),
        "position_ids": exactly(
            integers(record["position_ids"], "position_ids"), length, "position_ids"
        ),
        "pack_index": None
        if pack_index is None
        else whole_number(pack_index, "micro_sequence_idx"),
        "entropy": columns.get("entropy"),
        "reward": _reward(record.get("rewards"), scored),
    }


def _mask(record: dict[str, Any], length: int) -> NDArray[np.bool_]:
    """The tokens of losses that use the rollout's log-probs, which cross-entropy does not."""
    scored = flags(record["loss_mask"], "loss_mask")
    exactly(scored, length, "loss_mask")
    scored &= _weighted(record, "rl_weights", 1.0, length) | _weighted(
        record, "ref_kl_weights", 0.0, length
    )
    if isinstance(record.get("losses"), list) and len(record["losses"]) == length:
        scored &= np.array([_is_policy_loss(channels) for channels in record["losses"]])
    scored[:1] = False
    return scored


def _weighted(record: dict[str, Any], name: str, default: float, length: int) -> NDArray[np.bool_]:
    """The tokens with a weight in a part of the loss; null counts as `default`."""
    if record.get(name) is None:
        return np.full(length, default != 0.0)
    weights = exactly(numbers(record[name], name), length, name)
    return np.asarray(weights.fill_null(default)) != 0.0


def _is_policy_loss(channels: Any) -> bool:
    """Whether a token is in a loss other than cross-entropy."""
    if not isinstance(channels, dict):
        raise WrongValue("losses has entries other than objects")
    return any(
        isinstance(channel, dict) and channel.get("mask") is True
        for name, channel in channels.items()
        if name != "ce"
    )


def _reward(rewards: Any, scored: NDArray[np.bool_]) -> float | None:
    """The reward that all scored tokens share; None if their rewards differ."""
    if rewards is None:
        return None
    values = np.asarray(cut(numbers(rewards, "rewards"), len(scored), "rewards"), dtype=np.float64)
    found = values[scored]
    return float(found[0]) if len(found) and (found == found[0]).all() else None


def recognises(path: Path) -> bool:
    """Whether a file's first line has prime-rl's fields."""
    return {"inference_logprobs", "trainer_logprobs", "loss_mask"} <= first_object(path).keys()


READER = Reader(
    name="prime-rl",
    framework="prime-rl",
    patterns=("rank_*.jsonl",),
    recognises=recognises,
    read=read,
)
