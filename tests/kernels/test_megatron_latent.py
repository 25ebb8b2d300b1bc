"""Latent attention of the integration into Megatron-core, in one process: beside megatron-core's
own, which expands the latents; packed, padded and alone; and what is refused."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gloo_ranks import only_rank_of_megatron
from rlk_kernels.integrations import megatron
from rlk_kernels.integrations.errors import NotSupported

pytest.importorskip("megatron.core")

ROPE = {"rope_type": "default", "rope_theta": 10000}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000, "factor": 4.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "original_max_position_embeddings": 8,
}
OF_YARN = {
    **{"rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "original_max_position_embeddings": 8,
}


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[None]:
    """megatron-core's process-wide state, of one rank on a CPU."""
    from rlk_align.engines.megatron.cpu import cpu_stand_ins, latent_stand_ins

    with only_rank_of_megatron(), cpu_stand_ins(), latent_stand_ins():
        yield


def config(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    usual: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "ffn_hidden_size": 48,
        "q_lora_rank": 24, "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8,
        "v_head_dim": 12, "kv_channels": 12, "rope_type": "rope", "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "use_cpu_initialization": True, "rotary_scaling_factor": 1.0,
    }  # fmt: skip
    return MLATransformerConfig(**usual | more)


def model(asked: Any, spec: Any) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(0)
    made = GPTModel(asked, spec, 64, 32, position_embedding_type="rope")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def made(asked: Any, rope: dict[str, Any] = ROPE, excluded: tuple[str, ...] = ()) -> Any:
    spec = megatron.layer_spec(asked, excluded)
    return megatron.use_kernels(model(asked, spec), rope, excluded)


def stock(asked: Any) -> Any:
    """megatron-core's own modules, around the tool's core."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from rlk_align.engines.megatron.attention import LatentCore

    spec = get_gpt_layer_local_spec(
        qk_layernorm=True, multi_latent_attention=True, normalization="RMSNorm"
    )
    spec.submodules.self_attention.submodules.core_attention = LatentCore
    return model(asked, spec)


IDS = torch.arange(5, 17)[None]
AT = torch.arange(12)[None]
HIDDEN = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]


@pytest.mark.parametrize(
    ("rope", "more"), [(ROPE, {}), (YARN, OF_YARN), (ROPE, {"q_lora_rank": None})]
)
def test_the_absorbed_order_computes_what_the_expanded_one_does(
    rope: dict[str, Any], more: dict[str, Any]
) -> None:
    """In fp32, up to the order of sums; with another scale of the scores they part."""
    ours, other = made(config(**more), rope), stock(config(**more))
    other.load_state_dict(ours.state_dict())
    with torch.no_grad():
        expected = other.double()(IDS, AT, HIDDEN)
        actual = ours(IDS, AT, HIDDEN)
        assert torch.allclose(actual.double(), expected, rtol=1e-4, atol=1e-4)
        other.decoder.layers[0].self_attention.core_attention.softmax_scale *= 1.1
        assert not torch.allclose(other(IDS, AT, HIDDEN), expected, rtol=1e-4, atol=1e-4)
    megatron.check(megatron.operators(ours))


def test_a_row_has_the_same_bits_packed_padded_and_alone() -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    ours = made(config())
    alone = ours(IDS, AT, None)[0]
    short = ours(IDS[:, :7], AT[:, :7], None)[0]
    assert short.equal(alone[:7])
    both = torch.cat([IDS, IDS[:, :7]], 1)
    cu = torch.tensor([0, 12, 19], dtype=torch.int32)
    pack = PackedSeqParams("thd", cu, cu, max_seqlen_q=12, max_seqlen_kv=12)
    packed = ours(both, torch.cat([AT, AT[:, :7]], 1), None, packed_seq_params=pack)[0]
    assert packed[:12].equal(alone)
    assert packed[12:].equal(short)
    mask = HIDDEN.expand(2, 1, 12, 12).clone()
    mask[1, :, 7:] = mask[1, :, :, 7:] = True
    padded = ours(IDS.expand(2, 12), AT.expand(2, 12), mask)
    assert padded[0].equal(alone)
    assert padded[1, :7].equal(short)
    mask[0, :, :, :3] = True
    with pytest.raises(NotSupported, match="padding before a sequence is not supported"):
        ours(IDS.expand(2, 12), AT.expand(2, 12), mask)


def test_an_excluded_product_stays_megatron_cores() -> None:
    ours = made(config(), excluded=("q_a", "kv_a_norm"))
    named = megatron.operators(ours)
    assert type(named["layers.0.q_a"]).__module__.startswith("megatron.core")
    assert type(named["layers.0.kv_a"]).__module__.startswith("rlk_kernels")
    ours(IDS, AT, None)
    megatron.check(named, ("q_a", "kv_a_norm"))
    with pytest.raises(NotSupported, match=r"the engine still computes layers\.0\.q_a"):
        megatron.check(named)
    with pytest.raises(NotSupported, match="latent_attn cannot be excluded"):
        made(config(), excluded=("latent_attn",))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
        ({"softmax_scale": 0.1}, "softmax_scale=0.1"),
        ({"add_bias_linear": True}, "add_bias_linear=True"),
        ({"cache_mla_latents": True}, "cache_mla_latents=True"),
        (
            {"tensor_model_parallel_size": 2, "qk_layernorm": True},
            "qk_layernorm with multi_latent_attention with tensor_model_parallel_size=2",
        ),
        ({"tensor_model_parallel_size": 2, "q_lora_rank": 25}, "q_lora_rank=25"),
        ({"tensor_model_parallel_size": 2, "kv_lora_rank": 31}, "qk_pos_emb_head_dim=39"),
    ],
)
def test_what_latent_attention_does_not_compute_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(NotSupported, match=says):
        megatron.layer_spec(config(**more))


@pytest.mark.parametrize(
    ("rope", "says"),
    [
        ({"rope_theta": 500}, "rotary_base=10000"),
        (YARN, "rope_type=rope"),
        (YARN | {"factor": 8.0}, "rotary_scaling_factor=1.0"),
    ],
)
def test_a_rope_that_the_config_contradicts_is_refused(rope: dict[str, Any], says: str) -> None:
    with pytest.raises(NotSupported, match=says):
        made(config(), rope)


def test_every_option_of_this_megatron_is_named() -> None:
    from rlk_kernels.integrations.megatron import limits

    names = [option.name for option in dataclasses.fields(config())]
    assert [name for name in names if not limits.is_listed(name)] == []
    assert set(limits.SUPPORTED_WITH_LATENTS) <= set(names)


def test_a_model_without_use_kernels_is_refused() -> None:
    bare = model(config(), megatron.layer_spec(config()))
    with pytest.raises(NotSupported, match=r"call use_kernels\(model\)"):
        bare(IDS, AT, None)
