"""A checkpoint's parameters as a side computed with them, read when they are asked for."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.families import ModelShape
from rlk_align.model.tensors import expected_tensors, stored_tensors
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.reader import Weight
from rlk_align.trace.writer import one_thread


class NotRefereed(Exception):
    """Why an operator cannot be recomputed."""


class CheckpointWeights:
    """What lies on disk now, checked against what the side's engine held when it was captured."""

    def __init__(
        self,
        model: Path,
        config: dict,
        shape: ModelShape,
        dtype: str,
        live: Mapping[str, Weight],
        device: torch.device,
    ) -> None:
        """`dtype`: what the side computed in; `live`: its trace's weights. Raises ModelError."""
        self._dtype, self._live, self._device = getattr(torch, dtype), live, device
        self._stored = stored_tensors(model)
        self._shapes = expected_tensors(config, shape)
        self._checked: dict[str, str] = {}
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, parameter: str, used_as: str = "") -> torch.Tensor:
        """A canonical parameter, rounded to the side's dtype; `used_as`: the engine's name for its
        copy, where that is another. Raises NotRefereed."""
        live = used_as if used_as in self._live else parameter
        if self._last is None or self._last[0] != parameter or live not in self._checked:
            stored = self._read(tensor_name(parameter))
            rounded = stored.to(self._dtype).to(self._device)
            if live not in self._checked:
                self._checked[live] = self._difference(live, stored, rounded)
            # The next pass asks for the same one.
            self._last = (parameter, rounded)
        if self._checked[live]:
            raise NotRefereed(self._checked[live])
        return self._last[1]

    def _difference(self, live: str, stored: torch.Tensor, rounded: torch.Tensor) -> str:
        """Why these are not the values that the engine held; empty where they are."""
        if live not in self._live:
            return f"its engine showed no {live}"
        digest = self._live[live].digest
        with one_thread():
            if digest_parameter(rounded) == digest:
                return ""
            # Some keep a master copy as the checkpoint has it, and round as they compute.
            if stored.dtype != rounded.dtype and digest_parameter(stored) == digest:
                return ""
        return (
            f"its engine held another {live} than the checkpoint has now: a patch changed it, or "
            "the checkpoint was replaced since"
        )

    def _read(self, name: str) -> torch.Tensor:
        at = self._stored.get(name)
        if at is None:
            raise NotRefereed(f"the checkpoint has no {name}")
        try:
            with safe_open(at.file, framework="pt") as file:
                tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise NotRefereed(f"{at.file} cannot be read: {error}") from error
        if tensor.shape != self._shapes[name]:
            shapes = f"{list(tensor.shape)} instead of {list(self._shapes[name])}"
            raise NotRefereed(f"the checkpoint has {name} as {shapes}")
        return tensor
