"""The tensors in a checkpoint's files, by their headers. A stack of all experts of a layer, as in
transformers and the checkpoints of some trainers, counts as one tensor for each expert."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import read_config, tensor_name, weight_files
from rlk_align.model.dtypes import DTYPES, SAFETENSORS_DTYPES
from rlk_align.model.quantised import E4M3, INPUT_SCALE, FP8Weights, stored_format
from rlk_align.model.vision import decoder_tensor

STORED_DTYPES = {stored: name for stored, name in SAFETENSORS_DTYPES.items() if name in DTYPES}
"""The dtypes that engines compute in: safetensors' name -> torch's name."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """The names of the tensors that have all experts of a layer, if a checkpoint stores such."""

    gate_up: str = "mlp.experts.gate_up_proj"
    """`[E, 2 I, H]`, an expert's gate before its up. Biases have this name and `_bias`."""
    down: str = "mlp.experts.down_proj"
    """`[E, H, I]`."""
    transposed: bool = False
    """Whether they are `[E, H, 2 I]` and `[E, I, H]`."""
    interleaved: bool = False
    """Whether the rows of gate and up alternate."""


class FusedRows(NamedTuple):
    """Consecutive rows of an operator in a fused tensor."""

    op: str
    start: int
    """The first of them among the operator's own rows."""
    stop: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, or an expert's part of a stack."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The name in safetensors, e.g. `BF16`."""
    name: str
    """The name of the tensor, or of the stack, in the file."""
    expert: int | None = None
    """The index into the stack; None for a whole tensor of the file."""
    first: int = 0
    """The first row within that entry of the stack, or within a fused tensor."""
    fused: bool = False
    """Whether it is some rows of a fused tensor."""
    rows: tuple[int, ...] = ()
    """These rows, if they are not consecutive; then `first` does not count."""
    step: int = 1
    """The distance between its rows in that entry."""
    transposed: bool = False
    """Whether that entry has them as columns."""
    scales: "StoredTensor | None" = None
    """The scales of its blocks, if it is a matrix of fp8."""
    block: tuple[int, int] = (0, 0)
    """The rows and the columns of a block."""

    def read(self, file: Any) -> Any:
        """The whole tensor; `file`: its file, as `safe_open` returns it. Values of fp8 are
        dequantised to float32. Raises OSError or SafetensorError for a damaged file of scales."""
        if self.scales is not None:
            from rlk_align.model.block_fp8 import dequantise

            return dequantise(*self.quantised(file), self.block)
        if self.expert is None and not self.fused:
            return file.get_tensor(self.name)
        return self.part(file, 0, 0, self.shape[0])

    def load(self) -> Any:
        """`read` from the tensor's file, which is opened for it. Raises OSError or SafetensorError
        for a damaged file."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            return self.read(file)

    def load_quantised(self) -> tuple[Any, Any]:
        """`quantised` from the tensor's file, as `load`."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            return self.quantised(file)

    def quantised(self, file: Any) -> tuple[Any, Any]:
        """The values `[N, K]` and the scales `[ceil(N / R), ceil(K / C)]` of fp8, as they are
        stored."""
        from safetensors import safe_open

        assert self.scales is not None
        values = file.get_tensor(self.name)
        grid = [-(-n // b) for n, b in zip(self.shape, self.block, strict=True)]
        with safe_open(self.scales.file, framework="pt") as of_scales:
            return values, of_scales.get_tensor(self.scales.name).reshape(grid)

    def part(self, file: Any, dim: int, start: int, stop: int) -> Any:
        """The tensor from `start` to `stop` along its first or second dimension."""
        if self.scales is not None:
            whole = self.read(file)
            return whole[start:stop] if dim == 0 else whole[:, start:stop]
        if self.rows:
            whole = file.get_tensor(self.name)[list(self.rows)]
            return whole[start:stop] if dim == 0 else whole[:, start:stop]
        stored = file.get_slice(self.name)
        if self.expert is None:
            if dim == 0:
                return stored[self.first + start : self.first + stop]
            return stored[self.first : self.first + self.shape[0], start:stop]
        here = slice(self.expert, self.expert + 1)
        if self.transposed or self.step > 1:
            entry = stored[here][0]
            rows = (entry.T if self.transposed else entry)[self.first :: self.step]
            return rows[start:stop] if dim == 0 else rows[:, start:stop]
        if dim == 0:
            return stored[here, self.first + start : self.first + stop][0]
        return stored[here, self.first : self.first + self.shape[0], start:stop][0]


def stored_tensors(
    model: Path,
    modules: Mapping[str, str],
    fused: Mapping[str, Sequence[FusedRows]] = MappingProxyType({}),
    stacks: Stacks = Stacks(),
) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint's files by their names in the decoder. A stack is split into its
    experts, and a fused tensor into its operators. `modules`: as for `tensor_name`; `fused`:
    `ModelShape.fused_rows`. Scales of fp8 belong to their weights. Raises ModelError."""
    found: dict[str, StoredTensor] = {}
    for whole in _with_scales(model, _tensors(model)):
        name = decoder_tensor(whole.name)
        if whole.scales is not None:
            found[name] = whole
            continue
        parts = dict(_experts(name, whole, modules, stacks))
        found |= parts or dict(_unfused(name, whole, modules, fused)) or {name: whole}
    return found


def file_tensors(path: Path) -> list[StoredTensor]:
    """The tensors of one file, by its header. For a truncated file or a damaged header, raises
    ModelError, whose cause is the error of the safetensors library."""
    from safetensors import SafetensorError, safe_open

    tensors = []
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 - it is not a dict
                stored = file.get_slice(name)
                shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                tensors.append(StoredTensor(path, shape, dtype, name))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"could not load {path}: {error}") from error
    return tensors


def _tensors(model: Path) -> list[StoredTensor]:
    return [tensor for path in weight_files(model) for tensor in file_tensors(path)]


def _with_scales(model: Path, tensors: list[StoredTensor]) -> list[StoredTensor]:
    """The tensors, in which a matrix of fp8 has its scales; only unpaired scales stay. Raises
    ModelError if the scales are those of other blocks than config.json states."""
    if not any(t.dtype == E4M3 for t in tensors):
        return tensors
    stored = stored_format(model, read_config(model))
    if stored is None:
        return tensors
    end = stored.scale
    scales = {t.name.removesuffix(end): t for t in tensors if t.name.endswith(end)}
    paired = {t.name for t in tensors if t.dtype == E4M3 and t.name in scales}
    found = []
    for tensor in tensors:
        if tensor.name in paired:
            found.append(_scaled(model, tensor, scales[tensor.name], stored))
        elif tensor.name.removesuffix(end) not in paired and not (
            stored.static and tensor.name.endswith(INPUT_SCALE)
        ):
            found.append(tensor)
    return found


def _scaled(
    model: Path, tensor: StoredTensor, scales: StoredTensor, stored: FP8Weights
) -> StoredTensor:
    """A matrix of fp8 with its scales. Raises ModelError."""
    block = stored.blocks(tensor.shape)
    wanted = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=True))
    if scales.shape != wanted and (0 not in stored.block or math.prod(scales.shape) != wanted[0]):
        raise ModelError(
            f"{model}: {scales.name} has {list(scales.shape)} scales, and {list(tensor.shape)} in "
            f"blocks of {block[0]} x {block[1]} has {list(wanted)}",
            "the weights were quantised in other blocks than config.json states: correct it, or "
            "quantise again",
        )
    if scales.dtype not in STORED_DTYPES:
        raise ModelError(f"{model}: {scales.name} is stored as {scales.dtype}: not supported")
    return replace(tensor, scales=scales, block=block)


def stored_dtype(model: Path) -> str | None:
    """The dtype of most entries of a checkpoint's tensors; None if its files cannot be read, or if
    no engine computes in that dtype."""
    entries: Counter[str] = Counter()
    try:
        for tensor in _tensors(model):
            entries[tensor.dtype] += math.prod(tensor.shape)
    except ModelError:
        return None  # `check_tensors` reports the damage.
    return STORED_DTYPES.get(entries.most_common(1)[0][0]) if entries else None


def stored_layers(model: Path) -> int:
    """The number of layers whose tensors a checkpoint has; 0 if this is unknown."""
    try:
        names = (decoder_tensor(tensor.name) for tensor in _tensors(model))
        matches = (re.match(r"model\.layers\.(\d+)\.", name) for name in names)
        return len({match[1] for match in matches if match})
    except ModelError:
        return 0  # `check_tensors` reports the damage.


def _unfused(
    tensor: str,
    whole: StoredTensor,
    modules: Mapping[str, str],
    fused: Mapping[str, Sequence[FusedRows]],
) -> Iterator[tuple[str, StoredTensor]]:
    """(name, part) of each operator of a fused tensor; empty for any other tensor. `tensor`: its
    name in the decoder."""
    match = re.fullmatch(r"model\.(layers\.\d+)\.(.+)\.(weight|bias)", tensor)
    pieces = fused.get(match[2], ()) if match else ()
    if match is None or sum(p.stop - p.start for p in pieces) != whole.shape[0]:
        return
    by_op: dict[str, dict[int, int]] = {}
    first = 0
    for p in pieces:
        own = zip(range(p.start, p.stop), range(first, whole.shape[0]), strict=False)
        by_op.setdefault(p.op, {}).update(own)
        first += p.stop - p.start
    for op, stored_rows in by_op.items():
        rows = tuple(stored_rows[own] for own in sorted(stored_rows))
        first, size = rows[0], len(rows)
        consecutive = rows == tuple(range(first, first + size))
        parameter = f"{match[1]}.{op}" + ("" if match[3] == "weight" else ".bias")
        shape = (size, *whole.shape[1:])
        name = tensor_name(parameter, modules)
        part = StoredTensor(whole.file, shape, whole.dtype, whole.name, None, first, True)
        yield name, part if consecutive else replace(part, rows=rows)


def _experts(
    tensor: str, stack: StoredTensor, modules: Mapping[str, str], stacks: Stacks
) -> Iterator[tuple[str, StoredTensor]]:
    """(name, part) of each expert in a stack; empty for a tensor that is not a stack. `tensor`: its
    name in the decoder."""
    match = re.fullmatch(r"model\.(layers\.\d+)\.(.+?)(_bias)?", tensor)
    operators = {stacks.gate_up: ("gate_proj", "up_proj"), stacks.down: ("down_proj",)}
    if match is None or match[2] not in operators or len(stack.shape) != (2 if match[3] else 3):
        return
    layer, ops, suffix = match[1], operators[match[2]], ".bias" if match[3] else ""
    transposed = stacks.transposed and not suffix
    count, rows, *columns = (stack.shape[i] for i in (0, 2, 1)) if transposed else stack.shape
    size, step = rows // len(ops), len(ops) if stacks.interleaved else 1
    for expert in range(count):
        for i, each in enumerate(ops):
            name = tensor_name(f"{layer}.experts.{expert}.{each}{suffix}", modules)
            first = i if stacks.interleaved else i * size
            yield (
                name,
                StoredTensor(
                    *(stack.file, (size, *columns), stack.dtype, stack.name, expert, first),
                    step=step,
                    transposed=transposed,
                ),
            )
