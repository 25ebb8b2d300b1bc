"""Parts of the integration into HF transformers."""

import pytest
import torch
from rlk_kernels.integrations import hf

transformers = pytest.importorskip("transformers")


ROPE = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8,
}  # fmt: skip


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, rope_parameters=dict(ROPE),
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_a_model_that_is_cast_later_keeps_exact_frequencies() -> None:
    """As trainers do (verl: `module.to(dtype)`): angles of frequencies in bf16 are others."""
    ids = torch.arange(50)[None]
    late, early = small_model(), small_model().to(torch.bfloat16)
    hf.use_kernels(late)
    late.to(torch.bfloat16)
    early.model.rotary_emb.float()
    hf.use_kernels(early)
    assert late.model.rotary_emb.inv_freq.dtype == torch.float32
    assert late.lm_head.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert late(ids, use_cache=False).logits.equal(early(ids, use_cache=False).logits)


def test_frequencies_outlast_a_model_without_memory() -> None:
    """As trainers make it on all ranks but the first: on the meta device, then empty."""
    with torch.device("meta"):
        model = small_model()
    hf.use_kernels(model)
    model.to_empty(device="cpu")
    whole = small_model()
    hf.use_kernels(whole)
    assert model.model.rotary_emb.inv_freq.equal(whole.model.rotary_emb.inv_freq)


def test_the_scaling_is_that_of_the_live_module_until_the_kernels_are_out() -> None:
    ids, model = torch.arange(50)[None], small_model()
    own = model.model.rotary_emb.attention_scaling
    undo = hf.use_kernels(model)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        model.model.rotary_emb.attention_scaling = 1.0
        assert not model(ids, use_cache=False).logits.equal(before)
        model.model.rotary_emb.attention_scaling = own
        assert model(ids, use_cache=False).logits.equal(before)
    undo.close()
    assert model.model.rotary_emb.attention_scaling == own
