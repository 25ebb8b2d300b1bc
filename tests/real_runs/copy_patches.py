"""Patches of live models whose forward computes with copies of weights from before the last update:
`patch=copy_patches:NAME`."""

from typing import Any

import torch
from torch.nn.functional import linear


def _older(weight: torch.Tensor) -> torch.Tensor:
    """The weight before an update that changed one column."""
    older = weight.detach().clone()
    older[:, 5] *= 1.25
    return older


def vllm_head(model: Any) -> None:
    """vLLM packs the head's weight when it loads a model; an update in place leaves the copy."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head, current = model.lm_head, model.lm_head.weight.detach().clone()
    head.weight.data.copy_(_older(current))
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
    head.weight.data.copy_(current)


def vllm_linear(model: Any) -> None:
    """vLLM packs a projection's weight and empties the parameter."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    module = model.model.layers[1].self_attn.o_proj
    identity = torch.eye(module.input_size, dtype=module.params_dtype)
    older = _older(module.quant_method.apply(module, identity).T)
    module.weight = torch.nn.Parameter(older, requires_grad=False)
    dispatch_cpu_unquantized_gemm(module, remove_weight=True)


def sglang_head(model: Any) -> None:
    """A head that keeps its weight in float32."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod

    class CachedHead(UnquantizedEmbeddingMethod):
        copy = _older(model.lm_head.weight).float()

        def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            return linear(x.float(), self.copy, bias)

    model.lm_head.quant_method = CachedHead()


def sglang_linear(model: Any) -> None:
    """A projection that keeps its weight transposed."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    module = model.model.layers[1].self_attn.o_proj

    class CachedLinear(UnquantizedLinearMethod):
        copy = _older(module.weight).T.contiguous()

        def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
            return linear(x, self.copy.T, bias)

    module.quant_method = CachedLinear()
