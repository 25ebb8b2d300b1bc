"""A checkpoint's parameters as a side computed with them, read when they are asked for."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.families import ModelShape
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.model.stored import stored_tensors
from rlk_align.model.tensors import expected_tensors
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.reader import Weight
from rlk_align.trace.writer import one_thread


class NotRefereed(Exception):
    """Why an operator cannot be recomputed."""


class OtherWeight(NotRefereed):
    """An engine computed with another weight than the checkpoint holds."""


class Checkpoint:
    """What lies on disk now, rounded to what a side computes in. Sides that compute alike share it:
    they ask for the same parameters, one after the other."""

    def __init__(
        self, model: Path, config: dict, shape: ModelShape, dtype: str, device: torch.device
    ) -> None:
        """Raises ModelError."""
        self._dtype, self._device = getattr(torch, dtype), device
        self._stored = stored_tensors(model, shape.family.modules)
        self._shapes = expected_tensors(config, shape)
        self._dtypes = {
            parameter: getattr(torch, site.operator.weight_dtype)
            for site in model_sites(shape)
            if site.operator.weight_dtype
            for parameter in site_parameters(site, shape)
        }
        self._modules = shape.family.modules
        self._digests: dict[str, list[str]] = {}
        self._last: tuple[str, list[torch.Tensor]] | None = None

    def read(self, parameter: str) -> torch.Tensor:
        """A canonical parameter. Raises NotRefereed."""
        return self._values(parameter)[0]

    def _values(self, parameter: str) -> list[torch.Tensor]:
        """Rounded, and as it is stored."""
        if self._last is None or self._last[0] != parameter:
            stored = self._read(tensor_name(parameter, self._modules))
            dtype = self._dtypes.get(parameter, self._dtype)
            self._last = (parameter, [stored.to(dtype).to(self._device), stored])
        return self._last[1]

    def holds(self, parameter: str, digest: str) -> bool:
        """Whether an engine that held values of this digest held the parameter."""
        digests = self._digests.setdefault(parameter, [])
        rounded, stored = self._values(parameter)
        with one_thread():
            if not digests:
                digests.append(digest_parameter(rounded))
            # Some keep a master copy as the checkpoint has it, and round as they compute.
            if digest not in digests and len(digests) == 1 and stored.dtype != rounded.dtype:
                digests.append(digest_parameter(stored))
        return digest in digests

    def _read(self, name: str) -> torch.Tensor:
        at = self._stored.get(name)
        if at is None:
            raise NotRefereed(f"the checkpoint has no {name}")
        try:
            with safe_open(at.file, framework="pt") as file:
                tensor = at.read(file)
        except (OSError, SafetensorError) as error:
            raise NotRefereed(f"{at.file} cannot be read: {error}") from error
        if tensor.shape != self._shapes[name]:
            shapes = f"{list(tensor.shape)} instead of {list(self._shapes[name])}"
            raise NotRefereed(f"the checkpoint has {name} as {shapes}")
        return tensor


class CheckpointWeights:
    """A checkpoint's parameters, checked against what a side's engine held when it was captured."""

    def __init__(self, checkpoint: Checkpoint, live: Mapping[str, Weight]) -> None:
        """`live`: the weights of the side's trace."""
        self._checkpoint, self._live = checkpoint, live

    def read(self, parameter: str, used_as: str = "") -> torch.Tensor:
        """A canonical parameter, rounded to the side's dtype; `used_as`: the engine's name for its
        copy, where that is another. Raises NotRefereed."""
        live = used_as if used_as in self._live else parameter
        value = self._checkpoint.read(parameter)
        if live not in self._live:
            raise OtherWeight(f"its engine showed no {live}")
        if not self._checkpoint.holds(parameter, self._live[live].digest):
            raise OtherWeight(
                f"the {live} in its engine differs from the checkpoint's: a patch changed it, or "
                "the checkpoint was replaced since"
            )
        return value
