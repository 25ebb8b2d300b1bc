"""Gated delta nets in vLLM: the layer, its attention backend, and the models, which say to vLLM's
allocator what a sequence keeps.

Beside vLLM's two states of a layer, the raw rows of the convolution and the state, a slot has the
rows of the open chunk: k, u and G. So the state moves at the same rows in each pass. vLLM copies
whole slots, for a cached prefix too.

What reads the batch's metadata is behind vLLM's own operator, at which its compiler splits a graph.
CUDA graphs of decode steps contain it: nothing there is read by the host, and what the kernels read
of a batch is in buffers that the builder fills before each step.

Ranks share the heads: each has whole heads of q and k, and those of v that belong to them.

T = packed tokens of all requests   F = features of q, k and v
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_utils import (
    get_conv_copy_spec,
    get_temporal_copy_spec,
)
from vllm.model_executor.models.qwen3_next import Qwen3NextAttention, Qwen3NextForCausalLM
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.delta_nets import DeltaNetCore
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted, check_delta_net
from rlk_kernels.integrations.vllm import config as settings
from rlk_kernels.integrations.vllm.layers import VllmLinear


def state_shapes(config: Any, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a slot of each rank keeps, by config.json: of the convolution, the state,
    and k, u and G of the open chunk. Raises NotSupported if the ranks cannot share the heads."""
    if config.linear_num_key_heads % ranks:
        raise NotSupported(
            f"linear_num_key_heads={config.linear_num_key_heads}, which {ranks} ranks do not divide"
        )
    heads = config.linear_num_key_heads // ranks
    value_heads = config.linear_num_value_heads // ranks
    dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    features = 2 * heads * dim + value_heads * value_dim
    return (
        (config.linear_conv_kernel_dim - 1, features),
        (value_heads, dim, value_dim),
        (profile.DELTA_CHUNK, heads, dim),
        (profile.DELTA_CHUNK, value_heads, value_dim),
        (profile.DELTA_CHUNK, value_heads),
    )


def state_dtypes(model: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of `state_shapes`, for a model's dtype."""
    return model, torch.float32, model, model, torch.float32


class _KeepsWeight(UnquantizedLinearMethod):
    """Keeps the weight of the convolution, which vLLM packs for its kernel on CPUs."""

    def process_weights_after_loading(self, layer: Any) -> None:
        return


class RlkMetadataBuilder(GDNAttentionMetadataBuilder):
    """Also says how many tokens of each request are before its new rows, in a buffer that a CUDA
    graph may read."""

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        requests = max(vllm_config.scheduler_config.max_num_seqs, self.decode_cudagraph_max_bs)
        self.rlk_context = torch.zeros(requests, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any):
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        new = common.query_start_loc[: requests + 1].diff()
        metadata.rlk_context = self.rlk_context[:requests]
        torch.sub(common.seq_lens[:requests], new, out=metadata.rlk_context)
        return metadata


class RlkGDNBackend(GDNAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[RlkMetadataBuilder]:
        return RlkMetadataBuilder


class RlkRMSNormGated(Counted, RMSNormGated):
    """The norm of each head times silu of a gate. A model whose norm is another one is not
    supported."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.activation != "silu":
            raise NotSupported(f"output_gate_type={self.activation} is not supported")
        if self.group_size is not None or not self.norm_before_gate:
            raise NotSupported("a gated norm of groups, or of the product, is not supported")

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """[T, Hv, E]."""
        self.count()
        return profile.gated_norm(x, z, self.weight, self.eps)


class RlkQwenGatedDeltaNetAttention(DeltaNetCore, QwenGatedDeltaNetAttention):
    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings.prepare_config()
        check_delta_net(frozenset(settings.excluded()))
        super().__init__(config, vllm_config, *args, **kwargs)
        self.rlk_config = config
        for product in (self.in_proj_qkvz, self.in_proj_ba, self.out_proj):
            if not isinstance(product, VllmLinear):
                raise NotSupported(
                    "gate_proj, up_proj and o_proj cannot be excluded in a model with gated delta "
                    "nets, whose products have the same classes"
                )
        self.conv1d.quant_method = _KeepsWeight()

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return state_shapes(self.rlk_config, self.tp_size)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return state_dtypes(self.model_config.dtype)

    def get_attn_backend(self) -> type[RlkGDNBackend]:
        return RlkGDNBackend

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.count()
        products, ba = self.in_proj_qkvz(hidden_states)[0], self.in_proj_ba(hidden_states)[0]
        if self.gqa_interleaved_layout:
            q, k, v, z, b, a = self.fix_query_key_value_ordering(products, ba)
            mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        else:
            values = self.value_dim // self.tp_size
            mixed, z = products.split([products.shape[-1] - values, values], -1)
            z = z.unflatten(-1, (-1, self.head_v_dim))
            b, a = ba.chunk(2, -1)
        # Zeros: rows that pad the batch are not written.
        core = mixed.new_zeros(z.shape)
        torch.ops.vllm.qwen_gdn_attention_core(mixed, b, a, core, _encode_layer_name(self.prefix))
        return self.out_proj(self.norm(core, z).flatten(1))[0]

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Writes the rows of the batch to core_attn_out[T, Hv, E]. vLLM's operator calls it."""
        every = get_forward_context().attn_metadata
        if every is None:  # vLLM warms up
            return
        metadata = every[self.prefix]
        rows, requests = metadata.num_actual_tokens, metadata.num_decodes + metadata.num_prefills
        conv, *chunks = self.kv_cache
        kept = profile.Kept(
            conv, tuple(chunks), metadata.non_spec_state_indices_tensor[:requests],
            metadata.rlk_context[:requests],
        )  # fmt: skip
        net = profile.DeltaNet(
            self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias,
            self.num_k_heads // self.tp_size, self.num_v_heads // self.tp_size, self.head_k_dim,
        )  # fmt: skip
        bounds = metadata.non_spec_query_start_loc[: requests + 1]
        core_attn_out[:rows] = self.rlk_core(
            net, mixed_qkv[:rows], a[:rows], b[:rows], bounds, kept
        )


class RlkGatedAttention(Counted):
    """Attention with a gate."""

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        self.count()
        q, k, v, gate = self._project_qkv_gate(self.qkv_proj(hidden_states)[0], positions)
        return self.o_proj(profile.gate(self.attn(q, k, v), gate))[0]


class RlkQwen3NextAttention(RlkGatedAttention, Qwen3NextAttention):
    """vLLM has no registry for this layer, but it has one for the model."""


class Hybrid:
    """What a model with gated delta nets changes in vLLM's own."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not settings.is_excluded("attn_gate"):
            for attention in self.rlk_gated():
                attention.__class__ = RlkQwen3NextAttention
                attention.use_fused_qk_norm_rope_gate = False

    def rlk_gated(self) -> Iterator[Any]:
        return (
            module
            for module in self.modules()
            if type(module) is Qwen3NextAttention and module.attn_output_gate
        )

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: Any) -> tuple[tuple[int, ...], ...]:
        ranks = vllm_config.parallel_config.tensor_parallel_size
        return state_shapes(vllm_config.model_config.hf_text_config, ranks)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: Any) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config.model_config.dtype)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_conv_copy_spec, *[get_temporal_copy_spec] * 4)


class RlkQwen3NextForCausalLM(Hybrid, Qwen3NextForCausalLM):
    def set_moe_parameters(self) -> None:
        """vLLM's own raises for a model without sparse layers."""
        if any(hasattr(layer.mlp, "experts") for layer in self.model.layers):
            super().set_moe_parameters()
