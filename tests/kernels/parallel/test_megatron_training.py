"""A training step of Megatron-core with the kernels: of several tensor-parallel ranks, with and
without sequence parallelism, the loss and the gradients have the bits of one rank."""

import functools
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.parallel import linear
from torch import Tensor

pytest.importorskip("megatron.core")

VOCAB = 64
SHARED_OUT = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
"""Sharded by rows; the others in `SHARED_IN` by columns, and the rest is whole."""
SHARED_IN = ("linear_proj.weight", "linear_fc2.weight")
HEADS = ("q_layernorm", "k_layernorm")
"""A rank has the gradient of its own heads, and megatron-core adds them up."""


def _config(groups: int, **more: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=groups, kv_channels=8,
        ffn_hidden_size=64, normalization="RMSNorm", gated_linear_unit=True, qk_layernorm=True,
        activation_func=torch.nn.functional.silu, add_bias_linear=True, add_qkv_bias=True,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        params_dtype=torch.bfloat16, bf16=True, perform_initialization=False, **more,
    )  # fmt: skip


def _whole(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = 1.0 if "layernorm" in name else 0.3
    return (torch.randn(shape, generator=generator) * size).to(torch.bfloat16)


def _shard(name: str, whole: Tensor, rank: int, world: int) -> Tensor:
    if any(part in name for part in SHARED_IN):
        return whole.chunk(world, 1)[rank]
    if not any(part in name for part in SHARED_OUT):
        return whole
    blocks = whole.chunk(2) if "linear_fc1" in name else (whole,)
    return torch.cat([block.chunk(world)[rank] for block in blocks])


def _step(
    group: Any, sequence: bool, groups: int = 2, wrong: bool = False, from_hidden: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss of each token, gradient of each parameter) of a rank. `wrong`: ranks add up
    partial gradients, as engines do. `from_hidden`: no logits are made."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from rlk_kernels.integrations import megatron

    from rlk_align.engines.megatron.cpu import cpu_stand_ins

    world = group.size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with cpu_stand_ins():
        config = _config(groups, tensor_model_parallel_size=world, sequence_parallel=sequence)
        spec = megatron.layer_spec(config)
        model = GPTModel(config, spec, VOCAB, 32, position_embedding_type="rope").bfloat16()
        model = megatron.use_kernels(model, {"rope_theta": 10000})
        for name, parameter in model.named_parameters():
            shape = list(parameter.shape)
            if any(part in name for part in SHARED_IN):
                shape[1] *= world
            elif any(part in name for part in SHARED_OUT):
                shape[0] *= world
            # Not through the parameter: no version counter sees it, as of some optimizers.
            parameter.data.copy_(_shard(name, _whole(name, tuple(shape)), group.rank(), world))
        for layer in model.decoder.layers:
            assert layer.mlp.linear_fc1.rlk_blocks == 2
        if wrong:
            linear._shared_input_grad = _added_input_grad
        ids = torch.arange(24).view(2, 12) * 7 % VOCAB
        at = torch.arange(12).expand(2, 12)
        labels = ids.roll(-1, 1)
        if from_hidden:
            loss = -megatron.score_tokens(model, ids, at, None, labels)
        else:
            loss = model(ids, at, None, labels=labels)
        loss.sum().backward()
        megatron.check(megatron.operators(model))
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def _added_input_grad(ctx: Any, dy: Tensor, weight: Tensor) -> Tensor:
    part = linear.input_grad(dy.reshape(-1, dy.shape[-1]), weight, ctx.backend)
    torch.distributed.all_reduce(part, group=ctx.group)
    return part.view(*dy.shape[:-1], -1)


@functools.cache
def _alone(groups: int) -> tuple[Tensor, dict[str, Tensor]]:
    (result,) = on_ranks(1, _step, False, groups)
    return result


def _differing(ranks: list[Any], whole: dict[str, Tensor]) -> set[str]:
    """Parameters of which a rank's gradient is not its shard of that of one rank."""
    world = len(ranks)
    return {
        name
        for name, gradient in whole.items()
        for rank, (_, own) in enumerate(ranks)
        if not torch.equal(own[name], _shard(name, gradient, rank, world))
    }


@pytest.mark.parametrize(
    ("world", "sequence", "groups", "from_hidden"),
    [(2, False, 2, False), (4, True, 4, False), (2, True, 2, True)],
)
def test_a_step_has_the_bits_of_one_rank(
    world: int, sequence: bool, groups: int, from_hidden: bool
) -> None:
    loss, whole = _alone(groups)
    ranks = on_ranks(world, _step, sequence, groups, False, from_hidden)
    assert all(torch.equal(own, loss) for own, _ in ranks)
    assert all(bool(g.any()) for g in whole.values())
    added = {n for n in whole if "norm" in n and (sequence or any(part in n for part in HEADS))}
    assert _differing(ranks, whole) == added
    # What megatron-core adds up over ranks has another order, and no other value.
    for name in added:
        total = torch.stack([own[name].double() for _, own in ranks]).sum(0)
        assert torch.allclose(total, whole[name].double(), rtol=0.05, atol=0.05)


def test_a_step_repeats_where_ranks_share_a_key_value_head() -> None:
    """Then the gradient of a key is added up over ranks: the loss is that of one rank, gradients
    are those of every run."""
    loss, whole = _alone(1)
    first, second = (on_ranks(2, _step, True, 1) for _ in range(2))
    assert all(torch.equal(own, loss) for own, _ in first)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in _differing(first, whole)
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_that_are_added_up_over_ranks_are_noticed() -> None:
    """A planted fault."""
    _, whole = _alone(2)
    ranks = on_ranks(2, _step, False, 2, True)
    assert "embedding.word_embeddings.weight" in _differing(ranks, whole)
