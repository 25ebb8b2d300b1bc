"""What an engine makes of a checkpoint's weight when it holds it in fp8: the values and the scales
that it computes with, by each way that is known. Engines quantise weights as they load them, and
quantise stored ones again. The ways are those of vLLM 0.26 and 0.32.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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


def as_loaded(
    tensor: StoredTensor, fused: Sequence[StoredTensor], product: QuantisedProduct
) -> Loaded | None:
    """The weight that an engine multiplies by, made from the checkpoint's tensor; None if no known
    way gives its bits. `fused`: the tensors of `product.fused`. Raises OSError or SafetensorError
    for a damaged file."""
    for loaded in _ways(tensor, fused, product):
        if digest_parameter(loaded.scales) == product.digests[1] and (
            digest_parameter(loaded.values) == product.digests[0]
        ):
            return loaded
    return None


def _stored(tensor: StoredTensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = tensor.load_quantised()
    return values, scales.float()


def _ways(
    tensor: StoredTensor, fused: Sequence[StoredTensor], product: QuantisedProduct
) -> Iterator[Loaded]:
    block, one_scale = sizes_of(product.block, tensor.shape), product.block == (0, 0)
    if tensor.scales is None:
        w = tensor.load()
        most = torch.stack([t.load().float().abs().max() for t in fused]) if one_scale else None
        for values, scales in _quantised(w, most, block):
            yield Loaded(ONLINE, values, scales, block)
            if product.block[1]:
                yield Loaded(f"{ONLINE}; {REQUANTISED}", *_again(values, scales, block), block)
        return
    values, scales = _stored(tensor)
    if tensor.block == block:
        yield Loaded(STORED, values, scales, block)
        if product.block[1]:
            yield Loaded(REQUANTISED, *_again(values, scales, block), block)
    if one_scale and all(t.scales is not None for t in fused):
        # By way of float16, as vLLM does it.
        one = torch.stack([_stored(t)[1].max() for t in fused]).max()
        whole = values.half() * scales.reshape(())
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
    weight: torch.Tensor, fused: torch.Tensor | None, block: tuple[int, int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(values, scales) of a weight by the steps of different quantisers. `fused`: the largest
    magnitudes of the weights that share its one scale. A GPU divides by the number 448 as it
    multiplies by its reciprocal."""
    w, eighth = weight.float(), torch.tensor(1 / MAX)
    most = largest(w, block) if fused is None else fused.max().reshape(1, 1)
    least = [most.clamp(min=bound) for bound in _LEAST if bool((most < bound).any())] or [most]
    for scales in (scaled for x in least for scaled in (x / MAX, x * eighth)):
        wide = spread(scales, w.shape, block)
        yield rounded(w * wide.reciprocal()), scales
        yield rounded(w / wide), scales
