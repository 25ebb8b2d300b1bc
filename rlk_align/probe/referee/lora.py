"""Projections with a LoRA adapter: x · Wᵀ + scale · (x · Aᵀ) · Bᵀ.

Each engine rounds the product with W to its dtype. With factors of float32, PEFT computes the rest
in float32 and rounds the sum. vLLM, and PEFT with factors of a lower dtype, also round x · Aᵀ and
the product with B. vLLM folds the scale into B as it loads it. The kernels round x · Aᵀ and the
sum.
"""

import math
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from rlk_align.engines.common.lora import factor_digests, folded
from rlk_align.errors import ModelError
from rlk_align.model.adapter import TENSORS, AdapterFile, fitting_adapter
from rlk_align.model.shape import ModelShape
from rlk_align.probe.referee.formulas import sum_rounding
from rlk_align.probe.referee.rounding import rounding_variance
from rlk_align.probe.referee.weights import NotRefereed, OtherWeight
from rlk_align.trace.schema import LoraRecord
from rlk_align.trace.writer import one_thread


class Factors(NamedTuple):
    """An adapter's factors as an engine computes with them, float64."""

    a: torch.Tensor
    """`[R, K]`."""
    b: torch.Tensor
    """`[F, R]`."""
    scale: float
    h: str
    """The dtype to which the product with A is rounded; empty if it is not."""
    product: str
    """The dtype to which the product with B is rounded, before and after the scale; likewise."""


class AdapterReference:
    """A side's adapter on disk, checked against the factors of its engine."""

    def __init__(
        self,
        record: LoraRecord,
        dtype: str,
        config: dict[str, Any],
        shape: ModelShape,
        device: torch.device,
    ) -> None:
        """`dtype`: the dtype that the side computes in."""
        self._record, self._dtype, self._device = record, dtype, device
        self._file: AdapterFile | str
        try:
            self._file = fitting_adapter(record.path, config, shape)
        except ModelError as error:
            self._file = f"the adapter cannot be read: {error.message}"

    @property
    def merged_in(self) -> bool:
        """Whether the adapter is merged into the weights."""
        return bool(self._record.merged)

    def factors(self, site: str) -> Factors | None:
        """The factors that are applied beside a projection; None without any. Raises
        NotRefereed."""
        return None if self._record.merged else self._factors(site)

    def merges(self, site: str) -> bool:
        """Whether the adapter is merged into a projection's weight."""
        return bool(self._record.merged) and site in self._record.modules

    def merged(self, site: str, weight: torch.Tensor) -> torch.Tensor:
        """A projection's weight with the adapter added by PEFT's `merge_and_unload`. Raises
        NotRefereed."""
        file = self._fitting()
        a, b = (factor.float().to(weight.device) for factor in self._read(file, site))
        return (weight.float() + (b @ a) * file.settings.scale).to(weight.dtype)

    def _fitting(self) -> AdapterFile:
        if isinstance(self._file, str):
            raise NotRefereed(self._file)
        return self._file

    def _factors(self, site: str) -> Factors | None:
        live = self._record.modules.get(site)
        if live is None:
            return None
        file = self._fitting()
        a, b = self._read(file, site)
        scale = file.settings.scale
        with one_thread():
            same = live.digests[self._dtype] == factor_digests(
                a, b, scale, getattr(torch, self._dtype)
            )
        if not same:
            raise OtherWeight(f"the adapter of {site} in its engine differs from that of its file")
        held = getattr(torch, live.dtype)
        used = b.to(held) if live.scale == scale else folded(b, scale, held)
        return Factors(
            a.to(held).to(self._device).double(),
            used.to(self._device).double(),
            live.scale,
            h="" if live.dtype == "float32" else live.dtype,
            product="" if live.dtype == "float32" or live.kernels else live.dtype,
        )

    def _read(self, adapter: AdapterFile, site: str) -> list[torch.Tensor]:
        path = adapter.folder / TENSORS
        if site not in adapter.modules:
            raise OtherWeight(f"{path} has no adapter of {site}, and its engine has one")
        try:
            with safe_open(path, framework="pt") as file:
                return [file.get_tensor(name) for name in adapter.tensors(site)]
        except (OSError, SafetensorError) as error:
            raise NotRefereed(f"{path} cannot be read: {error}") from error


def add_update(
    x: torch.Tensor, base: torch.Tensor, variance: torch.Tensor, of: Factors, dtype: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact output of a projection with an adapter and its variance within, from those of the
    projection alone, `[N, F]`; x: its inputs, `[N, K]`; `dtype`: the dtype of its outputs."""
    h = x @ of.a.T
    of_h = sum_rounding(x, of.a, "float32")
    product = h @ of.b.T
    of_product = sum_rounding(h, of.b, "float32")
    update = product * of.scale
    of_scaled: torch.Tensor | float = 0.0
    if of.h:
        of_h = of_h + rounding_variance(h, of.h)
    if of.product:
        of_product = of_product + rounding_variance(product, of.product)
        if math.frexp(of.scale)[0] != 0.5:
            of_scaled = rounding_variance(update, of.product)
    within = (of_h @ of.b.square().T + of_product) * of.scale**2 + of_scaled
    return base + update, variance + rounding_variance(base, dtype) + within
