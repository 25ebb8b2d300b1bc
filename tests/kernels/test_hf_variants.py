"""Families with operators or orders of their own, in HF: the kernels compute what transformers'
code computes, to rounding, and each way to call a model gives one set of bits."""

from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.operators import check
from transformers import DynamicCache

IDS = torch.arange(50)[None] % 64
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
KINDS = ["sliding_attention", "full_attention"]
WINDOWS = {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": KINDS}
BY_KIND = {"sliding_attention": DEFAULT, "full_attention": YARN}
MULTIPLIERS = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    **{"attention_multiplier": 0.4, "logits_scaling": 6.0},
}
CAPS = {
    **{"head_dim": 32, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 0.5},
    "final_logit_softcapping": 1.0,
}
GEMMA3 = {"head_dim": 32, "query_pre_attn_scalar": 24, "rope_parameters": BY_KIND}
SPARSE = {
    **{"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 32, "intermediate_size": 32},
}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SeedOss": ({"head_dim": 32}, {"attention_out_bias": True}),
    "SmolLM3": ({"num_hidden_layers": 2, "no_rope_layers": [1, 0]}, {"no_rope_layers": [1, 1]}),
    "Olmo2": ({}, {"rms_norm_eps": 0.1}),
    "Olmo3": (WINDOWS | {"rope_parameters": BY_KIND}, {"layer_types": KINDS[::-1]}),
    "Exaone4": (WINDOWS | {"head_dim": 32, "sliding_window_pattern": 2}, {"sliding_window": 9}),
    "Granite": (MULTIPLIERS, {"logits_scaling": 5.0}),
    "Gemma": ({"head_dim": 32}, {"rms_norm_eps": 0.1}),
    "Gemma2": (WINDOWS | CAPS, {"final_logit_softcapping": 2.0}),
    "Gemma3": (WINDOWS | GEMMA3, {"query_pre_attn_scalar": 32}),
    "Qwen2Moe": (SPARSE | {"shared_expert_intermediate_size": 48}, {"norm_topk_prob": True}),
    "Olmoe": (SPARSE, {"norm_topk_prob": True}),
    "GraniteMoe": (MULTIPLIERS | SPARSE, {"residual_multiplier": 0.3}),
    "GptOss": (
        WINDOWS | {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3},
        {"swiglu_limit": 0.5},
    ),
    "Ministral3": (
        {"head_dim": 32, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.9}},
    ),
    "Ernie4_5_Moe": (
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        {"moe_k": 2},
    ),
    "MiniMaxM2": (
        {
            **{"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3},
            "intermediate_size": 32,
            "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5},
        },
        {"num_experts_per_tok": 2},
    ),
    "Arcee": ({"mlp_bias": True}, {"rms_norm_eps": 0.1}),
    "Starcoder2": ({"sliding_window": 8}, {"sliding_window": 9}),
    "Cohere2": (WINDOWS | {"head_dim": 32, "logit_scale": 0.3}, {"logit_scale": 0.5}),
    "HunYuanDenseV1": ({"head_dim": 32}, {"rms_norm_eps": 0.1}),
    "Glm": (
        {"head_dim": 32, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        {"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}},
    ),
    "Glm4": (
        {"head_dim": 32, "rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
        {"rope_parameters": DEFAULT | {"partial_rotary_factor": 1.0}},
    ),
}
"""Family -> its settings, and a change of one of them that changes its logits."""


def model_of(family: str, **changes: Any) -> Any:
    usual = {"rope_parameters": DEFAULT, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
    model = small_model(family, **usual | CHANGES[family][0] | changes).eval()
    model.set_attn_implementation("eager")  # sdpa ignores Gemma 2's cap
    # MiniMax-M2's corrections are buffers.
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.uniform_(value, 0.5, 1.5)
    return model


def logits_of(model: Any, ids: torch.Tensor = IDS, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False} | more).logits


@pytest.mark.parametrize("family", CHANGES)
def test_a_variant_is_that_of_transformers(family: str) -> None:
    model = model_of(family)
    stock = logits_of(model)
    with hf.use_kernels(model):
        ours = logits_of(model)
        assert torch.allclose(ours, stock, atol=2e-5)
        assert not check(hf.operators(model), ["logprob"]).not_replaced
        changed = model_of(family, **CHANGES[family][1])
        changed.load_state_dict(model.state_dict(), strict=False)
        hf.use_kernels(changed)
        assert not torch.allclose(logits_of(changed), stock, atol=2e-4)
    assert logits_of(model).equal(stock)


@pytest.mark.parametrize("family", CHANGES)
def test_a_cache_and_padding_give_the_bits_of_whole_rows(family: str) -> None:
    model = model_of(family)
    hf.use_kernels(model)
    whole, cache = logits_of(model), DynamicCache()
    cached = {"past_key_values": cache, "use_cache": True}
    parts = [logits_of(model, ids, **cached) for ids in (IDS[:, :30], IDS[:, 30:])]
    assert torch.cat(parts, 1).equal(whole)
    mask = torch.nn.functional.pad(torch.ones_like(IDS), (7, 0))
    rows = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    padded = logits_of(model, torch.nn.functional.pad(IDS, (7, 0)), **rows)
    assert padded[:, 7:].equal(whole)


@pytest.mark.parametrize("family", CHANGES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_of_the_models_logits(family: str, temperature: float) -> None:
    model = model_of(family).to(torch.bfloat16)
    hf.use_kernels(model)
    logits = model(IDS, use_cache=False).logits[0, :-1]
    expected = hf.token_logprobs(logits, IDS[0, 1:], temperature)
    scores, entropy = hf.score_tokens(model, IDS, temperature=temperature, return_entropy=True)
    assert scores[0].equal(expected)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    assert torch.allclose(entropy[0].double(), -(exact.exp() * exact).sum(-1), atol=1e-5)
    grads = [
        torch.autograd.grad(x.sum(), model.model.norm.weight, retain_graph=True)[0]
        for x in (scores, expected)
    ]
    assert torch.allclose(*grads, rtol=0.05, atol=1e-3)
    assert grads[0].any()


def test_noise_of_a_model_in_training_is_refused() -> None:
    hf.use_kernels(model_of("SeedOss"))
    with pytest.raises(ValueError, match="attention_dropout is not supported; set it to 0"):
        hf.use_kernels(model_of("SeedOss").train())
    with pytest.raises(ValueError, match="residual_dropout is not supported; set it to 0"):
        hf.use_kernels(model_of("SeedOss", attention_dropout=0.0).train())
