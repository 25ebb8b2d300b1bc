"""Reads DeepSpeed's checkpoints: whole weights below ZeRO-3, and the fp32 masters that ranks share
under it. They are pickles, which are read as data: nothing in them is unpickled.

R = ranks. Under ZeRO-3 rank r holds entries [r · n, (r + 1) · n) of each flattened parameter, n its
number of entries over R, rounded up, one parameter after another in flat groups.
"""

import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from rlk_align.errors import CorruptCheckpoint, ModelError
from rlk_align.text import one_line
from rlk_align.weights.lazy import DAMAGED, DTYPES, LazyTensor, Region
from rlk_align.weights.mapped import MappedFile, strided
from rlk_align.weights.pickled import Call, Name, read_pickle

_WHOLE = "mp_rank_00_model_states.pt"
_SHARE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt")
_MASTERS = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_OTHERS = {
    "mp_rank_01_*.pt": "of tensor-parallel ranks",
    "zero_pp_rank_*_mp_rank_01_*.pt": "of tensor-parallel ranks",
    "layer_*-model_states.pt": "of a pipeline",
    "layer_*_expert_*_model_states.pt": "of DeepSpeed's own experts",
    "expp_rank_*_optim_states.pt": "of DeepSpeed's own experts",
}
"""Files of checkpoints that are not read -> what they are."""
_STORAGES = {
    **{"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"DoubleStorage": "float64", "LongStorage": "int64", "IntStorage": "int32"},
    **{"BoolStorage": "bool", "ByteStorage": "uint8"},
}


def deepspeed_folder(folder: Path) -> Path | None:
    """The folder of a checkpoint's files: this one, or the one in it that its `latest` names; None
    where it is no checkpoint of DeepSpeed. Raises CorruptCheckpoint where `latest` names none."""
    if _holds_states(folder):
        return folder
    latest = folder / "latest"
    if not latest.is_file():
        return None
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if Path(name).name != name or not _holds_states(folder / name):
        raise CorruptCheckpoint(f"{latest} names {name!r}, which holds no *_model_states.pt")
    return folder / name


def _holds_states(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*_model_states.pt"))


def read_deepspeed(folder: Path) -> tuple[str, list[LazyTensor]]:
    """What kind of checkpoint it is, and its weights.

    Raises ModelError for a kind that is not read, CorruptCheckpoint where a file is missing,
    truncated, or is not what DeepSpeed writes."""
    for pattern, what in _OTHERS.items():
        if found := next(folder.glob(pattern), None):
            raise ModelError(
                f"{folder} is a DeepSpeed checkpoint {what} ({found.name}), which is not read",
                "save it as safetensors where it was trained",
            )
    if (folder / _WHOLE).is_file():
        file = _TorchFile(folder / _WHOLE)
        with file.described():
            return "DeepSpeed checkpoint", list(file.tensors(_items(file.value["module"])))
    shares, masters = (_by_rank(folder, pattern) for pattern in (_SHARE, _MASTERS))
    return "DeepSpeed ZeRO-3 checkpoint", _joined(folder, shares, masters)


def _by_rank(folder: Path, pattern: re.Pattern[str]) -> list["_TorchFile"]:
    """A file for each rank. Raises CorruptCheckpoint where one is missing."""
    found = {int(m[1]): p for p in folder.iterdir() if (m := pattern.fullmatch(p.name))}
    missing = sorted(set(range(max(found, default=0) + 1)) - found.keys())
    if missing:
        kind = pattern.pattern.rpartition("_mp_rank_00_")[2].replace("\\", "")
        raise CorruptCheckpoint(
            f"{folder} has no zero_pp_rank_{missing[0]}_mp_rank_00_{kind}",
            "copy the files of all ranks",
        )
    return [_TorchFile(found[rank]) for rank in sorted(found)]


def _joined(
    folder: Path, shares: Sequence["_TorchFile"], masters: Sequence["_TorchFile"]
) -> list[LazyTensor]:
    """The parameters of a ZeRO-3 checkpoint."""
    first = shares[0]
    with masters[0].described():
        world = int(masters[0].value["optimizer_state_dict"]["partition_count"])
    if not len(shares) == len(masters) == world:
        raise CorruptCheckpoint(
            f"{folder} has files of {len(shares)} and {len(masters)} ranks, and was written by "
            f"{world}",
            "copy the files of all ranks",
        )
    flat = []
    for file in masters:
        with file.described():
            groups = file.value["optimizer_state_dict"]["fp32_flat_groups"]
            flat.append(_Flat(tuple(file.stored(group) for group in groups)))
    tensors, offset = [], 0
    with first.described():
        for name, shape in _shapes(first.value["param_shapes"]):
            tensors.append(_shared(name, shape, flat, offset))
            offset += -(-prod(shape) // world)
        for rank, ours in enumerate(flat):
            if offset != ours.size:
                raise CorruptCheckpoint(
                    f"{masters[rank].path} has {ours.size:,} entries of parameters that take "
                    f"{offset:,}",
                    DAMAGED,
                )
        for name, shape in _shapes([first.value.get("frozen_param_shapes") or {}]):
            parts = [_fragment(file, name) for file in shares]
            tensors.append(_shared(name, shape, parts, 0))
        known = {tensor.name: tensor for tensor in tensors}
        for other, name in (first.value.get("shared_params") or {}).items():
            if name in known:
                tensors.append(LazyTensor(other, *_but_name(known[name])))
    return tensors


def _but_name(tensor: LazyTensor) -> tuple[tuple[int, ...], str, Any]:
    return tensor.shape, tensor.dtype, tensor.read


def _shapes(groups: Sequence[Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameter -> a torch.Size, in groups of the optimizer."""
    for group in groups:
        for name, size in _items(group).items():
            (sizes,) = size.arguments
            if not all(type(s) is int and s >= 0 for s in sizes):
                raise ValueError(f"the size of {name} is {sizes!r}")
            yield name, tuple(sizes)


def _fragment(file: "_TorchFile", name: str) -> "_Flat":
    with file.described():
        return _Flat((file.stored(_items(file.value["frozen_param_fragments"])[name]),))


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of a file, which is read when it is needed."""

    file: "_TorchFile"
    dtype: str
    start: int
    """Where its storage begins in the file."""
    entries: int
    """Of its storage."""
    first: int
    sizes: tuple[int, ...]
    stride: tuple[int, ...]

    def read(self) -> torch.Tensor:
        flat = self.file.mapped.tensor(self.dtype, (self.entries,), self.start)
        return strided(flat, self.first, self.sizes, self.stride)


@dataclass(frozen=True, slots=True)
class _Flat:
    """What one rank holds, of one dimension, in groups one after another."""

    groups: tuple[_Stored, ...]

    @property
    def size(self) -> int:
        return sum(prod(group.sizes) for group in self.groups)

    def read(self, start: int, stop: int) -> torch.Tensor:
        parts, at = [], 0
        for group in self.groups:
            size = prod(group.sizes)
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                parts.append(group.read()[low:high])
            at += size
        return torch.cat(parts) if parts else torch.empty(0, dtype=DTYPES[self.groups[0].dtype])


def _shared(name: str, shape: tuple[int, ...], ranks: Sequence[_Flat], offset: int) -> LazyTensor:
    """A parameter whose flat slices ranks hold, from `offset` of each on."""
    read = partial(_read_shared, shape, tuple(ranks), offset)
    return LazyTensor(name, shape, ranks[0].groups[0].dtype, read)


def _read_shared(
    shape: tuple[int, ...], ranks: Sequence[_Flat], offset: int, region: Region | None
) -> torch.Tensor:
    share, row = -(-prod(shape) // len(ranks)), prod(shape[1:])
    first, last = region or (0, shape[0] if shape else 1)
    start, stop = first * row, last * row
    parts = []
    for rank, flat in enumerate(ranks):
        low, high = max(start - rank * share, 0), min(stop - rank * share, share)
        if low < high:
            parts.append(flat.read(offset + low, offset + high))
    return torch.cat(parts).reshape((last - first, *shape[1:]) if shape else ())


class _TorchFile:
    """A file of torch.save."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def mapped(self) -> MappedFile:
        return MappedFile(self.path)

    @cached_property
    def _entries(self) -> dict[str, zipfile.ZipInfo]:
        """What lies in the archive, by its path below the archive's own name."""
        with zipfile.ZipFile(self.path) as archive:
            return {i.filename.partition("/")[2]: i for i in archive.infolist()}

    @cached_property
    def value(self) -> Mapping[str, Any]:
        """What was saved; tensors are records of calls."""
        with zipfile.ZipFile(self.path) as archive:
            return read_pickle(archive.read(self._entries["data.pkl"]))

    def described(self) -> "_Described":
        """Within it, what is not as DeepSpeed writes it raises CorruptCheckpoint."""
        return _Described(self.path)

    def tensors(self, saved: Mapping[str, Any]) -> Iterator[LazyTensor]:
        """The tensors of a state dict."""
        for name, call in saved.items():
            if isinstance(call, Call):
                stored = self.stored(call)
                yield LazyTensor(name, stored.sizes, stored.dtype, partial(_read_whole, stored))

    def stored(self, call: Call) -> _Stored:
        """Where a tensor lies: `_rebuild_tensor_v2(storage, offset, size, stride, ...)`, which
        one with attributes of its own, or a parameter, has around it."""
        kind = call.function.name
        if kind == "_rebuild_from_type_v2":
            return self.stored(Call(call.arguments[0], call.arguments[2]))
        if kind == "_rebuild_parameter":
            return self.stored(call.arguments[0])
        if kind != "_rebuild_tensor_v2":
            raise ValueError(f"a tensor is made by {kind}")
        storage, first, sizes, stride, *_ = call.arguments
        ((_, storage_kind, key, _, entries),) = storage.arguments
        if not isinstance(storage_kind, Name) or storage_kind.name not in _STORAGES:
            raise ValueError(f"a storage is a {storage_kind!r}")
        dtype, entry = _STORAGES[storage_kind.name], self._entries[f"data/{key}"]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
        if entry.file_size != entries * DTYPES[dtype].itemsize:
            raise ValueError(f"a storage of {entries:,} entries has {entry.file_size:,} bytes")
        start = self.mapped.entry_start(entry.header_offset)
        return _Stored(self, dtype, start, entries, first, tuple(sizes), tuple(stride))


class _Described:
    """Says of a file, as the error's cause, what in it is not as DeepSpeed writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, _traceback: Any) -> None:
        known = (OSError, zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError)
        if isinstance(error, (*known, IndexError)):
            raise CorruptCheckpoint(
                f"{self._path} is not a file of a DeepSpeed checkpoint, or is damaged: "
                f"{one_line(error)}",
                DAMAGED,
            ) from error


def _read_whole(stored: _Stored, region: Region | None) -> torch.Tensor:
    whole = stored.read()
    return whole if region is None else whole[region[0] : region[1]]


def _items(value: Any) -> Mapping[str, Any]:
    """The items of a dict, ordered or not."""
    return value.items if isinstance(value, Call) else value
