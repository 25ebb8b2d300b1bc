"""A GPTModel of megatron-core with random weights, for the benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

DEVICE = torch.device("cuda")


def initialize(tp: int) -> None:
    """Initializes megatron-core's state for `tp` tensor-parallel ranks."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


@contextmanager
def parallel(tp: int) -> Iterator[None]:
    """A context in which `initialize(tp)` is in force."""
    from megatron.core import parallel_state

    initialize(tp)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def expert_settings(shape: dict[str, Any]) -> dict[str, Any]:
    """The settings of TransformerConfig that a sparse shape adds; none for a dense shape."""
    if "num_experts" not in shape:
        return {}
    return {
        "num_moe_experts": shape["num_experts"],
        "moe_router_topk": shape["num_experts_per_tok"],
        "moe_ffn_hidden_size": shape["moe_intermediate_size"],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }


def expert_spec(shape: dict[str, Any], experts: str) -> dict[str, Any]:
    """The arguments of the local layer spec for plain experts."""
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router reads it, and it is TransformerEngine's
    grouped = experts == "grouped"
    if grouped and grouped_gemm_util.grouped_gemm is None:
        ops = SimpleNamespace(gmm=grouped_mm)
        grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = SimpleNamespace(ops=ops), ops
    return {
        "num_experts": shape.get("num_experts"),
        "moe_grouped_gemm": grouped,
        "moe_use_legacy_grouped_gemm": grouped,
    }


def grouped_mm(a: Tensor, b: Tensor, counts: Tensor, trans_b: bool = False) -> Tensor:
    """`grouped_gemm.ops.gmm` by torch: a[S, K] in groups of rows, b[E, K, N]; counts: int64 [E]."""
    ends = counts.to(a.device).cumsum(0, dtype=torch.int32)
    return torch._grouped_mm(a, b.mT if trans_b else b, offs=ends)


def gpt_model(
    shape: dict[str, Any],
    length: int,
    kernels: bool,
    *,
    tp: int = 1,
    sequence: bool = False,
    experts: str = "sequential",
) -> Any:
    """A GPTModel by the settings of a config.json, in bf16, with megatron-core's local spec or with
    the kernels. sequence: sequence parallelism; experts: `sequential` or `grouped`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from rlk_kernels.integrations import megatron

    norms = shape["model_type"] in ("qwen3", "qwen3_moe")
    config = TransformerConfig(
        num_layers=shape["num_hidden_layers"], hidden_size=shape["hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_query_groups=shape["num_key_value_heads"], kv_channels=shape["head_dim"],
        ffn_hidden_size=shape["intermediate_size"], normalization="RMSNorm",
        layernorm_epsilon=shape["rms_norm_eps"], gated_linear_unit=True, qk_layernorm=norms,
        activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp, sequence_parallel=sequence,
        **expert_settings(shape),
    )  # fmt: skip
    layer = get_gpt_layer_local_spec(
        qk_layernorm=norms, normalization="RMSNorm", **expert_spec(shape, experts)
    )
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
    """bool [1, 1, S, S]: True where a position must not attend to another."""
    return torch.ones(length, length, dtype=torch.bool, device=DEVICE).triu(1)[None, None]


def cut(whole: Tensor, parameter: Tensor, rank: int, tp: int) -> Tensor:
    """A rank's shard of a whole parameter, or of its gradient."""
    if tp == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return whole
    if parameter.partition_dim == 1:
        return whole.chunk(tp, 1)[rank]
    # Fused operators lie side by side, each with the rows of all ranks.
    return whole.unflatten(0, (parameter.partition_stride, tp, -1))[:, rank].flatten(0, 1)


def fill(model: Any, rank: int, tp: int) -> None:
    """Sets random weights, seeded by the parameters' names: the same for any number of ranks."""
    for name, parameter in model.named_parameters():
        size = list(parameter.shape)
        if tp > 1 and getattr(parameter, "tensor_model_parallel", False):
            size[parameter.partition_dim] *= tp
        generator = torch.Generator(DEVICE).manual_seed(crc32(name.encode()))
        whole = torch.randn(size, generator=generator, device=DEVICE).mul_(0.02)
        whole += parameter.dim() == 1
        parameter.data.copy_(cut(whole, parameter, rank, tp))
