"""The tensors that a checkpoint's files hold, by their headers. A stack of all experts of a layer,
as transformers has them in memory and a trainer may save them, counts as the tensors of each
expert."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlk_align.errors import ModelError
from rlk_align.model.checkpoint import tensor_name, weight_files

_STACK = re.compile(r"model\.(layers\.\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
"""`[E, 2 I, H]`, an expert's gate before its up, or `[E, H, I]`."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor, or an expert's part of a stack."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it, e.g. `BF16`."""
    name: str
    """What holds it is called so in the file."""
    expert: int | None = None
    """Which entry of a stack it is in; None where it is all of the tensor."""
    first: int = 0
    """The tensor's first row there."""

    def read(self, file: Any) -> Any:
        """All of it, from the file as `safe_open` gives it."""
        if self.expert is None:
            return file.get_tensor(self.name)
        return self.part(file, 0, 0, self.shape[0])

    def part(self, file: Any, dim: int, start: int, stop: int) -> Any:
        """The tensor from `start` to `stop` along its first or second dimension."""
        stored = file.get_slice(self.name)
        if self.expert is None:
            return stored[start:stop] if dim == 0 else stored[:, start:stop]
        here = slice(self.expert, self.expert + 1)
        if dim == 0:
            return stored[here, self.first + start : self.first + stop][0]
        return stored[here, self.first : self.first + self.shape[0], start:stop][0]


def stored_tensors(model: Path, modules: Mapping[str, str]) -> dict[str, StoredTensor]:
    """What the files of a checkpoint hold, by name. `modules`: the family's own, as `tensor_name`
    takes them. Raises ModelError."""
    found: dict[str, StoredTensor] = {}
    for path in weight_files(model):
        try:
            with safe_open(path, framework="np") as file:
                for name in file.keys():  # noqa: SIM118 - it is no dict
                    stored = file.get_slice(name)
                    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                    whole = StoredTensor(path, shape, dtype, name)
                    found |= dict(_experts(whole, modules)) or {name: whole}
        except (OSError, SafetensorError) as error:
            raise ModelError(f"could not load {path}: {error}") from error
    return found


def _experts(stack: StoredTensor, modules: Mapping[str, str]) -> Iterator[tuple[str, StoredTensor]]:
    """(name, part) of each expert in a stack; nothing of another tensor."""
    match = _STACK.fullmatch(stack.name)
    if match is None or len(stack.shape) != 3:
        return
    layer, op = match.groups()
    count, rows, columns = stack.shape
    ops = ("gate_proj", "up_proj") if op == "gate_up_proj" else (op,)
    size = rows // len(ops)
    for expert in range(count):
        for i, each in enumerate(ops):
            name = tensor_name(f"{layer}.experts.{expert}.{each}", modules)
            shape = (size, columns)
            part = StoredTensor(stack.file, shape, stack.dtype, stack.name, expert, i * size)
            yield name, part
