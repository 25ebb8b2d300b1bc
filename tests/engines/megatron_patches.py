"""Faults that the tests plant into the Megatron engine with `patch=megatron_patches:NAME`."""

from typing import Any

import torch
import torch.distributed as dist


@torch.no_grad()
def swap_two_heads(model: Any) -> None:
    """Two q heads of layer 1 swapped in the fused weight, on every rank."""
    attention = model.decoder.layers[1].self_attention
    width = attention.hidden_size_per_attention_head
    rows = attention.linear_qkv.weight[: 2 * width].view(2, width, -1)
    rows.copy_(rows.flip(0).clone())


@torch.no_grad()
def stale_layer_on_rank_1(model: Any) -> None:
    """Layer 2 as it was before an update, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for parameter in model.decoder.layers[2].parameters():
            parameter.mul_(0.9)


@torch.no_grad()
def shards_in_wrong_order(model: Any) -> None:
    """Rank r holds what rank n - 1 - r should hold of layer 1's o_proj."""
    weight = model.decoder.layers[1].self_attention.linear_proj.weight
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.data)
    weight.copy_(parts[dist.get_world_size() - 1 - dist.get_rank()])


def positions_off_by_one(model: Any) -> None:
    """The rotary embedding counts from 1."""
    rotary = model.rotary_pos_emb
    original = rotary.get_emb
    rotary.get_emb = lambda length, offset=0: original(length, offset + 1)


def ignore_padding(model: Any) -> None:
    """Left-padded, positions are counted from the first column, padding included."""

    def count(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, positions, *rest = args
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(positions)
        return (ids, columns, *rest)

    model.register_forward_pre_hook(count)


def wrong_boundary(model: Any) -> None:
    """The first packed sequence ends one token late."""

    def shift(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packed = kwargs["packed_seq_params"]
        packed.cu_seqlens_q = packed.cu_seqlens_q.clone()
        packed.cu_seqlens_q[1] += 1
        packed.cu_seqlens_kv = packed.cu_seqlens_q
        return args, kwargs

    model.register_forward_pre_hook(shift, with_kwargs=True)


def tanh_gelu_in_layer_1(model: Any) -> None:
    """Another activation, and only there."""
    from dataclasses import replace
    from functools import partial

    mlp = model.decoder.layers[1].mlp
    mlp.config = replace(
        mlp.config, activation_func=partial(torch.nn.functional.gelu, approximate="tanh")
    )


@torch.no_grad()
def zero_bias_on_rank_1(model: Any) -> None:
    """Layer 1's o_proj without its bias, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        model.decoder.layers[1].self_attention.linear_proj.bias.zero_()


def lose_bias_on_rank_1(model: Any) -> None:
    """Layer 1's gate and up without the parameter, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        model.decoder.layers[1].mlp.linear_fc1.bias = None


def another_factor(model: Any) -> None:
    """Positions divided by 2, where the checkpoint says 3."""
    model.rotary_pos_emb.seq_len_interpolation_factor = 2.0


def another_yarn_factor(model: Any) -> None:
    """Frequencies stretched by 2, where the checkpoint says 4."""
    rotary = model.rotary_pos_emb
    rotary.inv_freq_inter = rotary.inv_freq_inter * 2


def no_attention_factor(model: Any) -> None:
    """yarn's frequencies alone, cos and sin as they are."""
    model.config.yarn_mscale = model.config.yarn_mscale_all_dim = 1.0
