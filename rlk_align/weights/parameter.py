"""A canonical parameter of a checkpoint, or of a live engine that a run recorded."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch

from rlk_align.compare.parity_weights import Shards
from rlk_align.model.block_fp8 import dequantise
from rlk_align.model.quantised import FP8Weights
from rlk_align.trace.digest import digest_parameter, digest_slices
from rlk_align.trace.reader import Trace, Weight
from rlk_align.weights.lazy import Chunk, LazyTensor
from rlk_align.weights.naming import Piece
from rlk_align.weights.quantiser import Stored


class Parameter(Protocol):
    """One canonical parameter of one side."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shards(self) -> Shards: ...
    @property
    def digest(self) -> str: ...
    @property
    def slices(self) -> tuple[np.ndarray, np.ndarray]: ...

    def value(self) -> torch.Tensor | None:
        """The parameter's entries; None if only digests were recorded."""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of a checkpoint, which each access reads again."""

    name: str
    tensor: LazyTensor
    piece: Piece

    @cached_property
    def shape(self) -> tuple[int, ...]:
        inner = self.tensor.shape[1:] if self.piece.layer is not None else self.tensor.shape
        inner = inner[::-1] if self.piece.transposed else inner
        if not self.piece.rows:
            return inner
        rows = (range(start, stop, self.piece.step) for start, stop in self.piece.rows)
        return (sum(map(len, rows)), *inner[1:])

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    def value(self) -> torch.Tensor:
        layer = self.piece.layer
        if layer is None and len(self.piece.rows) == 1:
            return self.tensor.read(self.piece.rows[0])
        region = None if layer is None else (layer, layer + 1)
        whole = self.tensor.read(region)
        whole = whole if layer is None else whole[0]
        whole = whole.T if self.piece.transposed else whole
        step = self.piece.step
        parts = [whole[start:stop:step] for start, stop in self.piece.rows] or [whole]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @cached_property
    def digest(self) -> str:
        return digest_parameter(self.value())

    @cached_property
    def slices(self) -> tuple[np.ndarray, np.ndarray]:
        return digest_slices(self.value())

    @cached_property
    def shards(self) -> Shards:
        chunks = self.tensor.chunks
        if len({c.rank for c in chunks}) < 2:
            return []
        return [shard for chunk in chunks for shard in self._shards_of(chunk)]

    def _shards_of(self, chunk: Chunk) -> Iterable[tuple[int, int, int, int]]:
        """The part of the parameter that one process's chunk has; unknown where its rows are
        columns or alternate with another's."""
        if self.piece.transposed or self.piece.step > 1:
            return
        offsets, sizes = chunk.offsets, chunk.sizes
        layer = self.piece.layer
        if layer is not None:
            if not offsets[0] <= layer < offsets[0] + sizes[0]:
                return
            offsets, sizes = offsets[1:], sizes[1:]
        if len(sizes) > 1 and sizes[1] != self.shape[1]:
            yield (chunk.rank, 1, offsets[1], offsets[1] + sizes[1])
            return
        at = 0
        for start, stop in self.piece.rows or ((0, self.shape[0]),):
            low, high = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if low < high:
                yield (chunk.rank, 0, at + low - start, at + high - start)
            at += stop - start


@dataclass(frozen=True)
class QuantisedParameter(StoredParameter):
    """A parameter that a checkpoint stores in fp8; its values are the dequantised
    ones, in float32."""

    scales: LazyTensor
    stored: FP8Weights

    @property
    def dtype(self) -> str:
        return "float32"

    def quantised(self) -> Stored:
        """The values and the scales, as they are stored."""
        block = self.stored.blocks(self.shape)
        grid = [-(-n // b) for n, b in zip(self.shape, block, strict=True)]
        scales = self.scales.read(None).float().reshape(grid)
        return Stored(super().value(), scales, block, self.stored.powers_of_two)

    def value(self) -> torch.Tensor:
        return dequantise(*self.quantised()[:3])


@dataclass(frozen=True)
class RecordedParameter:
    """A parameter of a live engine, whose digests a capture recorded."""

    name: str
    trace: Trace
    weight: Weight

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> str:
        return self.weight.dtype

    @property
    def shards(self) -> Shards:
        return self.weight.shards

    @property
    def digest(self) -> str:
        return self.weight.digest

    @cached_property
    def slices(self) -> tuple[np.ndarray, np.ndarray]:
        return self.trace.weight_slices(self.name)

    def slices_as(self, dtype: str) -> tuple[np.ndarray, np.ndarray]:
        """The slices of the parameter rounded to a dtype, or unrounded if that was not recorded."""
        known = dtype in self.weight.casts
        return self.trace.weight_slices(self.name, dtype if known else "")

    def value(self) -> None:
        return None
