"""PEFT's adapters in a model of transformers with the kernels: the profile's operator computes
them, gradients are those of A and B, and what has another formula is refused."""

from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf, profile
from rlk_kernels.integrations.errors import NotSupported

peft = pytest.importorskip("peft")

IDS = torch.arange(24).view(2, 12)
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLACE = "model.layers.0.mlp.down_proj"


def adapted(model: Any, rank: int = 4, name: str = "default", **settings: Any) -> Any:
    """The model with an adapter of random factors around its projections; PEFT's model."""
    usual: dict[str, Any] = {"lora_alpha": 3.0, "target_modules": PROJECTIONS}
    config = peft.LoraConfig(r=rank, init_lora_weights=False, **usual | settings)
    torch.manual_seed(rank)
    if hasattr(model, "peft_config"):
        model.add_adapter(name, config)
        return model
    return peft.get_peft_model(model, config, name)


def with_adapter(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    model = small_model().to(dtype)
    adapted(model, **settings).eval()
    hf.use_kernels(model)
    return model


def scores(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return hf.score_tokens(model, IDS)


def test_each_projection_has_the_bits_of_the_profile() -> None:
    model = with_adapter()
    layer, rows = model.get_submodule(PLACE), torch.randn(9, 64).to(torch.bfloat16)
    with torch.no_grad():
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert a.dtype == torch.float32  # as PEFT keeps them
        base = profile.linear(rows, layer.base_layer.weight)
        wanted = profile.add_lora(base, rows, a[None], b[None], torch.tensor([0.75]))
        assert torch.equal(layer(rows), wanted)
        assert not torch.equal(wanted, base)
    before = scores(model)
    found = hf.check(hf.operators(model))
    assert len([name for name in found.replaced if name.endswith(".lora")]) == 7
    # A and B count as rounded.
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    assert torch.equal(scores(model), before)


def test_gradients_are_those_of_the_factors_and_repeat() -> None:
    model = with_adapter()
    factors = [p for name, p in model.named_parameters() if ".lora_" in name]
    assert len(factors) == 14

    def gradients() -> list[torch.Tensor]:
        loss = hf.score_tokens(model, IDS).mean()
        return list(torch.autograd.grad(loss, factors))

    one, other = gradients(), gradients()
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    assert all(x.dtype == torch.float32 and bool(x.any()) for x in one)
    exact = small_model().double()
    adapted(exact)
    # The values that are computed with.
    exact.load_state_dict({k: v.to(torch.bfloat16) for k, v in model.state_dict().items()})
    logits = exact(IDS, use_cache=False).logits[:, :-1].log_softmax(-1)
    loss = logits.gather(-1, IDS[:, 1:, None]).mean()
    truths = [p for name, p in exact.named_parameters() if ".lora_" in name]
    for value, truth in zip(one, torch.autograd.grad(loss, truths), strict=True):
        error = (value.double() - truth).norm() / truth.norm()
        assert float(error) < 0.03


def test_an_adapter_that_is_switched_off_leaves_the_bits_of_the_model() -> None:
    plain = small_model().to(torch.bfloat16).eval()
    hf.use_kernels(plain)
    model = small_model().to(torch.bfloat16).eval()
    wrapped = adapted(model)
    handle = hf.use_kernels(model)
    assert not torch.equal(scores(model), scores(plain))
    with wrapped.disable_adapter():
        assert torch.equal(scores(model), scores(plain))
    handle.close()
    layer = model.get_submodule(PLACE)
    assert type(layer) is peft.tuners.lora.Linear
    assert type(layer.lora_A["default"]) is type(layer.base_layer) is torch.nn.Linear


def test_the_active_one_of_two_adapters_is_computed() -> None:
    model = small_model().to(torch.bfloat16).eval()
    wrapped = adapted(model)
    adapted(wrapped, rank=2, name="second")
    hf.use_kernels(model)
    first = scores(model)
    wrapped.set_adapter("second")
    assert torch.equal(scores(model), scores(with_adapter(rank=2)))
    assert not torch.equal(scores(model), first)
    wrapped.base_model.set_adapter(["default", "second"])
    with pytest.raises(NotSupported, match=r"several active adapters \(default, second\)"):
        scores(model)


def test_an_adapter_that_comes_later_is_refused_until_it_has_the_kernels() -> None:
    model = small_model().to(torch.bfloat16).eval()
    hf.use_kernels(model)
    adapted(model)
    with pytest.raises(NotSupported, match=r"layers\.0\.q_proj\.lora is now a peft.*Linear"):
        scores(model)
    hf.use_kernels(model)
    assert torch.equal(scores(model), scores(with_adapter()))


def test_a_second_adapter_that_comes_later_is_refused_too() -> None:
    model = small_model().to(torch.bfloat16).eval()
    wrapped = adapted(model)
    hf.use_kernels(model)
    adapted(wrapped, rank=2, name="second").set_adapter("second")
    with pytest.raises(NotSupported, match="the adapter second came later: call use_kernels again"):
        scores(model)
    hf.use_kernels(model)
    assert torch.equal(scores(model), scores(with_adapter(rank=2)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "an adapter of DoraLinearVariant"),
        ({"lora_bias": True}, "an adapter with a bias"),
        ({"target_modules": [*PROJECTIONS, "lm_head"]}, r"logits is a peft.*only a torch\.nn\.L"),
    ],
)
def test_another_formula_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(NotSupported, match=words):
        with_adapter(**settings)


def test_dropout_of_an_adapter_is_refused_while_the_model_trains() -> None:
    model = with_adapter(lora_dropout=0.1)
    assert bool(scores(model).isfinite().all())
    with pytest.raises(NotSupported, match="dropout of an adapter while the model trains"):
        scores(model.train())


def test_adapters_by_row_are_refused() -> None:
    model = small_model().to(torch.bfloat16).eval()
    wrapped = adapted(model).eval()
    hf.use_kernels(model)
    with pytest.raises(NotSupported, match="adapter_names"):
        wrapped(IDS, use_cache=False, adapter_names=["default", "__base__"])


def test_pefts_own_model_is_refused_by_what_to_pass() -> None:
    wrapped = adapted(small_model().to(torch.bfloat16))
    with pytest.raises(NotSupported, match=r"PeftModel is not supported; .*its get_base_model\(\)"):
        hf.use_kernels(wrapped)
    hf.use_kernels(wrapped.get_base_model())


def test_adapters_of_a_sparse_model_are_refused() -> None:
    small = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = small_model("Qwen3Moe", head_dim=32, **small).to(torch.bfloat16).eval()
    adapted(model, target_modules=["q_proj", "v_proj"])
    with pytest.raises(NotSupported, match="adapters of a model with sparse layers"):
        hf.use_kernels(model)
