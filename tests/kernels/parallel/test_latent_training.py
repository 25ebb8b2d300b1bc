"""A training step of Megatron-core's latent attention with the kernels: on two tensor-parallel
ranks, the loss and the gradients have the bits of one rank."""

import functools
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from rlk_kernels.parallel import latent_attention
from torch import Tensor

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.whole_matrix

VOCAB = 64
BY_ROWS = (
    *("word_embeddings", "output_layer", "linear_fc1", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)
BY_COLUMNS = ("linear_proj", "linear_fc2")


def _config(world: int) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, q_lora_rank=24,
        kv_lora_rank=32, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=12, kv_channels=12,
        rope_type="rope", rotary_scaling_factor=1.0, normalization="RMSNorm",
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True,
        params_dtype=torch.bfloat16, bf16=True, perform_initialization=False,
        tensor_model_parallel_size=world,
    )  # fmt: skip


def _shard(name: str, whole: Tensor, rank: int, world: int) -> Tensor:
    if any(part in name for part in BY_COLUMNS):
        return whole.chunk(world, 1)[rank]
    if not any(part in name for part in BY_ROWS):
        return whole
    blocks = whole.chunk(2) if "linear_fc1" in name else (whole,)
    return torch.cat([block.chunk(world)[rank] for block in blocks])


def _whole(name: str, own: Tensor, world: int) -> Tensor:
    shape = list(own.shape)
    if any(part in name for part in BY_COLUMNS):
        shape[1] *= world
    elif any(part in name for part in BY_ROWS):
        shape[0] *= world
    generator = torch.Generator().manual_seed(sum(name.encode()))
    size = 1.0 if "layernorm" in name else 0.3
    return (torch.randn(shape, generator=generator) * size).to(torch.bfloat16)


def _step(group: Any, wrong: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """(the loss of each token, gradient of each parameter) of a rank, after megatron-core has added
    up what it adds up over ranks. `wrong`: each rank has the gradient of latents by its own heads
    alone, and ranks add them up."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from rlk_kernels.integrations import megatron

    from rlk_align.engines.megatron.cpu import cpu_stand_ins, latent_stand_ins

    world = group.size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    if wrong:
        latent_attention._SharedHeads.backward = _added_up
    with cpu_stand_ins(), latent_stand_ins():
        config = _config(world)
        spec = megatron.layer_spec(config)
        model = GPTModel(config, spec, VOCAB, 32, position_embedding_type="rope").bfloat16()
        model = megatron.use_kernels(model, {"rope_theta": 10000})
        for name, parameter in model.named_parameters():
            whole = _whole(name, parameter, world)
            parameter.data.copy_(_shard(name, whole, group.rank(), world))
        ids = torch.arange(24).view(2, 12) * 7 % VOCAB
        at = torch.arange(12).expand(2, 12)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        trained = DistributedDataParallel(config, settings, model)
        loss = trained(ids, at, None, labels=ids.roll(-1, 1))
        loss.sum().backward()
        finalize_model_grads([trained])
        megatron.check(megatron.operators(model))
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    return loss.detach(), gradients | {"norm": megatron.gradient_norm(model)}


def _added_up(ctx: Any, do: Tensor) -> Any:
    q, latents, cu_q, cu_k, out, lse = ctx.saved_tensors
    dq, part = latent_attention.gradients(
        q, latents, cu_q.int(), cu_k.int(), ctx.latent, ctx.scale, out, lse, do.contiguous(),
        ctx.backend,
    )  # fmt: skip
    torch.distributed.all_reduce(part, group=ctx.group)
    return dq, part, None, None, None, None, None


@functools.cache
def _alone() -> tuple[Tensor, dict[str, Tensor]]:
    (result,) = on_ranks(1, _step)
    return result


def _differing(ranks: list[Any], whole: dict[str, Tensor]) -> set[str]:
    return {
        name
        for name, gradient in whole.items()
        for rank, (_, own) in enumerate(ranks)
        if not torch.equal(own[name], _shard(name, gradient, rank, len(ranks)))
    }


def test_a_step_has_the_bits_of_one_rank() -> None:
    loss, whole = _alone()
    ranks = on_ranks(2, _step)
    assert all(torch.equal(own, loss) for own, _ in ranks)
    assert all(bool(g.any()) for g in whole.values())
    assert _differing(ranks, whole) == set()


def test_gradients_of_latents_that_ranks_add_up_are_noticed() -> None:
    """A planted fault."""
    loss, whole = _alone()
    ranks = on_ranks(2, _step, True)
    assert all(torch.equal(own, loss) for own, _ in ranks)
    assert "decoder.layers.0.self_attention.kv_layernorm.weight" in _differing(ranks, whole)
