"""Models with gated delta nets in HF: the kernels compute what transformers' code computes, to
rounding, each way to call a model gives one set of bits, and what is not there is refused."""

from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import check

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
USUAL: dict[str, Any] = {
    **{"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "head_dim": 32},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "rope_parameters": ROPE},
    **{"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0},
}
SPARSE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
}
EVERY_SPARSE = {name: value for name, value in SPARSE.items() if name != "mlp_only_layers"}
FAMILIES = {"Qwen3Next": SPARSE, "Qwen3_5": {}, "Qwen3_5Moe": EVERY_SPARSE}
IDS = torch.randint(0, 64, (1, 70), generator=torch.Generator().manual_seed(1))
OTHER = IDS.flip(1)[:, :33]


def model_of(family: str) -> Any:
    model = small_model(family, **USUAL | FAMILIES[family]).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith("A_log"):
            # Slow decays: transformers' gradient of a fast one is noise, in float64 too, because
            # its rule computes in fp32.
            torch.nn.init.uniform_(parameter, -4.0, -1.0)
    return model


@pytest.fixture(params=FAMILIES)
def family(request: Any) -> str:
    return request.param


def logits(model: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, **how).logits


def test_the_kernels_compute_what_the_model_does(family: str) -> None:
    model = model_of(family)
    plain = logits(model, IDS)
    handle = hf.use_kernels(model)
    actual = logits(model, IDS)
    check(hf.operators(model) | {"logprob": None}, ("logprob",))
    assert 0 < float((actual - plain).abs().max()) < 1e-4
    handle.close()
    assert torch.equal(logits(model, IDS), plain)


def test_each_way_to_call_a_model_gives_one_set_of_bits(family: str) -> None:
    model = model_of(family).bfloat16()
    hf.use_kernels(model)
    whole, other = logits(model, IDS), logits(model, OTHER)
    assert torch.equal(logits(model, IDS[:, :50]), whole[:, :50])
    both = torch.cat([OTHER, IDS], 1)
    positions = torch.cat([torch.arange(33), torch.arange(70)])[None]
    assert torch.equal(logits(model, both, position_ids=positions)[:, 33:], whole)
    cu = torch.tensor([0, 33, 103], dtype=torch.int32)
    named = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "position_ids": positions}
    assert torch.equal(logits(model, both, **named)[:, 33:], whole)
    for side in (0, 1):
        padding = torch.zeros(1, 37, dtype=torch.long)
        row = torch.cat([OTHER, padding] if side else [padding, OTHER], 1)
        mask = torch.ones(2, 70, dtype=torch.long)
        mask[1] = torch.arange(70) < 33 if side else torch.arange(70) >= 37
        at = (mask.cumsum(-1) - 1).clamp(min=0)
        out = logits(model, torch.cat([IDS, row]), attention_mask=mask, position_ids=at)
        assert torch.equal(out[:1], whole)
        assert torch.equal(out[1:][mask[1:].bool()], other[0])


def test_a_model_shows_its_inner_values_and_computes_on_with_changed_ones(family: str) -> None:
    """In the order of the given rows, also where the kernels compute them in another order."""
    model = model_of(family).bfloat16()
    hf.use_kernels(model)
    net, attention = model.model.layers[0].linear_attn, model.model.layers[1].self_attn

    def shown(ids: torch.Tensor, change: str = "", **how: Any) -> tuple[dict[str, Any], Any]:
        values: dict[str, Any] = {}

        def show(operator: str, value: torch.Tensor) -> None:
            values[operator] = value.clone()
            if operator == change:
                value.zero_()

        net.rlk_show = attention.rlk_show = show
        return values, logits(model, ids, **how)

    alone, whole = shown(OTHER)
    assert set(alone) == {"decay", "beta", "conv", "attn"}
    padded = torch.cat([torch.zeros(1, 37, dtype=torch.long), OTHER], 1)
    mask = torch.stack([torch.ones(70, dtype=torch.long), (torch.arange(70) >= 37).long()])
    at = (mask.cumsum(-1) - 1).clamp(min=0)
    both, _ = shown(torch.cat([IDS, padded]), attention_mask=mask, position_ids=at)
    for operator, value in alone.items():
        assert torch.equal(both[operator].reshape(140, -1)[107:], value.reshape(33, -1)), operator
    for operator in alone:
        assert not torch.equal(shown(OTHER, operator)[1], whole), operator
    assert torch.equal(shown(OTHER)[1], whole)


def test_gradients_are_those_of_transformers_and_repeat(family: str) -> None:
    model = model_of(family)

    def gradients(score: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        score().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def plain() -> torch.Tensor:
        z = model(IDS, use_cache=False).logits[0, :-1].log_softmax(-1)
        return z.gather(-1, IDS[0, 1:, None]).sum()

    expected = gradients(plain)
    hf.use_kernels(model)
    found = gradients(lambda: hf.score_tokens(model, IDS).sum())
    again = gradients(lambda: hf.score_tokens(model, IDS).sum())
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, again[name]), name
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert bool(error <= 1e-3), name


def test_what_is_not_there_is_refused(family: str) -> None:
    model = model_of(family)
    with pytest.raises(NotSupported, match="delta cannot be excluded in a model with gated delta"):
        hf.use_kernels(model, ["delta"])
    with pytest.raises(NotSupported, match="attn and attn_gate cannot be excluded alone"):
        hf.use_kernels(model, ["attn"])
    hf.use_kernels(model)
    with pytest.raises(NotSupported, match="a cache of a gated delta net is not supported"):
        model(IDS, use_cache=True)
    positions = torch.cat([torch.arange(33), torch.arange(37)])[None]
    mask = torch.ones_like(IDS)
    mask[:, -3:] = 0
    with pytest.raises(NotSupported, match="positions start again inside a row"):
        logits(model, IDS, attention_mask=mask, position_ids=positions)


def test_a_layer_that_hides_the_positions_is_noticed(monkeypatch: Any) -> None:
    """Without them two packed sequences share a state."""
    model = model_of("Qwen3_5").bfloat16()
    hf.use_kernels(model)
    both = torch.cat([OTHER, IDS], 1)
    positions = torch.cat([torch.arange(33), torch.arange(70)])[None]
    layer = type(model.model.layers[0])
    kind = layer.__bases__[0]
    monkeypatch.setattr(
        kind, "forward",
        lambda self, *args, position_ids=None, **named: super(kind, self).forward(
            *args, position_ids=position_ids, **named
        ),
    )  # fmt: skip
    assert not torch.equal(logits(model, both, position_ids=positions)[:, 33:], logits(model, IDS))


def test_positions_of_images_are_refused() -> None:
    model = model_of("Qwen3_5")
    hf.use_kernels(model)
    positions = torch.arange(70).expand(4, 1, 70).clone()
    assert torch.equal(logits(model, IDS, position_ids=positions), logits(model, IDS))
    positions[2, 0, 5:9] = 5
    with pytest.raises(NotSupported, match="positions of images"):
        logits(model, IDS, position_ids=positions)
