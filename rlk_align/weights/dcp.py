"""Reads torch's distributed checkpoints, which FSDP and Megatron write: `.metadata` and `.distcp`
files. Nothing in them is unpickled."""

import re
import zipfile
from dataclasses import dataclass
from functools import cached_property, partial
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import torch

from rlk_align.errors import CorruptCheckpoint
from rlk_align.text import one_line
from rlk_align.weights.lazy import DAMAGED, DTYPES, Chunk, LazyTensor, Region
from rlk_align.weights.mapped import MappedFile, strided
from rlk_align.weights.pickled import Call, Name, read_pickle

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class _Item:
    """Where one chunk of a tensor lies."""

    file: str
    offset: int
    length: int


def read_dcp(folder: Path) -> list[LazyTensor]:
    """The tensors of a distributed checkpoint, by its metadata.

    Raises CorruptCheckpoint where a file is missing, truncated or of a kind that is not known.
    """
    path = folder / METADATA
    try:
        described: Any = read_pickle(path.read_bytes())
        entries, stored = described["state_dict_metadata"], described["storage_data"]
        items = {_key(index): _item(info) for index, info in stored.items()}
        tensors = {
            name: entry
            for name, entry in entries.items()
            if _kind(entry) == "TensorStorageMetadata"
        }
        files = {
            name: _DcpFile(folder / name)
            for name in sorted({items[k].file for k in items if k[0] in tensors})
        }
        return [_tensor(n, entry, items, files) for n, entry in tensors.items()]
    except OSError as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {error}", DAMAGED) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptCheckpoint(
            f"{path} does not describe a distributed checkpoint: {one_line(error)}", DAMAGED
        ) from error


def _kind(entry: Call) -> str:
    return entry.function.name


def _size(value: Call) -> tuple[int, ...]:
    """A torch.Size."""
    [sizes] = value.arguments
    if not all(type(s) is int and s >= 0 for s in sizes):
        raise ValueError(f"a size is {sizes!r}")
    return tuple(sizes)


def _key(index: Call) -> tuple[str, tuple[int, ...]]:
    """What the metadata finds a chunk by: the tensor's name, and its offset if it has several."""
    offset = index.state.get("offset")
    return index["fqn"], () if offset is None else _size(offset)


def _item(info: Call) -> _Item:
    name = info["relative_path"]
    if Path(name).name != name:
        raise ValueError(f"{name!r} lies outside the checkpoint's folder")
    if isinstance(info.state, dict) and info.state.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed, which is not read")
    return _Item(name, info["offset"], info["length"])


def _tensor(
    name: str,
    entry: Call,
    items: dict[tuple[str, tuple[int, ...]], _Item],
    files: dict[str, "_DcpFile"],
) -> LazyTensor:
    dtypes = [p.name for p in entry["properties"].state if isinstance(p, Name)]
    dtype = next(d for d in dtypes if d in DTYPES)
    shape, chunks, places = _size(entry["size"]), [], []
    for chunk in entry["chunks"]:
        offsets, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        item = items.get((name, offsets)) or items[name, ()]
        writer = re.match(r"__(\d+)_", item.file)
        chunks.append(Chunk(int(writer[1]) if writer else 0, offsets, sizes))
        places.append((files[item.file], item))
    count = sum(torch.Size(c.sizes).numel() for c in chunks)
    if count != torch.Size(shape).numel():
        raise ValueError(f"the chunks of {name} have {count:,} entries of {list(shape)}")
    read = partial(_read, shape, dtype, list(zip(chunks, places, strict=True)))
    return LazyTensor(name, shape, dtype, read, tuple(chunks))


def _read(
    shape: tuple[int, ...],
    dtype: str,
    chunks: list[tuple[Chunk, tuple["_DcpFile", _Item]]],
    region: Region | None,
) -> torch.Tensor:
    start, stop = region or (0, shape[0] if shape else 1)
    whole: torch.Tensor | None = None
    for chunk, (file, item) in chunks:
        first = chunk.offsets[0] if chunk.offsets else 0
        last = first + (chunk.sizes[0] if chunk.sizes else 1)
        if last <= start or first >= stop:
            continue
        part = file.chunk(item, dtype, chunk.sizes)
        if not shape or chunk.sizes == shape:
            return part[start:stop] if shape else part
        if whole is None:
            whole = torch.empty((stop - start, *shape[1:]), dtype=DTYPES[dtype])
        low, high = max(first, start), min(last, stop)
        at = (
            slice(low - start, high - start),
            *(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)),
        )
        whole[at] = part[low - first : high - first]
    assert whole is not None, region
    return whole


class _DcpFile:
    """A `.distcp` file: archives of torch.save, one a chunk, one after another."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _file(self) -> MappedFile:
        return MappedFile(self.path)

    def chunk(self, item: _Item, dtype: str, sizes: tuple[int, ...]) -> torch.Tensor:
        """A chunk where it lies in the file. Raises CorruptCheckpoint."""
        try:
            return self._chunk(item, dtype, sizes)
        except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpoint(
                f"{self.path}: the tensor at byte {item.offset:,} is damaged: {one_line(error)}",
                DAMAGED,
            ) from error

    def _chunk(self, item: _Item, dtype: str, sizes: tuple[int, ...]) -> torch.Tensor:
        if item.offset + item.length > self._file.size:
            raise CorruptCheckpoint(
                f"{self.path} is truncated: a tensor ends at byte {item.offset + item.length:,}, "
                f"and the file has {self._file.size:,}",
                DAMAGED,
            )
        with zipfile.ZipFile(_Part(self._file, item)) as archive:
            [described] = [i for i in archive.infolist() if i.filename.endswith("/data.pkl")]
            # torch._utils._rebuild_tensor_v2(storage, offset, size, stride, ...)
            _, first, size, stride, *_ = read_pickle(archive.read(described)).arguments
            [data] = [i for i in archive.infolist() if "/data/" in i.filename]
            if data.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
        if tuple(size) != sizes:
            raise ValueError(f"its shape is {size}, and {METADATA} says {sizes}")
        start = self._file.entry_start(item.offset + data.header_offset)
        flat = self._file.tensor(dtype, (data.file_size // DTYPES[dtype].itemsize,), start)
        return strided(flat, first, sizes, stride)


class _Part(BufferedIOBase):
    """A part of a mapped file, as a file of its own."""

    def __init__(self, file: MappedFile, item: _Item) -> None:
        self._file, self._item, self._at = file, item, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._item.length)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._item.length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        start = self._item.offset + self._at
        self._at += count
        return self._file.data[start : start + count]
