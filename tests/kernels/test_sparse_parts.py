"""Sparse layers in HF and Megatron-core: the same bits and gradients, and what is refused."""

from typing import Any

import pytest
import torch
from hf_models import small_model
from rlk_kernels.integrations import hf, megatron
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.megatron.sparse import Stacked
from rlk_kernels.integrations.operators import ROUTED, SHARED
from test_megatron_parts import AT, IDS, config, made, state  # noqa: F401 (a fixture)

EXPERTS, TOP_K, INNER = 4, 2, 24
REFUSED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "expert_tensor_parallel_size": 2, "tensor_model_parallel_size": 2,
    "moe_token_dispatcher_type": "flex",
}  # fmt: skip
"""Option -> a value that is not supported; True for the others."""


def sparse_config(**more: Any) -> Any:
    usual = {
        "num_layers": 2, "num_moe_experts": EXPERTS, "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": INNER, "moe_layer_freq": [0, 1],
        "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    return config(**usual | more)


def hf_model(**more: Any) -> Any:
    usual = {
        "hidden_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "head_dim": 16,
        "moe_intermediate_size": INNER, "norm_topk_prob": True,
    }  # fmt: skip
    return small_model("Qwen3Moe", **usual | more)


def glm_model(**more: Any) -> Any:
    usual = {
        "hidden_size": 32, "n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K,
        "head_dim": 16, "moe_intermediate_size": INNER, "first_k_dense_replace": 0, "n_group": 2,
        "topk_group": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }  # fmt: skip
    model = small_model("Glm4Moe", **usual | more)
    for layer in model.model.layers:
        layer.mlp.gate.e_score_correction_bias.uniform_(-0.2, 0.2)
    return model


CORRECTED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_dtype": "fp32",
    "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 2 * INNER,
}  # fmt: skip
"""What the model above is for Megatron-core."""


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The sparse layers of HF and of Megatron, with one set of weights in bf16."""
    kind = request.param
    theirs = glm_model() if kind == "corrected" else hf_model(norm_topk_prob=kind == "softmax-of-k")
    hf.use_kernels(theirs.to(torch.bfloat16))
    block = theirs.model.layers[0].mlp
    more = CORRECTED if kind == "corrected" else {"moe_router_pre_softmax": kind == "of-all"}
    layer = made(sparse_config(**more)).to(torch.bfloat16).decoder.layers[1].mlp
    with torch.no_grad():
        layer.router.weight.copy_(block.gate.weight)
        for e, expert in enumerate(layer.experts.local_experts):
            expert.linear_fc1.weight.copy_(block.experts.gate_up_proj[e])
            expert.linear_fc2.weight.copy_(block.experts.down_proj[e])
        if kind == "corrected":
            layer.router._maintain_float32_expert_bias()
            layer.router.expert_bias.copy_(block.gate.e_score_correction_bias)
            shared, fc1 = block.shared_experts, layer.shared_experts.linear_fc1
            fc1.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
            layer.shared_experts.linear_fc2.weight.copy_(shared.down_proj.weight)
    return block, layer


@pytest.mark.parametrize("pair", ["softmax-of-k", "of-all", "corrected"], indirect=True)
def test_hf_and_megatron_have_the_same_bits_and_gradients(pair: tuple[Any, Any]) -> None:
    block, layer = pair
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(3, 7, 32, generator=generator).to(torch.bfloat16) for _ in range(2))
    left, right = x.clone().requires_grad_(), x.transpose(0, 1).clone().requires_grad_()
    y, (z, bias) = block(left), layer(right)
    assert bias is None
    assert torch.equal(y, z.transpose(0, 1))
    y.backward(grad)
    # Sums over tokens are by token: in the order in which an engine lays them out.
    z.backward(grad.transpose(0, 1))
    if layer.shared_experts is None:
        # HF computes the shared experts' gate and up apart, and adds up two rounded gradients.
        assert torch.equal(left.grad, right.grad.transpose(0, 1))
    experts = layer.experts.local_experts
    for e in range(EXPERTS):
        assert torch.equal(block.experts.gate_up_proj.grad[e], experts[e].linear_fc1.weight.grad)
        assert torch.equal(block.experts.down_proj.grad[e], experts[e].linear_fc2.weight.grad)
    assert torch.equal(block.gate.weight.grad, layer.router.weight.grad)
    assert bool(layer.router.weight.grad.any())
    if layer.shared_experts is not None:
        halves = layer.shared_experts.linear_fc1.weight.grad.chunk(2)
        assert torch.equal(block.shared_experts.gate_proj.weight.grad, halves[0])
        assert torch.equal(block.shared_experts.up_proj.weight.grad, halves[1])


def test_megatron_counts_the_tokens_that_it_corrects_its_scores_by() -> None:
    layer = made(sparse_config(**CORRECTED)).decoder.layers[1].mlp
    x, padding = torch.randn(7, 3, 32), torch.zeros(3, 7, dtype=torch.bool)
    padding[0, 5:] = True
    with torch.no_grad():
        layer(x)
    assert not bool(layer.router.local_tokens_per_expert.any())
    layer(x, padding_mask=padding)
    assert layer.router.local_tokens_per_expert.sum() == TOP_K * (21 - 2)


def test_stacked_weights_are_a_copy_only_where_something_moved_them() -> None:
    model = made(sparse_config()).to(torch.bfloat16)
    weights = [e.linear_fc1.weight for e in model.decoder.layers[1].mlp.experts.local_experts]
    grad = torch.randn(len(weights), *weights[0].shape).to(torch.bfloat16)

    def stacked() -> tuple[torch.Tensor, list[torch.Tensor]]:
        whole = Stacked.apply(*weights)
        assert torch.equal(whole, torch.stack(weights))
        return whole.detach(), list(torch.autograd.grad(whole, weights, grad))

    whole, grads = stacked()
    assert whole.data_ptr() == weights[0].data_ptr()
    assert all(map(torch.equal, grads, grad))
    with torch.no_grad():
        weights[2].mul_(2)
    assert torch.equal(whole[2], weights[2])
    model.to(torch.bfloat16)
    assert stacked()[0].data_ptr() == whole.data_ptr()
    moved = [weights[1].data, weights[0].data.clone(), *(w.data for w in weights[2:])]
    for w, data in zip(weights, moved, strict=True):
        w.data = data
    whole, grads = stacked()
    assert whole.data_ptr() not in {w.data_ptr() for w in weights}
    assert all(map(torch.equal, grads, grad))
    model.float()
    assert stacked()[0].data_ptr() == weights[0].data_ptr()


@pytest.mark.parametrize(
    ("changes", "parameter", "sites"),
    [({}, "router", ROUTED), (CORRECTED, "shared_experts", ROUTED | SHARED)],
)
def test_a_model_of_dense_and_sparse_layers_trains(
    changes: dict[str, Any], parameter: str, sites: set[str]
) -> None:
    model = made(sparse_config(**changes))
    ids = torch.arange(24).view(2, 12)
    model(ids, AT.expand(2, 12), None, labels=ids.flip(1)).mean().backward()
    assert all(bool(p.grad.any()) for n, p in model.named_parameters() if parameter in n)
    named = megatron.operators(model)
    megatron.check(named)
    assert {f"layers.1.{op}" for op in sites} <= named.keys()
    assert "layers.0.router" not in named


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_router_enable_expert_bias": False}, "sigmoid without moe_router_enable_expert_bias"),
        ({"moe_router_topk": 1}, "sigmoid with moe_router_topk=1"),
        ({"moe_router_topk": 3}, "moe_router_group_topk=1 with moe_router_topk=3"),
        ({"moe_router_score_function": "softmax"}, "moe_router_num_groups=2 of a softmax"),
    ],
)
def test_routers_that_megatron_computes_otherwise_are_refused(
    changes: dict[str, Any], said: str
) -> None:
    asked = sparse_config(**CORRECTED)
    for name, value in changes.items():
        setattr(asked, name, value)
    with pytest.raises(NotSupported, match=said):
        megatron.layer_spec(asked)


def test_a_router_that_is_read_in_bf16_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlk_kernels.integrations import profile

    model = hf_model().to(torch.bfloat16)
    hf.use_kernels(model)
    ids = torch.arange(60)[None]
    honest, router = model(ids).logits, profile.router
    monkeypatch.setattr(profile, "router", lambda x, *rest: router(x, *rest).to(x.dtype).float())
    assert not torch.equal(model(ids).logits, honest)


MODELS = {
    "Qwen3Moe": hf_model,
    "Mixtral": lambda: small_model("Mixtral", num_local_experts=3, head_dim=32),
    "Glm4Moe": glm_model,
}


@pytest.mark.parametrize("family", MODELS)
def test_the_kernels_come_out_of_a_sparse_model(family: str) -> None:
    model = MODELS[family]()
    kind, ids = type(model.model.layers[0].mlp.experts), torch.arange(20)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with hf.use_kernels(model):
            said = model(ids, use_cache=False, output_router_logits=True)
            hf.check(hf.operators(model), called=False)
        assert type(model.model.layers[0].mlp.experts) is kind
        assert torch.equal(model(ids, use_cache=False).logits, before)
    assert bool(((said.logits - before).abs() < 1e-3).all())
    assert said.router_logits[0].dtype == torch.float32


def test_what_a_sparse_config_asks_for_and_is_not_served_is_refused_by_name() -> None:
    from rlk_kernels.integrations.megatron import limits

    for name in limits.SUPPORTED_IF_SPARSE:
        asked = sparse_config()
        setattr(asked, name, REFUSED.get(name, True))
        with pytest.raises(NotSupported, match=f"{name}="):
            megatron.layer_spec(asked)
        # A dense model has no use for it.
        if name.startswith("moe_"):
            dense = config()
            setattr(dense, name, REFUSED.get(name, True))
            megatron.layer_spec(dense)


def test_what_is_not_served_is_refused() -> None:
    with pytest.raises(
        NotSupported, match="act, moe_out cannot be excluded in a model with sparse layers"
    ):
        megatron.layer_spec(sparse_config(), excluded=("act", "moe_out"))
    with pytest.raises(NotSupported, match="router cannot be excluded"):
        hf.use_kernels(hf_model(), ("router",))
    training = made(sparse_config(moe_z_loss_coeff=1e-3)).train()
    with pytest.raises(NotSupported, match="router_z_loss"):
        training(IDS, AT, None)
    jitter = small_model(
        "Mixtral", num_local_experts=3, head_dim=32, router_jitter_noise=0.1
    ).train()
    with pytest.raises(NotSupported, match="router_jitter_noise"):
        hf.use_kernels(jitter)
    patched = hf_model()
    patched.model.layers[0].mlp.forward = lambda x: x
    with pytest.raises(NotSupported, match=r"layers\.0\.mlp was replaced"):
        hf.use_kernels(patched)
    scaled = hf_model()
    scaled.model.layers[0].mlp.experts.act_fn = torch.nn.ReLU()
    with pytest.raises(NotSupported, match="act_fn is a ReLU"):
        hf.use_kernels(scaled)
