"""Files of torch.save, loaded without running their code. torch is imported when one is loaded."""

import warnings
import zipfile
from pathlib import Path
from typing import Any

from rlk_align.errors import INSTALL_ENGINES, DumpError, MissingDependency
from rlk_align.text import one_line


def load_plain(path: Path, again: str, convert: str) -> Any:
    """The tensors, on the CPU, and plain values in a file. again: what to do about a damaged one;
    convert: about one whose objects only a pickle's code can make. Raises MissingDependency without
    torch, and DumpError."""
    if not path.is_file():
        raise DumpError(f"{path} does not exist", "check the path")
    if not zipfile.is_zipfile(path):
        raise DumpError(
            f"{path} is not what torch.save writes, or was cut off",
            f"{again}; if it has torch's old format, which is a pickle: {convert}",
        )
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
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise DumpError(
            f"{path} has objects other than tensors and plain values", convert
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {one_line(error)}", again) from error
