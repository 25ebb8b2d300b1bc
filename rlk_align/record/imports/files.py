"""Files of tensors, read without running code in them."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlk_align.errors import DumpError
from rlk_align.record.imports.source import Load
from rlk_align.text import one_line
from rlk_align.torch_file import load_plain

CONVERT = (
    "a pickle runs code when it is loaded, so rlk-align never loads one. If you trust the file, "
    "load it in the environment that wrote it, with torch.load(FILE, weights_only=False), and save "
    "it again by torch.save with its tensors as plain tensors (DTensor: .full_tensor()) and "
    "everything else as numbers, texts, lists and dictionaries"
)


def load(path: Path) -> Any:
    """What torch.save wrote into a file, with its tensors on the CPU. Raises DumpError for a file
    that is damaged, or whose objects only a pickle's code can make."""
    return load_plain(path, "remove it, or record it again", CONVERT)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises DumpError."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror}", "check the path") from error
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{path} is not JSON: {one_line(error)}", "record it again") from error
    if not isinstance(value, dict):
        raise DumpError(f"{path} is not a JSON object", "record it again")
    return value


def tensor_in(path: Path, *keys: str) -> Load:
    """Reads the tensor that a file has, below these keys of its dictionaries; DumpError if it has
    none."""
    return partial(_tensor_in, path, keys)


def _tensor_in(path: Path, keys: tuple[str, ...]) -> torch.Tensor:
    value = load(path)
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, torch.Tensor):
        raise DumpError(f"{path} has no tensor {'.'.join(keys)}".rstrip(), "record it again")
    return value.detach()
