"""What an engine makes of a checkpoint's weight when it holds it in fp8: the values and the scales
that it computes with, by each way that is known. Engines quantise weights as they load them, and
quantise stored ones again. The ways are those of vLLM 0.26 and 0.32.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rlk_align.model.block_fp8 import MAX, dequantise, largest, raised, rounded, spread
from rlk_align.model.quantised import sizes_of
from rlk_align.model.stored import StoredTensor
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.schema import QuantisedProduct

STORED = ""
"""The way of a weight that is computed with as it is stored."""
REQUANTISED = (
    "the engine quantised the stored weights again, with scales that are powers of two (DeepGEMM; "
    "VLLM_USE_DEEP_GEMM_E8M0=0 leaves them as they are stored)"
)
ONE_SCALE = (
    "the engine quantised the stored weights of fused projections again, with the largest of their "
    "scales"
)
ONLINE = "the engine quantised the checkpoint's weights as it loaded them"
_LEAST = (1e-12, 1e-10, 1e-4, 1 / 512)
"""The least largest magnitude of a block in engines' quantisers."""


class Loaded(NamedTuple):
    """A weight in fp8, as an engine computes with it."""

    way: str
    """How the engine came to it."""
    values: torch.Tensor
    """e4m3 `[N, K]`."""
    scales: torch.Tensor
    """float32 `[ceil(N / R), ceil(K / C)]`."""
    block: tuple[int, int]
    """The rows and the columns of a block."""

    @property
    def whole(self) -> torch.Tensor:
        """The weight, float32 `[N, K]`."""
        return dequantise(self.values, self.scales, self.block)


def as_loaded(tensor: StoredTensor, file: Any, product: QuantisedProduct) -> Loaded | None:
    """The weight that an engine multiplies by, made from the checkpoint's tensor; None if no known
    way gives its bits. `file`: the tensor's file, as `safe_open` returns it."""
    for loaded in _ways(tensor, file, product):
        if digest_parameter(loaded.scales) == product.digests[1] and (
            digest_parameter(loaded.values) == product.digests[0]
        ):
            return loaded
    return None


def _ways(tensor: StoredTensor, file: Any, product: QuantisedProduct) -> Iterator[Loaded]:
    block = sizes_of(product.block, tensor.shape)
    if tensor.scales is None:
        for values, scales in _quantised(tensor.read(file), product, block):
            yield Loaded(ONLINE, values, scales, block)
            if product.block[1]:
                yield Loaded(f"{ONLINE}; {REQUANTISED}", *_again(values, scales, block), block)
        return
    values, scales = tensor.quantised(file)
    scales = scales.float()
    if tensor.block == block:
        yield Loaded(STORED, values, scales, block)
        if product.block[1]:
            yield Loaded(REQUANTISED, *_again(values, scales, block), block)
    if product.scale is not None:
        # By way of float16, as vLLM does it.
        whole, one = values.half() * scales.reshape(()), scales.new_tensor(product.scale)
        for scaled in (whole.float() * one.reciprocal(), whole.float() / one):
            yield Loaded(ONE_SCALE, rounded(scaled), one.reshape(1, 1), block)


def _again(
    values: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of fp8 with scales that are powers of two, from others."""
    whole = dequantise(values, scales, block)
    powers = raised(largest(whole, block).clamp(min=1e-4) / MAX)
    return rounded(whole / spread(powers, whole.shape, block)), powers


def _quantised(
    weight: torch.Tensor, product: QuantisedProduct, block: tuple[int, int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(values, scales) of a weight by the steps of different quantisers. A GPU divides by the
    number 448 as it multiplies by its reciprocal."""
    w = weight.float()
    if product.scale is not None:
        known = [w.new_full((1, 1), product.scale)]
    else:
        most, eighth = largest(w, block), torch.tensor(1 / MAX)
        least = [most.clamp(min=bound) for bound in _LEAST if bool((most < bound).any())] or [most]
        known = [scaled for x in least for scaled in (x / MAX, x * eighth)]
    for scales in known:
        wide = spread(scales, w.shape, block)
        yield rounded(w * wide.reciprocal()), scales
        yield rounded(w / wide), scales
