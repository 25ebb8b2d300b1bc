"""A GPTModel of megatron-core with random weights, for the benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

DEVICE = torch.device("cuda")


@contextmanager
def parallel(tp: int) -> Iterator[None]:
    """megatron-core's state for so many tensor-parallel ranks of those that torch has."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    if DEVICE.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def gpt_model(
    shape: dict[str, Any], length: int, kernels: bool, *, tp: int = 1, sequence: bool = False
) -> Any:
    """Of a config.json's settings, in bf16, with megatron-core's local spec or with the kernels;
    `sequence`: sequence parallel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from rlk_kernels.integrations import megatron

    norms = shape["model_type"] == "qwen3"
    config = TransformerConfig(
        num_layers=shape["num_hidden_layers"], hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"], kv_channels=shape["head_dim"],
        ffn_hidden_size=shape["intermediate_size"], normalization="RMSNorm",
        layernorm_epsilon=shape["rms_norm_eps"], gated_linear_unit=True, qk_layernorm=norms,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp, sequence_parallel=sequence,
        use_cpu_initialization=DEVICE.type == "cpu",
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(qk_layernorm=norms, normalization="RMSNorm")
    plain = TransformerBlockSubmodules([layer] * config.num_layers, WrappedTorchNorm)
    rope = shape["rope_parameters"]
    model = GPTModel(
        config, megatron.layer_spec(config) if kernels else plain, shape["vocab_size"], length,
        position_embedding_type="rope", rotary_base=rope["rope_theta"],
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    if kernels:
        model = megatron.use_kernels(model, rope)
    return model.to(device=DEVICE, dtype=torch.bfloat16).train()


def causal_mask(length: int) -> Tensor:
    """bool [1, 1, S, S]: what a position does not see."""
    return torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)[None, None]


def cut(whole: Tensor, parameter: Tensor, rank: int, tp: int) -> Tensor:
    """What a rank has of a whole parameter, or of its gradient."""
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    if parameter.partition_dim == 1:
        return whole.chunk(tp, 1)[rank]
    # Operators that are fused stand side by side, each with the rows of all ranks.
    return whole.unflatten(0, (parameter.partition_stride, tp, -1))[:, rank].flatten(0, 1)


def fill(model: Any, rank: int, tp: int) -> None:
    """Random weights that are the same for every number of ranks: of a parameter's name."""
    for name, parameter in model.named_parameters():
        size = list(parameter.shape)
        if tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            size[parameter.partition_dim] *= tp
        generator = torch.Generator(DEVICE).manual_seed(crc32(name.encode()))
        whole = torch.randn(size, generator=generator, device=DEVICE).mul_(0.02)
        whole += parameter.dim() == 1
        parameter.data.copy_(cut(whole, parameter, rank, tp))
