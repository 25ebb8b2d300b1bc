"""The attention backend on CPUs. It overrides the only backend of vLLM's CPU platform."""

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import KVCacheLayout

from rlk_kernels.integrations.vllm.attention import VllmAttention, refuse


class RlkCPUAttentionImpl(VllmAttention, CPUAttentionBackendImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, *args, **kwargs
        )
        self.rlk_window, self.rlk_softcap = sliding_window, self.logits_soft_cap or None
        refuse(
            {
                "ALiBi": alibi_slopes is not None,
                f"attention of type {self.attn_type}": self.attn_type != "decoder",
                "a quantised KV cache": self.is_fp8_kv_cache,
                "keys shared between layers": self.kv_sharing_target_layer_name is not None,
            }
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        # The metadata is None while vLLM warms up.
        if attn_metadata is not None:
            self.attend(query, kv_cache, attn_metadata, output)
        return output


class RlkCPUAttentionBackend(CPUAttentionBackend):
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16"]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @staticmethod
    def get_impl_cls() -> type[RlkCPUAttentionImpl]:
        return RlkCPUAttentionImpl
