"""Phi-3 in HF: one product computes q, k and v, and one computes gate and up."""

from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.frameworks import of_family
from rlk_kernels.integrations.operators import check

IDS = torch.arange(50)[None] % 64
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
SPLIT = {
    "self_attn.qkv_proj": (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)),
    "mlp.gate_up_proj": (("gate_proj", 64), ("up_proj", 64)),
}
"""Module of a layer -> the projections of Llama that its rows are, and their sizes."""


def phi3(**config: Any) -> Any:
    usual = {"rope_parameters": dict(DEFAULT), "pad_token_id": None}
    return small_model("Phi3", **usual | config)


def as_llama(model: Any) -> Any:
    """A Llama with the weights of a Phi-3."""
    weights = dict(model.state_dict())
    for path, parts in SPLIT.items():
        holder, _, _ = path.rpartition(".")
        rows = weights.pop(f"model.layers.0.{path}.weight").split([size for _, size in parts])
        for (op, _), part in zip(parts, rows, strict=True):
            weights[f"model.layers.0.{holder}.{op}.weight"] = part.clone()
    llama = small_model(rope_parameters=dict(DEFAULT), rms_norm_eps=model.config.rms_norm_eps)
    llama.load_state_dict(weights)
    return llama


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_products_have_the_bits_of_single_ones(dtype: torch.dtype) -> None:
    fused = phi3().to(dtype)
    single = as_llama(fused).to(dtype)
    for model in (fused, single):
        hf.use_kernels(model)
    logits = [model(IDS, use_cache=False).logits for model in (fused, single)]
    assert logits[0].equal(logits[1])
    assert not check(hf.operators(fused), ["logprob"]).not_replaced
    with torch.no_grad():
        # Planted: a weight of v_proj alone, whose rows are the last of the product.
        fused.model.layers[0].self_attn.qkv_proj.weight[-1, 0] += 1
        assert not fused(IDS, use_cache=False).logits.equal(logits[1])


def test_gradients_are_those_of_single_products() -> None:
    fused = phi3()
    single = as_llama(fused)
    for model in (fused, single):
        hf.use_kernels(model)
        hf.token_logprobs(model(IDS, use_cache=False).logits[0], IDS[0]).sum().backward()
    layers = [model.model.layers[0] for model in (fused, single)]
    for path, parts in SPLIT.items():
        holder, _, _ = path.rpartition(".")
        whole = layers[0].get_submodule(path).weight.grad
        rows = [layers[1].get_submodule(f"{holder}.{op}").weight.grad for op, _ in parts]
        assert torch.allclose(whole, torch.cat(rows), rtol=1e-4, atol=1e-6), path
    assert fused.lm_head.weight.grad.equal(single.lm_head.weight.grad)


def test_a_part_of_each_head_is_rotated() -> None:
    """A cache and padding, too, give the bits of whole rows."""
    rope = DEFAULT | {"partial_rotary_factor": 0.5}
    model, stock = (phi3(rope_parameters=dict(rope)).eval() for _ in range(2))
    hf.use_kernels(model)
    from transformers import DynamicCache

    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        assert torch.allclose(whole, stock(IDS, use_cache=False).logits, atol=1e-4)
        cache = DynamicCache()
        parts = [model(ids, past_key_values=cache).logits for ids in (IDS[:, :30], IDS[:, 30:])]
        padded = torch.nn.functional.pad(IDS, (7, 0))
        mask = torch.nn.functional.pad(torch.ones_like(IDS), (7, 0))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        moved = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert torch.cat(parts, 1).equal(whole)
    assert moved[:, 7:].equal(whole)


@pytest.mark.parametrize("op", ["k_proj", "up_proj"])
def test_an_operator_of_a_product_is_not_excluded_alone(op: str) -> None:
    with pytest.raises(NotSupported, match=rf"^{op} cannot be excluded alone in phi3, which"):
        hf.use_kernels(phi3(), excluded=[op])
    hf.use_kernels(small_model(), excluded=[op])


def test_a_whole_product_is_excluded() -> None:
    model = phi3()
    products = ["q_proj", "k_proj", "v_proj", "act"]
    hf.use_kernels(model, excluded=products)
    own = check(hf.operators(model), products, called=False).not_replaced
    assert own == tuple(f"layers.0.{op}" for op in products)


def test_settings_without_a_kernel_are_refused() -> None:
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    longrope = DEFAULT | factors | {"rope_type": "longrope"}
    longrope |= {"original_max_position_embeddings": 32}
    with pytest.raises(NotSupported, match="rope_type=longrope is not supported: its frequencies"):
        hf.use_kernels(phi3(rope_parameters=longrope, original_max_position_embeddings=32))
    with pytest.raises(NotSupported, match="resid_pdrop is not supported"):
        hf.use_kernels(phi3(resid_pdrop=0.1).train())
    hf.use_kernels(phi3(resid_pdrop=0.1).eval())


def test_a_framework_that_copies_weights_refuses_fused_ones() -> None:
    (reason,) = of_family(phi3())
    assert reason.startswith("model_type=phi3: its checkpoint fuses projections")
    assert of_family(small_model()) == []
