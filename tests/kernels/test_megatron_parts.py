"""Parts of the integration into Megatron-core: windows, the stages of a pipeline, and what is
refused."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gloo_ranks import only_rank_of_megatron
from rlk_kernels.integrations import megatron
from rlk_kernels.integrations.errors import NotSupported

pytest.importorskip("megatron.core")

IDS = torch.arange(5, 17)[None]
AT = torch.arange(12)[None]


@pytest.fixture(scope="module", autouse=True)
def state() -> Iterator[None]:
    """megatron-core's process-wide state, of one rank on a CPU."""
    from rlk_align.engines.megatron.cpu import cpu_stand_ins

    with only_rank_of_megatron(), cpu_stand_ins():
        yield


def config(**more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    usual: dict[str, Any] = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 1,
        "kv_channels": 16, "ffn_hidden_size": 48, "normalization": "RMSNorm",
        "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
    }  # fmt: skip
    return TransformerConfig(**usual | more)


def made(
    asked: Any, vp_stage: int | None = None, rope: dict[str, Any] | None = None, **more: Any
) -> Any:
    from megatron.core.models.gpt import GPTModel

    torch.manual_seed(0)
    spec = megatron.layer_spec(asked, vp_stage=vp_stage)
    also = {"position_embedding_type": "rope", "vp_stage": vp_stage}
    model = GPTModel(asked, spec, 64, 32, **also | more)
    return megatron.use_kernels(model, rope or {"rope_theta": 10000})


def reached(asked: Any) -> list[int]:
    """The rows whose logits follow the first token."""
    model, other = made(asked), IDS.clone()
    other[0, 0] = 60
    with torch.no_grad():
        rows = [model(ids, AT, None)[0] for ids in (IDS, other)]
    return (rows[0] != rows[1]).any(-1).nonzero().flatten().tolist()


def test_a_window_counts_the_keys_before_a_query() -> None:
    assert reached(config()) == list(range(12))
    assert reached(config(window_size=(4, 0))) == list(range(5))
    # Every second layer sees all, and the first is none of them.
    assert reached(config(window_size=(4, 0), window_attn_skip_freq=2)) == list(range(5))
    assert reached(config(window_size=(4, 0), window_attn_skip_freq=[0])) == list(range(12))


@pytest.mark.parametrize("size", [(4, 1), (-1, 0), (4, -1)])
def test_a_window_behind_a_query_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(NotSupported, match=r"window_size=\(.*\) is not supported"):
        made(config(window_size=size))


def test_each_virtual_stage_is_its_own_layers() -> None:
    """Of four layers on two ranks this one, the first, has layers 1 and 3; the second stage is made
    with the model's end too."""
    windows = {"window_size": (4, 0), "window_attn_skip_freq": [0, 0, 1, 0]}
    whole = made(config(num_layers=4, **windows))
    states: list[torch.Tensor] = []
    for layer in whole.decoder.layers:
        layer.register_forward_hook(lambda _module, _inputs, out: states.append(out[0].detach()))
    with torch.no_grad():
        whole(IDS, AT, None)
        logits = whole.output_layer(whole.decoder.final_layernorm(states[2]))[0]
    pipeline = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    asked = config(num_layers=4, pipeline_dtype=torch.float32, **pipeline, **windows)
    first = made(asked, 0, pre_process=True, post_process=False)
    second = made(asked, 1, pre_process=False, post_process=True)
    assert [layer.layer_number for layer in first.decoder.layers] == [1]
    assert [layer.layer_number for layer in second.decoder.layers] == [3]
    first.embedding.load_state_dict(whole.embedding.state_dict())
    second.output_layer.load_state_dict(whole.output_layer.state_dict())
    for stage, number in ((first, 0), (second, 2)):
        stage.decoder.layers[0].load_state_dict(whole.decoder.layers[number].state_dict())
    with torch.no_grad():
        assert first(IDS, AT, None).equal(states[0])
        second.set_input_tensor(states[1])
        assert second(None, AT, None).transpose(0, 1).equal(logits)
    names = {name.rpartition(".")[0] for name in megatron.operators(second)}
    assert names == {"layers.2", ""}
    assert set(megatron.operators(first)) & {"embed", "final_norm", "logits"} == {"embed"}
    for stage in (first, second):
        megatron.check(megatron.operators(stage))


def test_the_loss_of_labels_is_of_our_log_probs() -> None:
    model = made(config())
    ids = torch.arange(24).view(2, 12)
    loss = model(ids, AT.expand(2, 12), None, labels=ids.flip(1))
    logits = model(ids, AT.expand(2, 12), None)
    assert loss.shape == (2, 12)
    actual = megatron.token_logprobs(logits.flatten(0, 1), ids.flip(1).flatten())
    assert loss.equal(-actual.view(2, 12))
    loss.mean().backward()
    assert bool(model.output_layer.weight.grad.any())


def test_log_probs_from_hidden_states_have_the_bits_of_logits() -> None:
    """Padded behind, packed, of a padded vocabulary, at a temperature."""
    from megatron.core.packed_seq_params import PackedSeqParams

    model = made(config())
    ids, labels = torch.arange(24).view(2, 12), torch.arange(24).flip(0).view(2, 12)
    at = AT.expand(2, 12)
    logits = model(ids, at, None).flatten(0, 1)
    logprobs, entropy = megatron.score_tokens(model, ids, at, None, labels, return_entropy=True)
    assert logprobs.flatten().equal(megatron.token_logprobs(logits, labels.flatten()))
    exact = torch.log_softmax(logits.double(), -1)
    assert ((entropy.flatten() + (exact.exp() * exact).sum(-1)).abs() < 1e-5).all()
    cu = torch.tensor([0, 12, 24]).int()
    ends = PackedSeqParams(
        qkv_format="thd", max_seqlen_q=12, max_seqlen_kv=12, cu_seqlens_q=cu, cu_seqlens_kv=cu
    )
    packed = megatron.score_tokens(
        model, ids.view(1, 24), None, None, labels.view(1, 24), packed_seq_params=ends
    )
    assert packed.view(2, 12).equal(logprobs)
    warm = megatron.score_tokens(model, ids, at, None, labels, temperature=0.7)
    assert warm.flatten().equal(megatron.token_logprobs(logits, labels.flatten(), 0.7))
    cut = megatron.score_tokens(model, ids, at, None, labels, vocabulary=50)
    assert cut.flatten().equal(megatron.token_logprobs(logits[:, :50], labels.flatten()))
    (logprobs.sum() + entropy.sum()).backward()
    assert bool(model.output_layer.weight.grad.any())


REFUSED: dict[str, Any] = {
    "hybrid_context_parallel": True, "normalization": "LayerNorm",
    "gated_linear_unit": False, "activation_func": torch.nn.functional.gelu,
    "softmax_type": "learnable", "attention_dropout": 0.1, "hidden_dropout": 0.1,
    "glu_linear_offset": 1.0, "transformer_impl": "inference_optimized", "fp8": "e4m3",
    "fp4": "e2m1", "activation_func_clamp_value": 7.0, "mtp_num_layers": 1,
    "no_rope_freq": [0, 1], "experimental_attention_variant": "dsa", "linear_attention_freq": 2,
    "mrope_section": [4, 2, 2], "quant_recipe": object(),
}  # fmt: skip
"""Option -> a value that is not supported; True for the others."""


def test_every_option_of_this_megatron_is_named() -> None:
    from rlk_kernels.integrations.megatron import limits

    names = [option.name for option in dataclasses.fields(config())]
    assert len(names) > 200
    assert [name for name in names if not limits.is_listed(name)] == []
    assert set(limits.SUPPORTED_VALUES) <= set(names)
    assert limits.SUPPORTED_VALUES.keys() >= REFUSED.keys()


def test_what_the_config_asks_for_and_is_not_served_is_refused_by_name() -> None:
    from rlk_kernels.integrations.megatron import limits

    for name in limits.SUPPORTED_VALUES:
        asked = config()
        setattr(asked, name, REFUSED.get(name, True))
        with pytest.raises(NotSupported, match=f"what is not supported: {name}="):
            megatron.layer_spec(asked)


def test_a_hidden_size_that_ranks_cannot_share_is_refused() -> None:
    asked = config()
    asked.tensor_model_parallel_size = 3
    with pytest.raises(NotSupported, match="hidden_size=32 with tensor_model_parallel_size=3"):
        megatron.layer_spec(asked)


def test_an_option_that_is_not_known_is_refused_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rlk_kernels.integrations.megatron import limits

    monkeypatch.setattr(limits, "WITHOUT_EFFECT", tuple(set(limits.WITHOUT_EFFECT) - {"test_mode"}))
    megatron.layer_spec(config())
    with pytest.raises(NotSupported, match="test_mode=True, which is unknown"):
        megatron.layer_spec(config(test_mode=True))


def test_an_option_of_a_class_of_ones_own_is_its_own_business() -> None:
    @dataclasses.dataclass
    class Mine(type(config())):  # type: ignore[misc]
        rotary_base: int = 10000

    asked = Mine(**{f.name: getattr(config(), f.name) for f in dataclasses.fields(config())})
    asked.rotary_base = 5
    megatron.layer_spec(asked)


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"position_embedding_type": "none"}, "position_embedding_type=none"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type=learned"),
        ({"rotary_percent": 0.5}, r"rotary_percent=0\.5"),
        ({"rotary_base": 500000}, "rotary_base=500000"),
        ({"rope": {"rope_type": "default"}}, "rotary_base=10000"),
        ({"rope_scaling": True}, "rope_scaling"),
        ({"seq_len_interpolation_factor": 2.0}, r"seq_len_interpolation_factor=2\.0"),
        (
            {"seq_len_interpolation_factor": 2.0, "rope": LLAMA3},
            r"seq_len_interpolation_factor=2\.0",
        ),
    ],
)
def test_a_rope_that_the_parameters_do_not_say_is_refused(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(NotSupported, match=f"made with {says}"):
        made(config(), **options)


def test_a_rope_that_the_parameters_say_is_served() -> None:
    linear = {"rope_type": "linear", "rope_theta": 10000, "factor": 2.0}
    made(config(), rope=linear, seq_len_interpolation_factor=2.0)
    made(config(), rope=LLAMA3, rope_scaling=True)


def test_the_spec_of_another_layer_is_refused() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class OwnAttention(SelfAttention):
        pass

    def of(**asked: Any) -> Any:
        return get_gpt_layer_local_spec(normalization="RMSNorm", **asked)

    own = of()
    own.submodules.self_attention.module = OwnAttention
    for spec, says in (
        (
            of(num_experts=4, moe_grouped_gemm=True),
            "experts is a .*; only a SequentialMLP is supported",
        ),
        (own, "self_attention is a OwnAttention; only a SelfAttention"),
    ):
        block = TransformerBlockSubmodules(layer_specs=[spec], layer_norm=WrappedTorchNorm)
        with pytest.raises(NotSupported, match=says):
            megatron.with_kernels(block)


def test_padding_in_front_is_refused_where_rows_count_it() -> None:
    model, length = made(config()), IDS.shape[1]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    behind = hidden.expand(1, 1, length, length).clone()
    front = behind.clone()
    front[..., :3] = True
    model(IDS, AT, behind)
    refused = pytest.raises(NotSupported, match="padding before a sequence is not supported")
    with refused:
        model(IDS, AT, front)
    # Known by now, and written to.
    behind[..., :3] = True
    with refused:
        model(IDS, AT, behind)
    with torch.inference_mode():
        made_there = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        model(IDS, AT, made_there)
        made_there[..., :3] = True
        with refused:
            model(IDS, AT, made_there)


def test_padding_behind_may_be_hidden() -> None:
    """From all queries, or wholly, as masks of a batch do it."""
    model, length = made(config()), IDS.shape[1]
    alone = model(IDS[:, :8], AT[:, :8], None)
    whole = model(IDS, AT, None)
    causal = torch.ones(length, length, dtype=torch.bool).triu(1).expand(2, 1, length, length)
    hidden = causal.clone()
    hidden[0, :, :, 8:] = True
    for mask in (hidden, hidden.clone()):
        actual = model(IDS.expand(2, length), AT.expand(2, length), mask)
        assert actual[0, :8].equal(alone[0])
        assert actual[1].equal(whole[0])
        hidden[0, :, 8:] = True


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda mask: mask[0, 0],
            r"mask \[12, 12\] is not supported; pass one mask for all heads, \[1, 1, 12",
        ),
        (
            lambda mask: mask.expand(1, 2, 12, 12),
            r"an attention mask \[1, 2, 12, 12\] is not supported",
        ),
        (lambda mask: ~mask, "True means that a query must not see a key"),
        (lambda mask: torch.ones_like(mask), "hides every token of a sequence from itself"),
    ],
    ids=["of no heads", "of each head", "the other way round", "of nothing"],
)
def test_a_mask_of_another_kind_is_refused(change: Any, says: str) -> None:
    model = made(config())
    with pytest.raises(NotSupported, match=says):
        model(IDS, AT, change(torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)))


def pack(ends: list[int], **more: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.tensor(ends, dtype=torch.int32)
    usual = {"qkv_format": "thd", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    return PackedSeqParams(**usual | {"max_seqlen_q": 12, "max_seqlen_kv": 12} | more)


def test_a_pack_is_known_by_its_queries_or_by_its_keys() -> None:
    """Of padding behind each sequence, one may say nothing."""
    model = made(config())
    alone = [model(IDS[:, :n], AT[:, :n], None)[0] for n in (5, 1)]
    padded = torch.tensor([0, 8, 12], dtype=torch.int32)
    ids = IDS.clone()
    ids[0, 8] = ids[0, 0]
    for more in (
        {"cu_seqlens_q_padded": padded},
        {"cu_seqlens_kv_padded": padded.clone()},
        {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded.clone()},
    ):
        actual = model(ids, None, None, packed_seq_params=pack([0, 5, 6], **more))[0]
        assert actual[:5].equal(alone[0])
        assert actual[8:9].equal(alone[1])
    actual = model(IDS, None, None, packed_seq_params=pack([0, 5, 12], cu_seqlens_kv=None))[0]
    assert actual[:5].equal(alone[0])


def test_a_pack_that_does_not_say_where_sequences_lie_is_refused() -> None:
    model, two = made(config()), IDS.expand(2, 12)
    others = torch.tensor([0, 4, 12], dtype=torch.int32)
    for ids, options, says in (
        (IDS, {"cu_seqlens_kv": others}, "different cu_seqlens of queries and of keys"),
        (IDS, {"qkv_format": "sbhd"}, "qkv_format=sbhd; only 'thd' is supported"),
        (IDS, {"qkv_format": None}, "qkv_format=None; only 'thd' is supported"),
        (two, {}, "with one row of ids only, not with 2"),
    ):
        with pytest.raises(NotSupported, match=says):
            model(ids, None, None, packed_seq_params=pack([0, 5, 12], **options))


class Adapter(torch.nn.Module):
    """As libraries put one around a linear."""

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        self.to_wrap = to_wrap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.to_wrap(*args, **kwargs)


def test_an_adapter_is_refused() -> None:
    from megatron.core.models.gpt import GPTModel

    late = made(config())
    late(IDS, AT, None)
    early = GPTModel(
        config(), megatron.layer_spec(config()), 64, 32, position_embedding_type="rope"
    )
    for model in (late, early):
        attention = model.decoder.layers[0].self_attention
        attention.linear_qkv = Adapter(attention.linear_qkv)
    with pytest.raises(NotSupported, match=r"layers\.0\.q_proj is now a .*Adapter without"):
        late(IDS, AT, None)
    with pytest.raises(
        NotSupported, match=r"layers\.0\.q_proj is a .*Adapter: make the GPTModel with"
    ):
        megatron.use_kernels(early, {"rope_theta": 10000})


@pytest.mark.parametrize("op", ["act", "final_norm", "k_proj"])
def test_the_same_operators_are_left_to_spec_and_model(op: str) -> None:
    from megatron.core.models.gpt import GPTModel

    for in_spec, in_model in (([op], []), ([], [op])):
        spec = megatron.layer_spec(config(), excluded=in_spec)
        model = GPTModel(config(), spec, 64, 32, position_embedding_type="rope")
        with pytest.raises(NotSupported, match=r"exclude the same operators in both calls"):
            megatron.use_kernels(model, {"rope_theta": 10000}, excluded=in_model)
        megatron.use_kernels(model, {"rope_theta": 10000}, excluded=in_spec)


def test_an_option_that_is_set_later_is_refused() -> None:
    """megatron-core's own layers would follow it at once."""
    model = made(config())
    before = model(IDS, AT, None)
    model.config.no_sync_func = dict
    assert model(IDS, AT, None).equal(before)
    for name, value in (("glu_linear_offset", 1.0), ("rotary_interleaved", True)):
        stock = getattr(model.config, name)
        setattr(model.config, name, value)
        with pytest.raises(NotSupported, match=f"what is not supported: {name}="):
            model(IDS, AT, None)
        setattr(model.config, name, stock)
    assert model(IDS, AT, None).equal(before)


def test_attention_that_is_not_causal_is_refused() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    model = made(config())
    model.decoder.layers[0].self_attention.attn_mask_type = AttnMaskType.padding
    with pytest.raises(
        NotSupported, match=r"attn_mask_type=AttnMaskType\.padding is not supported"
    ):
        model(IDS, AT, None)


def test_a_model_of_another_spec_is_refused() -> None:
    """Its layers would take positions for angles."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    local = get_gpt_layer_local_spec(normalization="RMSNorm")
    for spec in (local, megatron.layer_spec(config(), excluded=["q_rope"])):
        model = GPTModel(config(), spec, 64, 32, position_embedding_type="rope")
        with pytest.raises(NotSupported, match="layer 1 rotates in its own SelfAttention"):
            megatron.use_kernels(model, {"rope_theta": 10000})


def test_what_is_no_gpt_model_is_refused() -> None:
    with pytest.raises(NotSupported, match="a Linear is not supported; pass a GPTModel"):
        megatron.use_kernels(torch.nn.Linear(1, 1), {"rope_theta": 10000})
