"""A checkpoint's tensors under their stored names, and digests of their rows."""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from rlk_align.engines.common.modules import as_rows
from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import weight_files
from rlk_align.model.dtypes import DTYPES
from rlk_align.model.stored import StoredTensor, file_tensors
from rlk_align.modules.names import NameIndex
from rlk_align.trace.digest import digest_slices


class StoredWeights:
    """The tensors of a checkpoint. Each is read when it is needed."""

    def __init__(self, model: Path) -> None:
        """Raises ModelError."""
        tensors = [t for path in weight_files(model) for t in file_tensors(path)]
        self.tensors: dict[str, StoredTensor] = {t.name: t for t in tensors}
        self._digests: dict[tuple[str, str, bool], np.ndarray] = {}

    @cached_property
    def names(self) -> NameIndex:
        return NameIndex(self.tensors)

    def read(self, name: str, dtype: str | None = None) -> torch.Tensor:
        """A tensor as rows (`engines.common.modules.as_rows`), rounded to `dtype`. Raises
        ModelError."""
        value = as_rows(self._whole(name))
        return value if dtype is None else value.to(getattr(torch, dtype))

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        try:
            return tensor.load()
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{tensor.file} cannot be read: {error}") from error

    def rows(self, name: str, dtype: str, transposed: bool = False) -> np.ndarray:
        """A digest of each row of a tensor that was rounded to `dtype`, int64 `[R]`, in the form of
        `trace.digest.digest_slices`. Of a vector, each entry is a row. `transposed`: the rows of
        its transpose, or of each matrix of a stack."""
        key = (name, dtype, transposed)
        if key not in self._digests:
            value = self._whole(name)
            if value.dtype.is_floating_point and dtype in DTYPES:
                value = value.to(getattr(torch, dtype))
            if transposed and value.dim() > 1:
                value = value.transpose(-1, -2).contiguous()
            self._digests[key] = digest_slices(as_rows(value))[0]
        return self._digests[key]

    def width(self, name: str, transposed: bool = False) -> int:
        """The number of entries of a row; 1 for a vector."""
        shape = self.tensors[name].shape
        return 1 if len(shape) < 2 else shape[-2 if transposed else -1]
