"""A training step of Megatron-core with the kernels: on several tensor-parallel ranks, with and
without sequence parallelism, the loss and the gradients have the bits of one rank."""

import functools
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks, only_rank_of_megatron
from rlk_kernels.parallel import linear, rms_norm
from torch import Tensor

pytest.importorskip("megatron.core")

VOCAB = 64
NORM = "the norm of them all"
SHARED_OUT = ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1")
"""Sharded by rows; the others in `SHARED_IN` are sharded by columns, and the rest is whole."""
SHARED_IN = ("linear_proj.weight", "linear_fc2.weight")


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
    group: Any,
    sequence: bool,
    groups: int = 2,
    wrong: str = "",
    from_hidden: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss of each token, gradient of each parameter) of a rank, after megatron-core has added
    up what it adds up over ranks. `wrong`: of what ranks add up partial gradients, as engines do,
    `products` or `norms`. `from_hidden`: logits are not computed."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
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
            # Not through the parameter, so that the version counter does not change, as in some
            # optimizers.
            parameter.data.copy_(_shard(name, _whole(name, tuple(shape)), group.rank(), world))
        for layer in model.decoder.layers:
            assert layer.mlp.linear_fc1.rlk_blocks == 2
        if wrong == "products":
            linear._shared_input_grad = _added_input_grad
        if wrong == "norms":
            rms_norm._of_all = lambda part, *_: part
            rms_norm.rank_of = lambda _: 0
        ids = torch.arange(24).view(2, 12) * 7 % VOCAB
        at = torch.arange(12).expand(2, 12)
        trained = DistributedDataParallel(
            config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        labels = ids.roll(-1, 1)
        if from_hidden:
            loss = -megatron.score_tokens(model, ids, at, None, labels)
        else:
            loss = trained(ids, at, None, labels=labels)
        loss.sum().backward()
        finalize_model_grads([trained])
        megatron.check(megatron.operators(model))
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    return loss.detach(), gradients | {NORM: megatron.gradient_norm(model)}


def _added_input_grad(ctx: Any, dy: Tensor, weight: Tensor) -> Tensor:
    part = linear.input_grad(dy.reshape(-1, dy.shape[-1]), weight, ctx.backend)
    torch.distributed.all_reduce(part, group=ctx.group)
    return part.view(*dy.shape[:-1], -1)


@functools.cache
def _alone(groups: int) -> tuple[Tensor, dict[str, Tensor]]:
    (result,) = on_ranks(1, _step, False, groups)
    return result


def _differing(ranks: list[Any], whole: dict[str, Tensor]) -> set[str]:
    """Parameters whose gradient on a rank is not the shard of the gradient on one rank."""
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
    ranks = on_ranks(world, _step, sequence, groups, "", from_hidden)
    assert all(torch.equal(own, loss) for own, _ in ranks)
    assert all(bool(g.any()) for g in whole.values())
    assert _differing(ranks, whole) == set()


def test_a_step_repeats_where_ranks_share_a_key_value_head() -> None:
    """The gradient of a key is then added up over ranks: the loss is that of one rank, and
    gradients repeat in every run."""
    loss, whole = _alone(1)
    first, second = (on_ranks(2, _step, True, 1) for _ in range(2))
    assert all(torch.equal(own, loss) for own, _ in first)
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in _differing(first, whole)
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_gradients_that_are_added_up_over_ranks_are_noticed() -> None:
    """A planted fault."""
    _, whole = _alone(2)
    ranks = on_ranks(2, _step, False, 2, "products")
    assert "embedding.word_embeddings.weight" in _differing(ranks, whole)
    ranks = on_ranks(2, _step, True, 2, "norms")
    assert {n for n in _differing(ranks, whole) if "norm" not in n} == set()
    assert any("norm" in name for name in _differing(ranks, whole))


LENGTHS = [8, 16]
"""The lengths of two packed sequences. Two ranks have four parts of each."""


def _context_step(group: Any, packed: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, gradient of the embeddings, gradients) of a rank that has its part of each
    sequence."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from rlk_kernels.integrations import megatron

    from rlk_align.engines.megatron.cpu import cpu_stand_ins

    world, rank = group.size(), group.rank()
    parallel_state.initialize_model_parallel(context_parallel_size=world)
    with cpu_stand_ins():
        config = _config(2, context_parallel_size=world)
        model = GPTModel(
            config, megatron.layer_spec(config), VOCAB, 32, position_embedding_type="rope"
        )
        model = megatron.use_kernels(model.bfloat16(), {"rope_theta": 10000})
        for name, parameter in model.named_parameters():
            parameter.data.copy_(_whole(name, tuple(parameter.shape)))
        rows = _own_rows(LENGTHS if packed else [12], rank, world)
        ids = torch.arange(24).view(1 if packed else 2, -1) * 7 % VOCAB
        at, pack = rows.expand(len(ids), -1), None
        if packed:
            cu = torch.tensor([0, 8, 24], dtype=torch.int32)
            pack = PackedSeqParams("thd", cu, cu, max_seqlen_q=16, max_seqlen_kv=16)
        seen: list[Tensor] = []

        def watch(_module: Any, _inputs: Any, y: Tensor) -> None:
            y.register_hook(seen.append)

        model.embedding.word_embeddings.register_forward_hook(watch)
        labels = ids.roll(-1, 1)[:, rows]
        loss = model(ids[:, rows], at, None, labels=labels, packed_seq_params=pack)
        loss.sum().backward()
        megatron.check(megatron.operators(model))
    return loss.detach(), seen[0], {name: p.grad for name, p in model.named_parameters()}


def _own_rows(lengths: list[int], rank: int, world: int) -> Tensor:
    """Parts `rank` and `2 world - 1 - rank` of each sequence."""
    spans = []
    for rows in torch.arange(sum(lengths)).split(lengths):
        parts = rows.chunk(2 * world)
        spans += [parts[rank], parts[2 * world - 1 - rank]]
    return torch.cat(spans)


@pytest.mark.parametrize("packed", [False, True])
def test_a_step_of_context_parallel_ranks_has_the_bits_of_one(packed: bool) -> None:
    ((loss, embedded, whole),) = on_ranks(1, _context_step, packed)
    ranks = on_ranks(2, _context_step, packed)
    for rank, (own_loss, own_embedded, _) in enumerate(ranks):
        rows = _own_rows(LENGTHS if packed else [12], rank, 2)
        assert torch.equal(own_loss, loss[:, rows])
        assert torch.equal(own_embedded, embedded[:, rows])
        assert bool(own_embedded.any())
    # Gradients of weights are sums over rows; the ranks that have them add them up.
    for name, gradient in whole.items():
        total = sum(grads[name].double() for *_, grads in ranks)
        assert torch.allclose(total, gradient.double(), rtol=0.05, atol=0.05 * gradient.abs().max())


def test_what_context_parallel_ranks_cannot_share_is_refused() -> None:
    from rlk_kernels.integrations.errors import NotSupported
    from rlk_kernels.integrations.megatron.limits import check_config

    for refused in ({"context_parallel_size": 3}, {"hybrid_context_parallel": True}):
        with pytest.raises(NotSupported, match=next(iter(refused))):
            check_config(_config(2, **{"context_parallel_size": 2} | refused))
    for fits in (2, 4):
        check_config(_config(2, context_parallel_size=fits))


def _sizes(_group: Any) -> int:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return int(parallel_state.get_tensor_model_parallel_world_size())


def test_ranks_are_forked_after_this_process_was_one() -> None:
    """The groups that megatron-core leaves behind do not make a rank wait."""
    with only_rank_of_megatron():
        pass
    assert on_ranks(2, _sizes) == [2, 2]
