"""Latent attention in vLLM (MLA), absorbed in prefill and in decode.

vLLM's wrapper computes the products, norms and the rotation around it, by the classes of `layers`;
the attention inside writes normed latents and rotated keys into vLLM's cache, [blocks, P, L + R],
and reads them there in every pass. vLLM's own attention expands latents in a prefill, and its
backends pack the weight that expands them.

T = packed tokens of all requests   H = heads   N, R = features of a head without and with a
rotation   L = features of a latent   E = features of a head of v
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)
from vllm.model_executor.models.deepseek_v2 import DeepSeekV2FusedQkvAProjLinear
from vllm.v1.attention.backend import AttentionBackend

import rlk_kernels
from rlk_kernels.integrations import profile
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted, check_latent
from rlk_kernels.integrations.rotary import attention_factor
from rlk_kernels.integrations.vllm import config as settings
from rlk_kernels.integrations.vllm.ahead import expect_latent_attention
from rlk_kernels.integrations.vllm.attention import first, refuse
from rlk_kernels.integrations.vllm.attention_gpu import RlkMetadataBuilder
from rlk_kernels.integrations.vllm.layers import VllmLinear, VllmRotary


class RlkFusedQkvAProjLinear(VllmLinear, DeepSeekV2FusedQkvAProjLinear):
    """The product of both latents and of the key that is rotated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's kernel for few rows of DeepSeek-V3's shape has another order.
        self._use_min_latency_gemm = False


class RlkDeepseekScalingRotaryEmbedding(VllmRotary, DeepseekScalingRotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rlk_scales = {name: kwargs.get(name) for name in ("mscale", "mscale_all_dim")}
        super().__init__(*args, **kwargs)

    def _rope_parameters(self) -> dict[str, Any]:
        factor = attention_factor({"factor": self.scaling_factor, **self.rlk_scales})
        return {
            "rope_type": "yarn",
            "rope_theta": self.base,
            "factor": self.scaling_factor,
            "attention_factor": factor,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "original_max_position_embeddings": self.max_position_embeddings,
        }


class RlkLatentBackend(AttentionBackend):
    """What vLLM's runner asks of the backend of a layer; the layer itself attends."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the layer has an implementation already")

    @staticmethod
    def get_builder_cls() -> type[RlkMetadataBuilder]:
        return RlkMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **_more: Any
    ) -> tuple[int, ...]:
        return num_blocks, block_size, head_size


class RlkMLAAttention(Counted, MLAAttention):
    def get_attn_backend(self) -> type[RlkLatentBackend]:
        return RlkLatentBackend

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Keeps the weight that expands latents as it was loaded, and compiles the kernels."""
        # verl calls this after each update of the weights, outside of vLLM's configuration.
        config, weight = get_current_vllm_config_or_none(), self.kv_b_proj.weight
        if config is not None and weight.is_cuda:
            absorbed = profile.absorbed(weight.detach(), self.num_heads, self.qk_nope_head_dim)
            expect_latent_attention(absorbed, self.qk_rope_head_dim, act_dtype, config)

    def forward_impl(
        self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, *_: Any, **__: Any,
    ) -> Tensor:  # fmt: skip
        """Writes [T, H * E] to output, for q[T, H, N + R]. The metadata is None while vLLM warms
        up."""
        if attn_metadata is None:
            return output.zero_()
        self.count()
        if attn_metadata.causal is not True:
            raise NotSupported("only causal attention is supported")
        rows, unrotated = attn_metadata.num_actual_tokens, self.qk_nope_head_dim
        weight = profile.absorbed(self.kv_b_proj.weight, self.num_heads, unrotated)
        queries = first(q, rows)
        queries = profile.latent_queries(queries[..., :unrotated], queries[..., unrotated:], weight)
        out = profile.paged_latent_attention(
            queries, kv_cache, weight, attn_metadata.block_table, attn_metadata.seq_lens,
            attn_metadata.query_start_loc, self.scale,
        )  # fmt: skip
        first(output, rows).copy_(out.flatten(1))
        return output


def write_latents(latent: Tensor, key: Tensor, cache: Tensor, slots: Tensor, *_: Any) -> None:
    """Writes latent[T, L] and key[T, 1, R] into cache[blocks, P, L + R] at slots[T], where a
    negative slot is padding. There is no cache yet while vLLM warms up."""
    if not cache.numel():
        return
    rows = min(len(latent), len(slots))
    whole = torch.cat([first(latent, rows), first(key, rows).flatten(1)], -1)[:, None]
    # The operator writes keys and values of one width, here the halves of each row.
    halves = whole.chunk(2, -1), cache[:, :, None].chunk(2, -1)
    rlk_kernels.write_kv_cache(*halves[0], *halves[1], first(slots, rows))


class RlkMultiHeadLatentAttention(Counted, MultiHeadLatentAttentionWrapper):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings.prepare_config()
        check_latent(frozenset(settings.excluded()))
        super().__init__(*args, **kwargs)
        refuse(
            {
                "latent attention that chooses keys": bool(self.is_sparse),
                "a gate of latent attention": getattr(self, "g_proj", None) is not None,
                "an odd number of features of latents and keys": bool(
                    (self.kv_lora_rank + self.qk_rope_head_dim) % 2
                ),
            }
        )
        self.fuse_qkv_rmsnorm = False
        # vLLM has no registry for the attention inside, which writes the cache by `impl`.
        self.mla_attn.impl.do_kv_cache_update = write_latents
        self.mla_attn.__class__ = RlkMLAAttention

    def forward(self, positions: Tensor, hidden_states: Tensor, *args: Any) -> Tensor:
        self.count()
        if any(x is not None for x in args):
            raise NotSupported("a factor of queries in latent attention is not supported")
        return super().forward(positions, hidden_states)


CLASSES: dict[type, type] = {
    kind.__bases__[1]: kind
    for kind in (
        RlkFusedQkvAProjLinear,
        RlkDeepseekScalingRotaryEmbedding,
        RlkMultiHeadLatentAttention,
    )
}
"""vLLM's class -> the class that replaces it."""
