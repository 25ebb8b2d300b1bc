"""Checkpoints of fp8 in blocks in vLLM: a weight is dequantised once, as it is loaded, and the
kernels multiply by it in the model's dtype.

vLLM builds the method of a quantised linear by a class that a checkpoint's `quant_method` names.
Another class may be registered under that name, which this module does.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import quantization
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter

from rlk_kernels.block_fp8 import E4M3, dequantise
from rlk_kernels.integrations.errors import NotSupported

NAME = "fp8"
"""The `quant_method` of such a checkpoint."""
SCALE = "weight_scale_inv"


class RlkFp8Config(Fp8Config):
    """The settings of a checkpoint of fp8 in blocks. Raises NotSupported for any other fp8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.weight_block_size is None:
            raise NotSupported(
                "fp8 with one scale for each tensor is not supported: the kernels read fp8 in "
                "blocks, whose config.json has weight_block_size"
            )

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            skipped = is_layer_skipped(
                prefix=prefix,
                ignored_layers=self.ignored_layers,
                fused_mapping=self.packed_modules_mapping,
            )
            return UnquantizedLinearMethod() if skipped else DequantisedMethod(self, prefix)
        if isinstance(layer, VocabParallelEmbedding) or not hasattr(layer, "moe_config"):
            return None
        raise NotSupported(f"{prefix}: experts in fp8 are not supported")


class DequantisedMethod(LinearMethodBase):
    """Loads e4m3 values and scales, and leaves the weight that they stand for."""

    def __init__(self, config: RlkFp8Config, prefix: str) -> None:
        block = config.weight_block_size
        assert block is not None
        self.block, self.prefix, self._ignored = (block[0], block[1]), prefix, config.ignored_layers

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        rows, columns = self.block
        whole = sum(output_partition_sizes)
        if any(size % rows for size in output_partition_sizes[:-1]):
            raise NotSupported(
                f"{self.prefix}: fused weights of {output_partition_sizes} rows in blocks of "
                f"{rows} x {columns}: a block would have rows of two of them"
            )
        if (input_size_per_partition, whole) != (input_size, output_size):
            raise NotSupported(f"{self.prefix}: fp8 in blocks on several ranks is not supported")
        layer.weight_block_size = [rows, columns]
        self._dtype = params_dtype
        loader = {"input_dim": 1, "output_dim": 0, "weight_loader": attributes["weight_loader"]}
        values = torch.empty(whole, input_size, dtype=E4M3)
        layer.register_parameter("weight", ModelWeightParameter(data=values, **loader))
        # NaN: the scales of a weight without any stay so. vLLM's default dtype is the model's.
        count = -(-whole // rows), -(-input_size // columns)
        scales = torch.full(count, torch.nan, dtype=torch.float32)
        layer.register_parameter(SCALE, BlockQuantScaleParameter(data=scales, **loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        scales = getattr(layer, SCALE)
        if bool(scales.isnan().any()):
            raise NotSupported(f"{self.prefix}: {SCALE} is missing or NaN: {self._hint()}")
        whole = dequantise(layer.weight.data, scales.data, self._dtype, self.block)
        delattr(layer, SCALE)
        layer.weight = torch.nn.Parameter(whole, requires_grad=False)

    def _hint(self) -> str:
        parts = [entry for entry in self._ignored if entry and entry in self.prefix]
        if not parts:
            return "is the weight stored in fp8? config.json does not list it as not quantised"
        return (
            f"config.json lists {parts[0]!r} as not quantised, which is a part of this name and "
            "not the name of a module: did the quantiser match it as a substring?"
        )

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotSupported(f"{self.prefix} is in fp8, and its product is not the kernels'")


def register() -> None:
    """Makes vLLM read checkpoints of `quant_method` fp8 by the classes here."""
    quantization.register_quantization_config(NAME)(RlkFp8Config)


def unregister() -> None:
    """Makes vLLM read them by its own again."""
    quantization._CUSTOMIZED_METHOD_TO_QUANT_CONFIG.pop(NAME, None)
