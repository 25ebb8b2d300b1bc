"""Attention whose sequences are divided among ranks has the bits of one rank, forward and
backward, over real gloo. T = rows   R = ranks"""

import functools
from typing import Any

import pytest
import rlk_kernels
import torch
from gloo_ranks import on_ranks
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.integrations import profile
from rlk_kernels.parallel import context
from rlk_kernels.parallel.context import check_lengths, context_attention, own_positions, owners
from torch import Tensor

CU = torch.tensor([0, 48, 56, 136])
"""For two ranks the parts have 12, 2 and 20 rows, for four ranks 6, 1 and 10."""
HEADS, KV_HEADS, DIM = 8, 4, 16


def problem(dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout of all rows."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(int(CU[-1]), heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    scale = 2.0 ** torch.randint(-6, 2, (shapes[0][0], 1, 1), generator=generator)
    return [(torch.randn(s, generator=generator) * scale).to(dtype) for s in shapes]


@functools.cache
def alone(dtype: torch.dtype, backend: str, window: int | None) -> list[Tensor]:
    """out, dq, dk, dv on one rank."""
    *qkv, dout = problem(dtype)
    leaves = [x.requires_grad_() for x in qkv]
    out = rlk_kernels.attention(*leaves, CU, CU, window=window, backend=backend)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def rows_of(rank: int, ranks: int) -> Tensor:
    """As megatron-core slices each sequence: parts `rank` and `2 R - 1 - rank` of 2 R."""
    spans = []
    for begin, end in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        parts = torch.arange(begin, end).chunk(2 * ranks)
        spans += [parts[rank], parts[2 * ranks - 1 - rank]]
    return torch.cat(spans)


def _shared(group: Any, dtype: torch.dtype, backend: str, window: int | None) -> list[Tensor]:
    own = rows_of(group.rank(), group.size())
    *qkv, dout = [x[own] for x in problem(dtype)]
    leaves = [x.requires_grad_() for x in qkv]
    out = context_attention(*leaves, CU, group, window=window, backend=backend)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


@pytest.mark.parametrize(
    ("ranks", "dtype", "backend", "window"),
    [
        (2, torch.bfloat16, "torch", None),
        (4, torch.bfloat16, "torch", 17),
        # In Triton's interpreter, products of bf16 are wrong.
        pytest.param(2, torch.float32, "triton", None, marks=pytest.mark.whole_matrix),
    ],
)
def test_bits_are_those_of_one_rank(ranks, dtype, backend, window):
    whole = alone(dtype, backend, window)
    for rank, own in enumerate(on_ranks(ranks, _shared, dtype, backend, window)):
        for a, b in zip(own, whole, strict=True):
            assert bool(b.any())
            assert torch.equal(a.view(torch.uint8), b[rows_of(rank, ranks)].view(torch.uint8))


def _capped(group: Any) -> Tensor:
    q, k, v, _ = [x[rows_of(group.rank(), group.size())] for x in problem(torch.bfloat16)]
    return profile.attention(q, k, v, CU, CU, 0.5, group=group, softcap=1.0)


def test_a_cap_of_the_scores_holds_on_several_ranks():
    *qkv, _ = problem(torch.bfloat16)
    whole = profile.attention(*qkv, CU, CU, 0.5, softcap=1.0)
    assert not torch.equal(whole, profile.attention(*qkv, CU, CU, 0.5))
    for rank, own in enumerate(on_ranks(2, _capped)):
        assert torch.equal(own, whole[rows_of(rank, 2)])


def _fewer_heads(group: Any, dtype: torch.dtype) -> list[Tensor]:
    own = rows_of(group.rank(), group.size())
    q, k, v, dout = problem(dtype)
    leaves = [x[own].requires_grad_() for x in (q, k[:, :2], v[:, :2])]
    out = context_attention(*leaves, CU, group, backend="torch")
    out.backward(dout[own])
    return [out.detach(), *(x.grad for x in leaves)]


def test_fewer_key_value_heads_than_ranks():
    """The output and the gradient of q have the bits of one rank; those of k and v repeat, and
    differ by a rounding of each rank's part."""
    q, k, v, dout = problem(torch.float32)
    leaves = [x.requires_grad_() for x in (q, k[:, :2].clone(), v[:, :2].clone())]
    rlk_kernels.attention(*leaves, CU, CU, backend="torch").backward(dout)
    whole = rlk_kernels.attention(*leaves, CU, CU, backend="torch").detach(), q.grad
    first, again = (on_ranks(4, _fewer_heads, torch.float32) for _ in range(2))
    for rank, (found, repeated) in enumerate(zip(first, again, strict=True)):
        own = rows_of(rank, 4)
        assert all(torch.equal(a, b[own]) for a, b in zip(found[:2], whole, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))
        for gradient, leaf in zip(found[2:], leaves[1:], strict=True):
            assert torch.allclose(gradient, leaf.grad[own], rtol=1e-5, atol=1e-5)


def _own_rows_attend_alone(group: Any) -> Tensor:
    """A planted fault: every rank attends to its own rows."""
    own = rows_of(group.rank(), group.size())
    q, k, v, _ = (x[own] for x in problem(torch.bfloat16))
    return rlk_kernels.attention(q, k, v, CU // 2, CU // 2, backend="torch")


def test_rows_of_other_ranks_are_needed():
    whole = alone(torch.bfloat16, "torch", None)[0]
    outs = on_ranks(2, _own_rows_attend_alone)
    assert not any(torch.equal(out, whole[rows_of(r, 2)]) for r, out in enumerate(outs))


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_lie_where_megatron_puts_them(ranks):
    rank, index = owners(CU.int(), int(CU[-1]), ranks)
    for r in range(ranks):
        own = rows_of(r, ranks)
        assert torch.equal(rank[own], torch.full_like(own, r))
        assert torch.equal(index[own], torch.arange(len(own)))


def test_positions_are_those_of_whole_sequences(monkeypatch):
    monkeypatch.setattr(context, "size_of", lambda group: 2)
    monkeypatch.setattr(context, "rank_of", lambda group: 1)
    begins = CU[torch.searchsorted(CU, rows_of(1, 2), right=True) - 1]
    assert torch.equal(own_positions(CU, int(CU[-1]), None), rows_of(1, 2) - begins)


def test_positions_on_one_rank_start_with_each_sequence():
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    assert own_positions(cu, 12, None).tolist() == [*range(5), *range(7)]


def test_what_ranks_cannot_share_is_refused():
    check_lengths(CU, 136, 4)
    with pytest.raises(UnsupportedShape, match=r"sequences of \[48, 8\] rows .* multiple of 10"):
        check_lengths(torch.tensor([0, 48, 56, 136]), 136, 5)
    with pytest.raises(UnsupportedShape, match="to 136 do not cover all 140 rows"):
        check_lengths(CU, 140, 2)
    assert all("4 key-value heads" in text for text in on_ranks(3, _three_ranks))


def _three_ranks(group: Any) -> str:
    x = torch.zeros(8, 12, 4)
    with pytest.raises(UnsupportedShape) as caught:
        context_attention(x, x[:, :4], x[:, :4], torch.tensor([0, 24]), group)
    return str(caught.value)
