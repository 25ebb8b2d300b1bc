"""A checkpoint's parameters in the dtype of a side. They are read when they are needed."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlk_align.compare.loaded_fp8 import Loaded, as_loaded
from rlk_align.model.checkpoint import tensor_name
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites, site_parameters
from rlk_align.model.stored import StoredTensor, stored_tensors
from rlk_align.model.tensors import expected_tensors
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.reader import Weight
from rlk_align.trace.schema import QuantisedProduct
from rlk_align.trace.writer import one_thread


class NotRefereed(Exception):
    """An operator cannot be recomputed; the message says why."""


class OtherWeight(NotRefereed):
    """An engine computed with another weight than the checkpoint's."""


class Checkpoint:
    """The parameters on disk, rounded to the dtype of a side. Sides with the same dtype share one,
    because they need the same parameters one after the other."""

    def __init__(
        self, model: Path, config: dict, shape: ModelShape, dtype: str, device: torch.device
    ) -> None:
        """Raises ModelError."""
        self._dtype, self.device = getattr(torch, dtype), device
        self._stored = stored_tensors(
            model, shape.family.modules, shape.fused_rows, shape.family.stacks
        )
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
        """Returns a canonical parameter. Raises NotRefereed."""
        return self._values(parameter)[0]

    def read_kept(self, parameter: str, digest: str) -> torch.Tensor:
        """Returns a canonical parameter in whichever dtype has this digest, the stored one or that
        of the side. Raises NotRefereed."""
        rounded, stored = self._values(parameter)
        with one_thread():
            same = digest_parameter(rounded) == digest
        return rounded if same else stored.to(self.device)

    def _values(self, parameter: str) -> list[torch.Tensor]:
        """The rounded and the stored values."""
        if self._last is None or self._last[0] != parameter:
            stored = self._read(tensor_name(parameter, self._modules))
            dtype = self._dtypes.get(parameter, self._dtype)
            self._last = (parameter, [stored.to(dtype).to(self.device), stored])
        return self._last[1]

    def holds(self, parameter: str, digest: str) -> bool:
        """Whether this digest of an engine's weight is that of the parameter."""
        digests = self._digests.setdefault(parameter, [])
        rounded, stored = self._values(parameter)
        with one_thread():
            if not digests:
                digests.append(digest_parameter(rounded))
            # Some engines have a master copy in the stored dtype and round it as they compute.
            if digest not in digests and len(digests) == 1 and stored.dtype != rounded.dtype:
                digests.append(digest_parameter(stored))
        return digest in digests

    def loaded(self, parameter: str, product: QuantisedProduct) -> Loaded | None:
        """Returns a parameter as an engine holds it in fp8; None if no known way gives its bits.
        Raises NotRefereed."""
        tensors = {name: self._at(tensor_name(name, self._modules)) for name in product.fused}
        try:
            return as_loaded(tensors[parameter], list(tensors.values()), product)
        except (OSError, SafetensorError) as error:
            raise NotRefereed(f"{tensors[parameter].file} cannot be read: {error}") from error

    def _at(self, name: str) -> StoredTensor:
        """Where a tensor is. Raises NotRefereed."""
        at = self._stored.get(name)
        if at is None:
            raise NotRefereed(f"the checkpoint has no {name}")
        return at

    def _read(self, name: str) -> torch.Tensor:
        at = self._at(name)
        try:
            tensor: torch.Tensor = at.load()
        except (OSError, SafetensorError) as error:
            raise NotRefereed(f"{at.file} cannot be read: {error}") from error
        if tensor.shape != self._shapes[name]:
            shapes = f"{list(tensor.shape)} instead of {list(self._shapes[name])}"
            raise NotRefereed(f"the checkpoint has {name} as {shapes}")
        return tensor


class CheckpointWeights:
    """A checkpoint's parameters, checked against the weights of a side's engine in its capture."""

    def __init__(
        self, checkpoint: Checkpoint, live: Mapping[str, Weight], assumed: bool = False
    ) -> None:
        """`live`: the weights of the side's trace; `assumed`: whether a weight that is not among
        them is taken to be the checkpoint's."""
        self._checkpoint, self._live, self._assumed = checkpoint, live, assumed

    def read(self, parameter: str, used_as: str = "") -> torch.Tensor:
        """Returns a canonical parameter, rounded to the side's dtype; `used_as`: the name of the
        engine's copy if it differs. Raises NotRefereed."""
        live = used_as if used_as in self._live else parameter
        value = self._checkpoint.read(parameter)
        if live not in self._live and self._assumed:
            return value
        if live not in self._live:
            raise OtherWeight(f"its engine showed no {live}")
        if not self._checkpoint.holds(parameter, self._live[live].digest):
            raise OtherWeight(
                f"the {live} in its engine differs from the checkpoint's: a patch changed it, or "
                "the checkpoint was replaced since"
            )
        return value

    def read_merged(
        self, parameter: str, merge: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Returns a canonical parameter that the engine merged an adapter into. Raises
        NotRefereed."""
        merged = merge(self._checkpoint.read(parameter))
        with one_thread():
            same = digest_parameter(merged) == self._live[parameter].digest
        if not same:
            raise OtherWeight(
                f"the {parameter} in its engine differs from the checkpoint's with the adapter "
                "merged into it"
            )
        return merged

    def read_fp8(self, parameter: str, product: QuantisedProduct) -> torch.Tensor:
        """Returns a parameter that the engine holds in fp8, float32. Raises NotRefereed."""
        with one_thread():
            loaded = self._checkpoint.loaded(parameter, product)
        if loaded is None:
            raise OtherWeight(
                f"the {parameter} in its engine is in fp8, and no known way of quantising the "
                "checkpoint's gives its bits"
            )
        return loaded.whole.to(self._checkpoint.device)

    def read_kept(self, parameter: str) -> torch.Tensor:
        """Returns a canonical parameter as the engine keeps it, which some keep in float32. Raises
        NotRefereed."""
        value = self.read(parameter)
        if parameter not in self._live:
            return value
        return self._checkpoint.read_kept(parameter, self._live[parameter].digest)
