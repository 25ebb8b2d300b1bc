"""Faults that the tests plant into the Megatron engine with `patch=megatron_patches:NAME`."""

from typing import Any

import torch
import torch.distributed as dist


@torch.no_grad()
def swap_two_heads(model: Any) -> None:
    """Swaps two q heads of layer 1 in the fused weight, on every rank."""
    attention = model.decoder.layers[1].self_attention
    width = attention.hidden_size_per_attention_head
    rows = attention.linear_qkv.weight[: 2 * width].view(2, width, -1)
    rows.copy_(rows.flip(0).clone())


@torch.no_grad()
def stale_layer_on_rank_1(model: Any) -> None:
    """Changes layer 2 as if it missed an update, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        for parameter in model.decoder.layers[2].parameters():
            parameter.mul_(0.9)


@torch.no_grad()
def shards_in_wrong_order(model: Any) -> None:
    """Gives rank r the shard of layer 1's o_proj that belongs to rank n - 1 - r."""
    weight = model.decoder.layers[1].self_attention.linear_proj.weight
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.data)
    weight.copy_(parts[dist.get_world_size() - 1 - dist.get_rank()])


def positions_off_by_one(model: Any) -> None:
    """Makes the rotary embedding count from 1."""
    rotary = model.rotary_pos_emb
    original = rotary.get_emb
    rotary.get_emb = lambda length, offset=0: original(length, offset + 1)


def ignore_padding(model: Any) -> None:
    """Counts the positions of left-padded sequences from the first column, including padding."""

    def count(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, positions, *rest = args
        columns = torch.arange(ids.shape[1], device=ids.device).expand_as(positions)
        return (ids, columns, *rest)

    model.register_forward_pre_hook(count)


def wrong_boundary(model: Any) -> None:
    """Ends the first packed sequence one token late."""

    def shift(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packed = kwargs["packed_seq_params"]
        packed.cu_seqlens_q = packed.cu_seqlens_q.clone()
        packed.cu_seqlens_q[1] += 1
        packed.cu_seqlens_kv = packed.cu_seqlens_q
        return args, kwargs

    model.register_forward_pre_hook(shift, with_kwargs=True)


def tanh_gelu_in_layer_1(model: Any) -> None:
    """Changes the activation of layer 1 only."""
    from dataclasses import replace
    from functools import partial

    mlp = model.decoder.layers[1].mlp
    mlp.config = replace(
        mlp.config, activation_func=partial(torch.nn.functional.gelu, approximate="tanh")
    )


@torch.no_grad()
def zero_bias_on_rank_1(model: Any) -> None:
    """Sets the bias of layer 1's o_proj to 0, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        model.decoder.layers[1].self_attention.linear_proj.bias.zero_()


def lose_bias_on_rank_1(model: Any) -> None:
    """Removes the bias of layer 1's gate and up, on the last rank only."""
    if dist.get_rank() == dist.get_world_size() - 1:
        model.decoder.layers[1].mlp.linear_fc1.bias = None


def another_factor(model: Any) -> None:
    """Divides positions by 2, while the checkpoint says 3."""
    model.rotary_pos_emb.seq_len_interpolation_factor = 2.0


def another_yarn_factor(model: Any) -> None:
    """Stretches frequencies by 2, while the checkpoint says 4."""
    rotary = model.rotary_pos_emb
    rotary.inv_freq_inter = rotary.inv_freq_inter * 2


def no_attention_factor(model: Any) -> None:
    """Removes yarn's attention factor and keeps its frequencies."""
    model.config.yarn_mscale = model.config.yarn_mscale_all_dim = 1.0
