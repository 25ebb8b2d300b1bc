"""Writes the live parameters of a step as a checkpoint, once for all ranks."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlk_align.errors import TraceNotWritten
from rlk_align.model.checkpoint import tensor_name
from rlk_align.trace.records import writing

FILE_BYTES = 1 << 30
"""The values that are collected in the memory of the host before a file is written."""


class WeightFiles:
    """Writes whole parameters into files, each of about FILE_BYTES."""

    def __init__(self, folder: Path, modules: Mapping[str, str], rank: int) -> None:
        """`modules`: as for `tensor_name`; `rank`: the rank that writes, which is in the names."""
        self.folder, self._modules, self._rank = folder, modules, rank
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self.written: dict[str, str] = {}
        """Tensor -> its file."""
        self._failure: TraceNotWritten | None = None

    def add(self, parameter: str, value: torch.Tensor) -> None:
        """Takes a canonical parameter, whole. Raises nothing while ranks gather parameters."""
        if self._failure is not None:
            return
        name = tensor_name(parameter, self._modules)
        # A copy: a tied head shares the memory of the embedding, which safetensors refuses.
        self._tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        self._bytes += value.numel() * value.element_size()
        if self._bytes >= FILE_BYTES:
            try:
                self._flush()
            except TraceNotWritten as error:
                self._failure = error

    def finish(self) -> None:
        """Writes what is left. Raises TraceNotWritten if any file could not be written."""
        if self._failure is not None:
            raise self._failure
        self._flush()

    def _flush(self) -> None:
        if not self._tensors:
            return
        number = len(set(self.written.values()))
        name = f"model-{self._rank:05d}-{number:05d}.safetensors"
        with writing(self.folder / name):
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(self._tensors, self.folder / name, metadata={"format": "pt"})
        self.written |= dict.fromkeys(self._tensors, name)
        self._tensors, self._bytes = {}, 0


def write_index(folder: Path, written: Mapping[str, str]) -> None:
    """Writes the index of the files of all ranks. `written`: tensor -> its file."""
    path = folder / "model.safetensors.index.json"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"metadata": {}, "weight_map": dict(written)}), "utf-8")
