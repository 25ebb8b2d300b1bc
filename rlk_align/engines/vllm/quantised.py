"""What a live vLLM model quantises: the weights that its products hold in fp8, the grids of their
inputs, and the keys and values of its attention."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rlk_align.engines.common.fused_places import attentions
from rlk_align.engines.common.parameters import LiveParameter
from rlk_align.engines.common.places import Place
from rlk_align.engines.vllm.latent import core_of
from rlk_align.engines.vllm.places import vllm_places
from rlk_align.errors import ModelError
from rlk_align.model.block_fp8 import dequantise
from rlk_align.model.quantised import sizes_of
from rlk_align.model.shape import ModelShape
from rlk_align.trace.digest import digest_parameter
from rlk_align.trace.schema import CacheRecord, Grid, QuantisedProduct

_BY_BATCH = "FlashInferFp8DeepGEMMDynamicBlockScaledKernel"
"""The kernel that has FlashInfer quantise the inputs of few rows, with float32 scales."""
_HOPPER = 9
"""The major compute capability of GPUs whose tensor cores keep about 14 bits of a sum of fp8
products (DeepSeek-V3's technical report, section 3.3.2)."""
_CUTS = "CPUAttentionBackendImpl"
"""The attention whose cache cuts numbers off."""
_TRANSPOSED = (0, 1)
"""The rows of a block in formats whose weight vLLM holds as `[K, N]`."""


class LiveFP8(NamedTuple):
    """A weight in fp8 in a live model."""

    parameter: str
    values: torch.Tensor
    """e4m3 `[N, K]`."""
    scales: torch.Tensor
    """float32 `[ceil(N / R), ceil(K / C)]`."""
    product: QuantisedProduct


def live_fp8(model: Any, shape: ModelShape) -> Iterator[LiveFP8]:
    """Every weight that a live model of one rank holds in fp8. Raises ModelError for one whose
    format is unknown."""
    for place in vllm_places(model, shape, 1):
        module = model.get_submodule(place.holder)
        if place.end == "output" and in_fp8(module):
            yield from _of_module(module, place)


def in_fp8(module: Any) -> bool:
    """Whether a module's weight is in fp8."""
    return getattr(getattr(module, "weight", None), "dtype", None) == torch.float8_e4m3fn


def fp8_weights(model: Any, shape: ModelShape) -> Iterator[LiveParameter]:
    """The weights that a live model holds in fp8, dequantised to float32."""
    for live in live_fp8(model, shape):
        block = sizes_of(live.product.block, live.values.shape)
        yield LiveParameter(live.parameter, dequantise(live.values, live.scales, block))


def _of_module(module: Any, place: Place) -> Iterator[LiveFP8]:
    """The weights of a linear layer, which may be several in one matrix."""
    kernel = _kernel(module, place)
    block = _block(module, kernel)
    values = module.weight.detach()
    values = values.T if block[0] in _TRANSPOSED else values
    scales = getattr(module, "weight_scale_inv", None)
    scales = (module.weight_scale if scales is None else scales).detach()
    if scales.dtype != torch.float32:
        raise ModelError(f"{place.holder}: its scales are {scales.dtype}, whose layout is unknown")
    rows, columns = sizes_of(block, values.shape)
    grid = [-(-values.shape[0] // rows), -(-values.shape[1] // columns)]
    by_row = scales.reshape(grid).repeat_interleave(rows, 0)[: values.shape[0]]
    layout = place.layout
    for site in place.sites:
        mine, of_rows = (
            x if layout is None else layout.assemble(site, [x], 0) for x in (values, by_row)
        )
        own = of_rows[:: block[0] or len(of_rows)].contiguous()
        spread = own.repeat_interleave(block[0] or len(of_rows), 0)[: len(of_rows)]
        if not torch.equal(spread, of_rows):
            raise ModelError(f"{place.holder}: a block of its weight has rows of two projections")
        mine = mine.contiguous()
        yield LiveFP8(
            site,
            mine,
            own,
            QuantisedProduct(
                block=block,
                digests=(digest_parameter(mine), digest_parameter(own)),
                fused=list(place.sites),
                grids=_grids(module, kernel),
                kernel=type(kernel).__name__,
            ),
        )


def _kernel(module: Any, place: Place) -> Any:
    """What multiplies by a weight in fp8."""
    method = getattr(module, "scheme", None) or module.quant_method
    kernel = getattr(method, "fp8_linear", None)
    if kernel is None:
        raise ModelError(
            f"{place.holder}: its weight is in fp8, and {type(method).__name__} is unknown here: "
            "what it computes was never compared"
        )
    return kernel


def _block(module: Any, kernel: Any) -> tuple[int, int]:
    """The rows and the columns that share a scale; 0 for all."""
    if module.weight_block_size is not None:
        return (int(module.weight_block_size[0]), int(module.weight_block_size[1]))
    return (0, 0) if module.weight_scale.numel() == 1 else (1, 0)


def _grids(module: Any, kernel: Any) -> list[Grid]:
    """The grids of a product's inputs."""
    name = type(kernel).__name__
    if "Marlin" in name or "A16" in name or name.startswith("CPUFp8"):
        return []
    if name == _BY_BATCH:
        others = _grids(module, kernel.fallback)
        return [Grid(columns=128, few_bits=others[0].few_bits), *others]
    quantiser, weight = kernel.quant_fp8, module.weight
    few = weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] == _HOPPER
    if quantiser.static:
        return [Grid(columns=0, scale=float(module.input_scale), few_bits=few)]
    columns = quantiser.group_size if quantiser.is_group_quant else 0
    by_batch = not quantiser.is_group_quant and not quantiser.use_per_token_if_dynamic
    powers = bool(quantiser.is_group_quant and quantiser.use_ue8m0)
    return [Grid(columns=columns, by_batch=by_batch, few_bits=few, powers_of_two=powers)]


def live_cache(model: Any) -> CacheRecord | None:
    """The quantised keys and values of a live model's attention; None if they are not."""
    layers = {i: core_of(a) for i, a in attentions(model).items()}
    dtypes = {x.kv_cache_dtype for x in layers.values()}
    if not any(d.startswith("fp8") for d in dtypes):
        return None
    if not dtypes <= {"fp8", "fp8_e4m3"}:
        raise ModelError(f"its layers cache keys and values as {', '.join(sorted(dtypes))}")
    first = next(iter(layers.values()))
    backend = type(first.impl).__name__
    return CacheRecord(
        scales={i: (x._k_scale_float, x._v_scale_float) for i, x in layers.items()},
        queries={
            i: x._q_scale_float
            for i, x in layers.items()
            if getattr(x, "query_quant", None) is not None
        },
        cuts=backend == _CUTS,
        backend=f"{backend}, {first.isa}" if backend == _CUTS else backend,
    )
