"""Layouts, compared with tensors that are fused and cut by hand."""

from dataclasses import replace

import pytest
import torch
from rlk_kernels.numerics.lse_tree import tree

from rlk_align.engines.common.layout import (
    Layout,
    even,
    fused,
    kv_heads,
    of_fused,
    of_outputs,
)
from rlk_align.engines.megatron.layout import LEAF, grouped_qkv, padded_vocab, vocabulary
from rlk_align.model.shape import ModelShape

QKV = ("q", "k", "v")


def shape(heads: int = 8, kv: int = 4, head_dim: int = 4, vocab: int = 101) -> ModelShape:
    return ModelShape(
        model_type="llama",
        layers=1,
        hidden=heads * head_dim,
        heads=heads,
        kv_heads=kv,
        head_dim=head_dim,
        intermediate=24,
        vocab=vocab,
        context=32,
        dtype="float32",
    )


def fused_by_hand(s: ModelShape) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """q, k, v with distinct rows, and their fusion in Megatron's order: q q k v for each group."""
    width, per_group = s.head_dim, s.heads // s.kv_heads
    rows = torch.arange((s.heads + 2 * s.kv_heads) * width).float()[:, None]
    q, k, v = rows.split([s.heads * width, s.kv_heads * width, s.kv_heads * width])
    fused = []
    for group in range(s.kv_heads):
        fused += [q.view(s.heads, width, 1)[group * per_group + h] for h in range(per_group)]
        fused += [k.view(s.kv_heads, width, 1)[group], v.view(s.kv_heads, width, 1)[group]]
    return {"q": q, "k": k, "v": v}, torch.cat(fused)


@pytest.mark.parametrize(
    ("heads", "kv", "tp"),
    [(8, 4, 1), (8, 4, 2), (8, 4, 4), (8, 4, 8), (8, 2, 8), (8, 8, 8), (8, 1, 2), (6, 3, 3)],
)
def test_grouped_qkv_comes_apart_whole(heads: int, kv: int, tp: int) -> None:
    s = shape(heads, kv)
    parts, fused = fused_by_hand(s)
    layout = grouped_qkv(s, tp, QKV)
    local = fused.chunk(tp)
    assert len(local) == tp
    for op in QKV:
        assert torch.equal(layout.assemble(op, local, 0), parts[op])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_gated_delta_net_comes_apart_whole(family: str, tp: int) -> None:
    """Ranks share the heads: of q, k and v one after another, or of all by heads of keys."""
    s = replace(
        shape(),
        model_type=family,
        delta_layers=(0,),
        **{"delta_key_heads": 2, "delta_heads": 4, "delta_key_width": 3, "delta_width": 5},
    )
    rows = torch.arange(12 + 20 + 20).float()
    q, k, v, z = rows.split([6, 6, 20, 20])
    if s.family.by_key_head:
        by_head = [x.view(2, -1) for x in (q, k, v, z)]
        layout = of_fused("l", "linear_attn.in_proj_qkvz", s, tp)
        local = torch.cat(by_head, 1).view(tp, -1)
    else:
        layout = of_outputs(("layers.0.qkv_in", "layers.0.z"), s, tp) or Layout(())
        local = torch.cat([x.view(tp, -1) for x in (q, k, v, z)], 1)
    mixed, gate = (layout.assemble(op, [*local], 0) for op in layout.ops)
    assert torch.equal(mixed, torch.cat([q, k, v]))
    assert torch.equal(gate, z)


def test_a_wrong_order_of_ranks_is_no_whole() -> None:
    parts, fused = fused_by_hand(shape())
    first, second = fused.chunk(2)
    layout = grouped_qkv(shape(), 2, QKV)
    assert not torch.equal(layout.assemble("q", [second, first], 0), parts["q"])


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("vocab", [96, 97, 101, 3])
def test_vocabulary_with_padding(tp: int, vocab: int) -> None:
    s = shape(vocab=vocab)
    size = padded_vocab(vocab, tp)
    # Whole leaves of 16 columns on each rank; one rank needs no padding.
    step = 1 if tp == 1 else 16 * tp
    assert size % step == 0
    assert vocab <= size < vocab + step
    rows = torch.arange(size)
    whole = vocabulary("embed", s, tp).assemble("embed", rows.chunk(tp), 0)
    assert torch.equal(whole, rows[:vocab])


def test_gate_and_up_lie_side_by_side_on_each_rank() -> None:
    gate, up = torch.arange(8), torch.arange(100, 108)
    local = [torch.cat([g, u]) for g, u in zip(gate.chunk(2), up.chunk(2), strict=True)]
    layout = fused(even("gate", 8, 2), even("up", 8, 2))
    assert torch.equal(layout.assemble("gate", local, 0), gate)
    assert torch.equal(layout.assemble("up", local, 0), up)


def test_fewer_heads_than_ranks_are_taken_once() -> None:
    s = shape(heads=8, kv=2)
    heads = torch.arange(2 * s.head_dim)
    copies = [heads[: s.head_dim]] * 2 + [heads[s.head_dim :]] * 2
    assert torch.equal(kv_heads("k", s, 4).assemble("k", copies, 0), heads)


def held(layout: Layout, op: str, dim: int) -> list[tuple[int, int, int]]:
    return [(s.rank, s.start, s.stop) for s in layout.shards(op, dim)]


def test_shards_name_who_holds_what() -> None:
    assert held(even("o", 8, 2), "o", 1) == [(0, 0, 4), (1, 4, 8)]
    assert held(even("o", 8, 1), "o", 1) == []
    # 35 rows on ranks of 16; the last one has padding alone.
    assert held(vocabulary("embed", shape(vocab=35), 4), "embed", 0) == [
        (0, 0, 16),
        (1, 16, 32),
        (2, 32, 35),
    ]
    # Two groups of two q heads on each rank: one run of rows.
    assert held(grouped_qkv(shape(), 2, QKV), "q", 0) == [(0, 0, 16), (1, 16, 32)]
    # Three of four: q0 q1 | k0 on ranks 0 and 1, a group being four heads.
    cut = grouped_qkv(shape(heads=4, kv=2), 4, QKV)
    assert held(cut, "q", 0) == [(0, 0, 8), (2, 8, 16)]
    assert held(cut, "k", 0) == [(1, 0, 4), (3, 4, 8)]


def test_a_leaf_is_that_of_the_kernels() -> None:
    """The engine has a copy, because only `engines.patch` imports the kernels."""
    assert tree.LEAF == LEAF
