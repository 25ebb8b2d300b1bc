"""Files of torch.save, which slime and miles write, loaded without running their code."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rlk_align.errors import DumpError
from rlk_align.logs.dumps.batches import Row
from rlk_align.logs.dumps.manifest import Findings
from rlk_align.logs.readers.files import CONVERTER, opened
from rlk_align.logs.readers.missing import compared_columns
from rlk_align.logs.readers.values import (
    WrongValue,
    exactly,
    flags,
    integers,
    numbers,
    response,
    whole_number,
)
from rlk_align.torch_file import load_plain

ENDING = ".pt"


def load(path: Path, findings: Findings | None = None) -> dict[str, Any]:
    """Returns the dictionary in a file. Raises MissingDependency without torch, and DumpError if
    the file is no dictionary, or has objects that only a pickle's code can make."""
    opened(path, findings if findings is not None else Findings())
    value = load_plain(path, "write it again", CONVERTER)
    if not isinstance(value, dict):
        raise DumpError(f"{path} is not a dictionary", "see docs/import.md")
    return value


def is_torch_file(path: Path) -> bool:
    """Whether torch.save may have written a file, by its name and content."""
    return path.suffix == ENDING and path.is_file() and zipfile.is_zipfile(path)


def transposed(columns: Any) -> list[dict[str, Any]]:
    """Returns the samples of `rollout_data`, whose columns hold one value for each sample. Raises
    WrongValue."""
    if not isinstance(columns, dict):
        raise WrongValue("rollout_data is not a dictionary")
    lengths = columns.get("response_lengths")
    if not _is_column(lengths):
        raise WrongValue("rollout_data has no response_lengths")
    count = len(lengths)
    full = {k: v for k, v in columns.items() if _is_column(v) and len(v) == count}
    return [{name: column[i] for name, column in full.items()} for i in range(count)]


def _is_column(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple) or (hasattr(value, "detach") and value.ndim > 0)


def checked(sample: Any) -> dict[str, Any]:
    """Returns a sample with its lists as arrays. Raises WrongValue if a field that is compared is
    missing or has another type."""
    if not isinstance(sample, dict):
        raise WrongValue("a sample is not a dictionary")
    for field in ("tokens", "loss_masks", "response_lengths", *SIDES):
        if sample.get(field) is None:
            raise WrongValue(f"{field}: missing{_REASONS.get(field, '')}")
    ids = integers(_array(sample["tokens"]), "tokens")
    length = whole_number(plain(sample["response_lengths"]), "response_lengths")
    if length > len(ids):
        raise WrongValue(f"response_lengths is {length}, of {len(ids)} tokens")
    mask = flags(_array(sample["loss_masks"]), "loss_masks")
    exactly(mask, length, "loss_masks")
    values = {
        field: numbers(_array(sample[field]), field)
        for field in PER_RESPONSE
        if sample.get(field) is not None
    }
    whole = {"tokens": ids, "loss_masks": mask, "response_lengths": length}
    return sample | whole | values


SIDES = ("rollout_log_probs", "log_probs")
PER_RESPONSE = (*SIDES, "entropy")
"""Fields with a number for each token of the response."""
_REASONS = {
    "rollout_log_probs": "; the run recorded no log-probs of the rollout",
    "log_probs": "; the trainer computed none, so there is nothing to compare",
}


def row(sample: dict[str, Any], step: int, name: str, reward: Any = None) -> Row:
    """Returns a checked sample as a row. Raises WrongValue."""
    ids, total = sample["tokens"], len(sample["tokens"])
    prompt = total - sample["response_lengths"]
    scored = np.zeros(total, dtype=bool)
    scored[prompt:] = sample["loss_masks"]
    scored[:1] = False
    lists = {
        field: response(sample[field], total, prompt, field)
        for field in PER_RESPONSE
        if sample.get(field) is not None
    }
    sides = lists["rollout_log_probs"], lists["log_probs"]
    reward = plain(sample.get("rewards") if reward is None else reward)
    return compared_columns(ids, scored, *sides, prompt) | {
        "id": name,
        "step": step,
        "rollout_version": _versions(sample.get("weight_versions"), scored),
        "cached_tokens": _cached_tokens(sample.get("prefix_cache_info")),
        "entropy": lists.get("entropy"),
        "reward": float(reward) if isinstance(reward, int | float) else None,
    }


def plain(value: Any) -> Any:
    """Returns a tensor of one number as a Python number, and any other value unchanged."""
    return value.item() if hasattr(value, "detach") and value.numel() == 1 else value


def _array(value: Any) -> Any:
    """Returns a tensor as numpy, with floats widened to float64, and any other value unchanged."""
    if not hasattr(value, "detach"):
        return list(value) if isinstance(value, tuple) else value
    tensor = value.detach()
    return (tensor.double() if tensor.dtype.is_floating_point else tensor).numpy()


def _versions(value: Any, scored: NDArray[np.bool_]) -> pa.Array | None:
    """Returns the weights' version of each scored token, given one version for each turn. Turns are
    the segments of the mask; None if the versions cannot be assigned to them."""
    if not isinstance(value, list | tuple) or not value:
        return None
    texts = [str(plain(version)) for version in value]
    if not all(text.isdecimal() and len(text) < 19 for text in texts):
        return None
    starts = scored & ~np.concatenate([[False], scored[:-1]])
    if len(set(texts)) == 1:
        turn = np.zeros(len(scored), dtype=np.int64)
    elif starts.sum() == len(texts):
        turn = np.maximum(np.cumsum(starts) - 1, 0)
    else:
        return None
    of_turn = np.array([int(text) for text in texts], dtype=np.int64)
    return pa.array(of_turn[turn], mask=~scored)


def _cached_tokens(info: Any) -> int | None:
    value = plain(info.get("cached_tokens")) if isinstance(info, dict) else None
    return value if isinstance(value, int) and 0 <= value < 2**63 else None
