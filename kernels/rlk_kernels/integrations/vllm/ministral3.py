"""Ministral 3, whose queries vLLM multiplies by a factor of their position only if config.json
states it under another key than transformers."""

from typing import Any

from torch import Tensor
from vllm.model_executor.models.mistral import MistralAttention, MistralForCausalLM

from rlk_kernels.integrations import profile
from rlk_kernels.integrations.vllm import config


class RlkMistralAttention(MistralAttention):
    def _get_llama_4_attn_scale(self, positions: Tensor) -> Tensor:
        how = self.llama_4_scaling_beta, self.llama_4_scaling_original_max_position_embeddings
        return profile.query_scale(positions, *how, self.qkv_proj.weight.dtype)[..., None]


class RlkMinistral3ForCausalLM(MistralForCausalLM):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if config.is_excluded("attn"):
            return
        text = vllm_config.model_config.hf_text_config
        beta, context = profile.temperature_of(text.rope_parameters)
        for layer in self.model.layers:
            attention = layer.self_attn
            attention.__class__ = RlkMistralAttention
            attention.do_llama_4_scaling = True
            attention.llama_4_scaling_beta = beta
            attention.llama_4_scaling_original_max_position_embeddings = context
