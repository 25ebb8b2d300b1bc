"""What HF is asked for and the kernels do not support: a clear error, never another number."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_models import small_model, transformers, with_kernels
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported

IDS = torch.arange(8)[None]
CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()[None, None]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_is_served_passes(family: str) -> None:
    model = with_kernels(family)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        whole = model(IDS, attention_mask=torch.ones_like(IDS), use_cache=False).logits
        parts = [model(IDS[:, :5], past_key_values=cache).logits]
        parts.append(model(IDS[:, 5:], past_key_values=cache).logits)
    assert torch.cat(parts, 1).equal(whole)


def static(model: Any) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=16)


def subclass(model: Any) -> Any:
    class Subclass(transformers.DynamicCache):
        pass

    return Subclass()


@pytest.mark.parametrize(("made", "says"), [(static, "a StaticCache"), (subclass, "a Subclass")])
def test_another_cache_is_refused(made: Callable[[Any], Any], says: str) -> None:
    model = with_kernels()
    with pytest.raises(NotSupported, match=f"{says} is not supported"):
        model(IDS, past_key_values=made(model))


def test_generation_with_a_static_cache_is_refused() -> None:
    model = with_kernels()
    attention_mask = {"max_new_tokens": 2, "do_sample": False}
    assert model.generate(IDS, **attention_mask).shape == (1, 10)
    with pytest.raises(NotSupported, match="is not supported"):
        model.generate(IDS, cache_implementation="static", disable_compile=True, **attention_mask)


@pytest.mark.parametrize(
    "attention_mask",
    [
        CAUSAL,
        torch.zeros(1, 1, 8, 8),
        {"full_attention": CAUSAL},
        {"full_attention": torch.ones(1, 8, dtype=torch.int64)},
    ],
    ids=["bool 4D", "float 4D", "in a dict", "of integers, in a dict"],
)
def test_a_mask_made_by_the_caller_is_refused(attention_mask: Any) -> None:
    model = with_kernels("Qwen2" if isinstance(attention_mask, dict) else "Llama")
    with pytest.raises(
        NotSupported, match=r"an attention mask .* made by the caller, is not supported"
    ):
        model(IDS, attention_mask=attention_mask, use_cache=False)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(
        NotSupported, match=r"an attention mask \[1, 11\] is not supported for 8 keys"
    ):
        with_kernels()(IDS, attention_mask=torch.ones(1, 11), use_cache=False)


def test_bounds_of_sequences_are_held_to_positions_and_mask() -> None:
    """Of packed rows: where positions run on, or padding is hidden, they would be another pack."""
    model = with_kernels()
    anew, bounds = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]), torch.tensor([0, 5, 8]).int()
    with torch.no_grad():
        alone = [model(part, use_cache=False).logits for part in (IDS[:, :5], IDS[:, 5:])]
        for also in ({}, {"cu_seq_lens_k": bounds}, {"attention_mask": torch.ones_like(IDS)}):
            packed = {"position_ids": anew, "cu_seq_lens_q": bounds, "use_cache": False}
            assert model(IDS, **packed | also).logits.equal(torch.cat(alone, 1))
        # What lies behind the last sequence is of none.
        packed["cu_seq_lens_q"] = bounds[:2]
        assert model(IDS, **packed).logits[:, :5].equal(alone[0])
    padded = torch.ones_like(IDS)
    padded[0, 7] = 0
    elsewhere = torch.tensor([0, 4, 8]).int()
    for change, says in (
        ({"position_ids": None}, "does not begin sequences where position_ids start again"),
        ({"cu_seq_lens_q": elsewhere}, "does not begin sequences where position_ids start again"),
        ({"attention_mask": padded}, "cu_seq_lens_q and an attention mask with padding"),
    ):
        with pytest.raises(NotSupported, match=says):
            model(IDS, **packed | {"cu_seq_lens_q": bounds} | change)


def test_attention_that_is_not_causal_is_refused() -> None:
    model = small_model()
    model.config.is_causal = False
    with pytest.raises(NotSupported, match="is_causal=False"):
        hf.use_kernels(model)
    later = with_kernels()
    later.config.is_causal = False
    with pytest.raises(NotSupported, match="is_causal=False"):
        later(IDS, use_cache=False)
    for model in (with_kernels(), with_kernels()):
        model.model.layers[0].self_attn.is_causal = False
        with pytest.raises(NotSupported, match="is_causal=False"):
            model(IDS, use_cache=False)


def test_attention_by_another_name_is_refused() -> None:
    model = with_kernels()
    model.set_attn_implementation("sdpa")
    with pytest.raises(NotSupported, match="attn_implementation=sdpa was set after use_kernels"):
        model(IDS, use_cache=False)


def test_a_config_shared_with_a_model_without_kernels_is_refused() -> None:
    model = small_model()
    other = type(model)(model.config)
    hf.use_kernels(model)
    with pytest.raises(NotSupported, match="shares its config"):
        other(IDS, use_cache=False)


def test_a_part_of_a_head_that_rotates_is_refused() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(NotSupported, match=r"partial_rotary_factor=0\.5 is not supported"):
        hf.use_kernels(small_model(rope_parameters=rope))


PLACES = {
    "the model": "",
    "the model's decoder": "model",
    "layers.0": "model.layers.0",
    "layers.0.self_attn": "model.layers.0.self_attn",
    "layers.0.act": "model.layers.0.mlp",
    "layers.0.mlp_norm": "model.layers.0.post_attention_layernorm",
    "layers.0.q_rope": "model.rotary_emb",
}


def foreign(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise AssertionError("of another library")


@pytest.mark.parametrize("name", PLACES)
def test_a_class_of_another_library_is_refused(name: str) -> None:
    model = small_model()
    module = model.get_submodule(PLACES[name])
    stock = type(module)
    module.__class__ = type("Liger", (stock,), {"forward": foreign})
    with pytest.raises(NotSupported, match=rf"^{name} is a Liger whose forward is .*\.foreign"):
        hf.use_kernels(model)
    # A class that inherits its forward is no other.
    module.__class__ = type("Mine", (stock,), {})
    hf.use_kernels(model)


@pytest.mark.parametrize("name", [*PLACES, "layers.0.q_proj"])
def test_a_forward_replaced_in_an_object_is_refused(name: str) -> None:
    """As accelerate's hooks and the kernels of the hub do: it would hide ours."""
    model = small_model()
    place = PLACES.get(name, "model.layers.0.self_attn.q_proj")
    module = model.get_submodule(place)
    module.forward = types.MethodType(foreign, module)
    with pytest.raises(NotSupported, match=rf"the forward of {name} was replaced in this object"):
        hf.use_kernels(model)


def test_a_forward_patched_into_a_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries do before or after a model is loaded."""
    model = small_model()
    monkeypatch.setattr(type(model), "forward", foreign)
    with pytest.raises(NotSupported, match="the model is a LlamaForCausalLM whose forward is"):
        hf.use_kernels(model)


def test_a_rotation_patched_in_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take positions for cosines."""
    model = with_kernels()
    modeling = transformers.models.llama.modeling_llama
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, *_args: (q, k))
    with pytest.raises(NotSupported, match=r"apply_rotary_pos_emb of .*llama is .*lambda"):
        model(IDS, use_cache=False)


def test_a_weight_of_another_kind_is_refused() -> None:
    """As libraries quantise: the linear around it is torch's own."""

    class Quantised(torch.Tensor):
        pass

    model = small_model()
    stock = model.model.layers[0].mlp.up_proj
    stock.weight = torch.nn.Parameter(stock.weight.detach().as_subclass(Quantised))
    with pytest.raises(NotSupported, match=r"up_proj\.weight is a .*Quantised; only a plain"):
        hf.use_kernels(model)


def test_a_model_that_is_compiled_already_is_refused() -> None:
    with pytest.raises(NotSupported, match="replaced in this object"):
        hf.use_kernels(torch.compile(small_model()))


def test_what_is_left_to_the_engine_may_be_another_librarys() -> None:
    model = small_model()
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Liger", (type(mlp),), {"forward": foreign})
    hf.use_kernels(model, excluded=["act"])
