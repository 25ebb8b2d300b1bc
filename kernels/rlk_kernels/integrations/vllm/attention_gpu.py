"""The attention backend on GPUs, under `CUSTOM`, vLLM's name for backends of other packages.

It was run with vLLM 0.26; the code for 0.32 follows vLLM's source and was not run. `attention.py`
describes the cache: 0.26 asks for its shape and the order of its strides, 0.32 for layouts.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

import rlk_kernels
from rlk_kernels.integrations.schedules import Schedules
from rlk_kernels.integrations.vllm.ahead import (
    Sizes,
    compile_attention,
    expect_attention,
    sizes_of,
)
from rlk_kernels.integrations.vllm.attention import VllmAttention, refuse


@dataclass
class Metadata:
    """The metadata of a batch, which all layers share."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    sizes: Sizes
    num_decode_tokens: int | None = None
    """Read by vLLM's attention over latents, which needs it for context parallelism alone."""
    schedules: Schedules = field(default_factory=Schedules)


class RlkMetadataBuilder(AttentionMetadataBuilder[Metadata]):
    # Tests show that graphs of decode steps replay correctly; there are none for mixed batches.
    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.sizes = sizes_of(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Metadata:
        common = common_attn_metadata
        requests = common.num_reqs
        return Metadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc[: requests + 1],
            seq_lens=common.seq_lens[:requests],
            block_table=common.block_table_tensor[:requests],
            slot_mapping=common.slot_mapping,
            causal=common.causal is True,
            sizes=self.sizes,
        )

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        # Cascade attention sums a shared prefix separately, which is another order of the sum.
        return False


class RlkAttentionImpl(VllmAttention, AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **more: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.rlk_window = kv_cache_dtype, sliding_window
        self.rlk_softcap, self.sinks = logits_soft_cap or None, sinks
        self.rlk_compiled = False
        refuse(
            {
                "ALiBi": alibi_slopes is not None,
                f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
                "a quantised KV cache": kv_cache_dtype not in ("auto", "bfloat16", "float16"),
                "keys shared between layers": kv_sharing_target_layer_name is not None,
            }
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        # verl calls this after each update of the weights, outside of vLLM's configuration.
        if config := get_current_vllm_config_or_none():
            expect_attention(
                self.num_heads, self.num_kv_heads, self.head_size, act_dtype, self.rlk_window,
                self.rlk_softcap, config,
            )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        # The metadata is None while vLLM profiles its memory.
        if attn_metadata is None:
            return output.zero_()
        if not self.rlk_compiled:
            self.rlk_compiled = compile_attention(
                query, *self.keys_and_values(kv_cache), attn_metadata.block_table, self.rlk_window,
                self.rlk_softcap, attn_metadata.sizes,
            )  # fmt: skip
        self.attend(query, kv_cache, attn_metadata, output)
        return output

    def schedule(self, metadata: Metadata, *call: Tensor) -> rlk_kernels.Schedule | None:
        return metadata.schedules.of(self, self.rlk_window, self.rlk_softcap, *call)


class RlkAttentionBackend(AttentionBackend):
    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RlkAttentionImpl]:
        return RlkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RlkMetadataBuilder]:
        return RlkMetadataBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *_: Any, **_more: Any
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(*_: Any, **_more: Any) -> tuple[int, ...]:
        return 0, 2, 1, 3

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        return "NHD"

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBNHC,)
