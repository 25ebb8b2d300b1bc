"""What torch.save wrote, loaded without running any code of the file, as slime and miles use it."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlk_align.dumps.batches import Row
from rlk_align.dumps.manifest import Findings
from rlk_align.errors import INSTALL_ENGINES, DumpError, MissingDependency
from rlk_align.readers.files import CONVERTER, opened
from rlk_align.readers.missing import prompt_digest, without_missing
from rlk_align.readers.values import WrongValue, flags, integers, numbers, response, whole_number
from rlk_align.text import one_line

ENDING = ".pt"


def load(path: Path, findings: Findings | None = None) -> dict[str, Any]:
    """Returns the dictionary in a file. Raises MissingDependency without torch, DumpError where it
    is none or holds objects that only a pickle's code can make."""
    opened(path, findings if findings is not None else Findings())
    if not zipfile.is_zipfile(path):
        raise DumpError(f"{path} is not what torch.save writes, or was cut off", "write it again")
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"{path} needs torch, which is not installed", INSTALL_ENGINES
        ) from error
    from pickle import UnpicklingError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise DumpError(f"{path} holds more than tensors and plain values", CONVERTER) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {one_line(error)}", "write it again") from error
    if not isinstance(value, dict):
        raise DumpError(f"{path} holds no dictionary", "see docs/import.md")
    return value


def is_torch_file(path: Path) -> bool:
    """Whether a file may be one of torch.save, by name and content."""
    return path.suffix == ENDING and path.is_file() and zipfile.is_zipfile(path)


def array(value: Any) -> Any:
    """Returns a tensor as numpy: bf16 widened, which loses nothing; everything else as it is."""
    if hasattr(value, "detach"):
        tensor = value.detach()
        if tensor.dtype.is_floating_point:
            tensor = tensor.double()
        return tensor.numpy()
    return value


def transposed(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a sample each of columns that hold a value a sample. Raises WrongValue."""
    lengths = columns.get("response_lengths")
    if not isinstance(lengths, list | tuple) and not hasattr(lengths, "tolist"):
        raise WrongValue("rollout_data has no response_lengths")
    count = len(lengths)
    per_sample = {
        name: column
        for name, column in columns.items()
        if hasattr(column, "__len__")
        and not isinstance(column, str | dict)
        and len(column) == count
    }
    return [{name: column[i] for name, column in per_sample.items()} for i in range(count)]


def row(sample: dict[str, Any], step: int, name: str, reward: Any = None) -> Row:
    """Returns a sample, whose log-probs are of its response, as a row. Raises WrongValue."""
    for field in ("tokens", "loss_masks", "response_lengths", "rollout_log_probs", "log_probs"):
        if sample.get(field) is None:
            raise WrongValue(f"{field}: not there{_REASONS.get(field, '')}")
    ids = integers(array(sample["tokens"]), "tokens")
    total = len(ids)
    length = whole_number(plain(sample["response_lengths"]), "response_lengths")
    prompt = total - length
    if prompt < 0:
        raise WrongValue(f"response_lengths is {length}, of {total} tokens")
    scored = np.zeros(total, dtype=bool)
    mask = flags(array(sample["loss_masks"]), "loss_masks")
    if len(mask) != length:
        raise WrongValue(f"loss_masks has {len(mask)} entries, {length} are expected")
    scored[prompt:] = mask
    scored[:1] = False
    sides = {
        field: response(numbers(array(sample[field]), field), total, prompt, field)
        for field in ("rollout_log_probs", "log_probs", "entropy")
        if sample.get(field) is not None
    }
    rollout, train = without_missing(sides["rollout_log_probs"], sides["log_probs"], scored)
    reward = plain(sample.get("rewards") if reward is None else reward)
    return {
        "id": name,
        "group": prompt_digest(ids, prompt),
        "step": step,
        "prompt_length": prompt,
        "token_ids": ids,
        "mask": pa.array(scored),
        "rollout_logprobs": rollout,
        "train_logprobs": train,
        "rollout_version": versions(sample.get("weight_versions"), scored),
        "cached_tokens": _cached_tokens(sample.get("prefix_cache_info")),
        "entropy": sides.get("entropy"),
        "reward": float(reward) if isinstance(reward, int | float) else None,
    }


_REASONS = {
    "rollout_log_probs": "; the run kept no log-probs of the rollout",
    "log_probs": "; the trainer computed none, so there is nothing to compare",
}


def plain(value: Any) -> Any:
    """Returns a number of a tensor or of numpy as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def versions(value: Any, scored: "np.ndarray[Any, np.dtype[np.bool_]]") -> pa.Array | None:
    """Returns the weights' version of each token, of a list with a version a turn: turns are the
    segments of the mask. None where they cannot be told apart."""
    if not isinstance(value, list | tuple) or not value:
        return None
    texts = [str(plain(version)) for version in value]
    if not all(text.isdigit() for text in texts):
        return None
    starts = scored & ~np.concatenate([[False], scored[:-1]])
    if len(set(texts)) == 1:
        turn = np.zeros(len(scored), dtype=np.int64)
    elif starts.sum() == len(texts):
        turn = np.maximum(np.cumsum(starts) - 1, 0)
    else:
        return None
    numbers_ = np.array([int(text) for text in texts], dtype=np.int64)
    return pa.array(numbers_[turn], mask=~scored)


def _cached_tokens(info: Any) -> int | None:
    value = plain(info.get("cached_tokens")) if isinstance(info, dict) else None
    return value if isinstance(value, int) and value >= 0 else None
