"""Operators that are divided among ranks have the bits of one rank, forward and backward, over real
gloo. R = ranks   M = rows   K = in features   N = out features"""

import functools
from typing import Any

import pytest
import rlk_kernels
import torch
from gloo_ranks import on_ranks
from rlk_kernels.errors import UnsupportedShape
from rlk_kernels.numerics.lse_tree.tree import LEAF
from rlk_kernels.parallel import linear_logp
from rlk_kernels.parallel import logp as shards
from rlk_kernels.parallel.copies import gather_columns, own_rows, rows_to_columns
from rlk_kernels.parallel.embedding import embedding_parallel
from rlk_kernels.parallel.linear import column_parallel, row_parallel
from rlk_kernels.parallel.logp import Subtree, logp_parallel, subtrees
from rlk_kernels.parallel.sample import sample_parallel
from torch import Tensor

M, K, N = 12, 96, 64


def wide(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Entries of many magnitudes: sums in another order have other bits."""
    generator = torch.Generator().manual_seed(seed)
    sign_and_size = torch.randn(shape, generator=generator)
    scale = 2.0 ** torch.randint(-12, 3, shape, generator=generator)
    return (sign_and_size * scale).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def same(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.shape == b.shape and torch.equal(bits(a), bits(b))


@functools.cache
def alone(dtype: torch.dtype = torch.bfloat16, backend: str = "torch") -> tuple[Tensor, ...]:
    """(y, dx, dweight, dbias) on one rank."""
    x, w, b, dy = problem(dtype)
    y = rlk_kernels.linear(*(t.requires_grad_() for t in (x, w, b)), backend=backend)
    y.backward(dy)
    return y.detach(), x.grad, w.grad, b.grad


def problem(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """x[M, K], weight[N, K], bias[N], dy[M, N]."""
    shapes = ((M, K), (N, K), (N,), (M, N))
    return tuple(wide(*s, seed=i, dtype=dtype) for i, s in enumerate(shapes))


def shard(x: Tensor, dim: int, group: Any) -> Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone()


def _row(group: Any, sequence: bool, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    x, w, b, dy = problem(dtype)
    x, w = (shard(t, 1, group).requires_grad_() for t in (x, w))
    b.requires_grad_()
    y = row_parallel(x, w, b, group, sequence=sequence, backend=backend)
    y.backward(shard(dy, 0, group) if sequence else dy)
    return y.detach(), x.grad, w.grad, b.grad


def _column(group: Any, sequence: bool, dtype: torch.dtype, backend: str) -> tuple[Tensor, ...]:
    x, w, b, dy = problem(dtype)
    x = (shard(x, 0, group) if sequence else x).requires_grad_()
    w, b = (shard(t, 0, group).requires_grad_() for t in (w, b))
    y = column_parallel(x, w, b, group, sequence=sequence, backend=backend)
    y.backward(shard(dy, 1, group))
    return y.detach(), x.grad, w.grad, b.grad


def _partial_sums(group: Any, dtype: torch.dtype) -> Tensor:
    """As in engines: every rank multiplies its part, and the products are added up."""
    x, w, b, _ = problem(dtype)
    part = rlk_kernels.linear(shard(x, 1, group), shard(w, 1, group), backend="torch")
    torch.distributed.all_reduce(part, group=group)
    return part + b


CASES = pytest.mark.parametrize(
    ("sequence", "dtype", "backend"),
    [
        (False, torch.bfloat16, "torch"),
        (True, torch.bfloat16, "torch"),
        (True, torch.float32, "torch"),
        # In Triton's interpreter, products of bf16 are wrong.
        (False, torch.float32, "triton"),
    ],
)


@CASES
def test_row_parallel_has_the_bits_of_one_rank(sequence, dtype, backend):
    y, dx, dw, db = alone(dtype, backend)
    ranks = on_ranks(2, _row, sequence, dtype, backend)
    for rank, (own_y, *_, own_db) in enumerate(ranks):
        assert same(own_y, y.chunk(2)[rank] if sequence else y)
        assert same(own_db, db)
    assert same(torch.cat([r[1] for r in ranks], 1), dx)
    assert same(torch.cat([r[2] for r in ranks], 1), dw)


@CASES
def test_column_parallel_has_the_bits_of_one_rank(sequence, dtype, backend):
    y, dx, dw, db = alone(dtype, backend)
    ranks = on_ranks(4, _column, sequence, dtype, backend)
    for rank, own in enumerate(ranks):
        assert same(own[1], dx.chunk(4)[rank] if sequence else dx)
    assert same(torch.cat([r[0] for r in ranks], 1), y)
    for i, whole in ((2, dw), (3, db)):
        assert same(torch.cat([r[i] for r in ranks]), whole)


def test_partial_sums_have_other_bits():
    """The fault that gathering avoids: these tests see it."""
    y = alone()[0]
    (added, _) = on_ranks(2, _partial_sums, torch.bfloat16)
    assert not same(added, y)


def _order(group: Any) -> tuple[Tensor, Tensor]:
    """Columns, and rows, of two blocks. Every rank has a part of each."""
    whole = torch.arange(16)
    own = torch.cat([shard(block, 0, group) for block in whole.chunk(2)])
    rows = own[:, None].expand(-1, 4).contiguous()
    return gather_columns(own[None], group, 2)[0], rows_to_columns(rows, group, 2)[:, 0]


def test_fused_operators_are_gathered_in_the_order_of_one_rank():
    for columns, rows in on_ranks(2, _order):
        assert columns.tolist() == rows.tolist() == list(range(16))


def test_what_ranks_cannot_share_is_refused():
    class ThreeRanks:
        def size(self) -> int:
            return 3

    x, w, _, _ = problem(torch.bfloat16)
    with pytest.raises(UnsupportedShape, match="64 out features cannot be divided among 3 ranks"):
        row_parallel(x, w, None, ThreeRanks())
    with pytest.raises(UnsupportedShape, match="shard of 24 columns; a multiple of 16"):
        logp_parallel(torch.zeros(2, 24), torch.zeros(2, dtype=torch.int64), ThreeRanks())


V, H = 48, 8


def table() -> tuple[Tensor, Tensor, Tensor]:
    """ids[2, 9], weight[V, H] with -0 and NaN in it, dy."""
    ids = torch.randint(0, V, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, :4] = torch.tensor([0, V - 1, 5, 5])
    weight, dy = wide(V, H, seed=2), wide(2, 9, H, seed=3)
    weight[5, 0], weight[5, 1] = -0.0, torch.nan
    dy[0, 0, 0] = -0.0
    return ids, weight, dy


def _embedding(group: Any) -> tuple[Tensor, Tensor]:
    ids, weight, dy = table()
    own = shard(weight, 0, group).requires_grad_()
    y = embedding_parallel(ids, own, group, backend="torch")
    y.backward(dy)
    return y.detach(), own.grad


def test_embedding_has_the_bits_of_one_rank():
    ids, weight, dy = table()
    y = rlk_kernels.embedding(ids, weight.requires_grad_(), backend="torch")
    y.backward(dy)
    ranks = on_ranks(2, _embedding)
    assert bits(y.detach())[0, 2, 0] == -(2**15), "-0 is not +0"
    assert all(same(own, y.detach()) for own, _ in ranks)
    assert same(torch.cat([g for _, g in ranks]), weight.grad)


def vocabulary(columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits[M, columns], targets (the last is ignored), dlogp."""
    logits = wide(M, columns, seed=4, dtype=torch.float32) * 8
    target = torch.randint(0, columns, (M,), generator=torch.Generator().manual_seed(5))
    target[0], target[1], target[-1] = 0, columns - 1, -1
    return logits, target, wide(M, seed=6, dtype=torch.float32)


def _logp(group: Any, columns: int, step: int, backend: str) -> tuple[Tensor, Tensor]:
    logits, target, g = vocabulary(columns)
    padded = torch.nn.functional.pad(logits, (0, step * group.size() - columns), value=-torch.inf)
    own = shard(padded, 1, group).requires_grad_()
    y = logp_parallel(own, target, group, backend=backend)
    y.backward(g)
    return y.detach(), own.grad


# 1040 = 65 leaves; shards begin inside subtrees, and the last shards contain padding.
@pytest.mark.parametrize(
    ("backend", "world", "columns", "step"),
    [
        ("torch", 2, 96, 48),
        ("torch", 4, 1037, 272),
        ("triton", 2, 1037, 528),
        ("triton", 3, 700, 240),
    ],
)
def test_logp_has_the_bits_of_one_rank(backend, world, columns, step):
    logits, target, g = vocabulary(columns)
    y = rlk_kernels.logp(logits.requires_grad_(), target, backend=backend)
    y.backward(g)
    ranks = on_ranks(world, _logp, columns, step, backend)
    assert all(same(own, y.detach()) for own, _ in ranks)
    assert same(torch.cat([d for _, d in ranks], 1)[:, :columns], logits.grad)
    assert y[-1] == 0
    assert bool((y[:-1] < 0).all())


def head(columns: int) -> tuple[Tensor, ...]:
    """hidden[M, K], weight[columns, K], bias, targets and upstream gradients of a head."""
    _, target, g = vocabulary(columns)
    g[3] = 0.0
    return wide(M, K, seed=8), wide(columns, K, seed=9), wide(columns, seed=10), target, g


def _linear_logp(group: Any, columns: int, step: int) -> tuple[Tensor, ...]:
    linear_logp.ROWS, linear_logp.COLUMNS = 5, 48  # many pieces
    hidden, weight, bias, target, g = head(columns)
    pad = step * group.size() - columns
    weight = torch.nn.functional.pad(weight, (0, 0, 0, pad))
    bias = torch.nn.functional.pad(bias, (0, pad))
    own = [shard(t, 0, group).requires_grad_() for t in (weight, bias)]
    y = linear_logp.linear_logp_parallel(
        hidden.requires_grad_(), own[0], target, group, bias=own[1], vocabulary=columns,
        backend="torch",
    )  # fmt: skip
    y.backward(g)
    return y.detach(), hidden.grad, own[0].grad, own[1].grad


def test_linear_logp_has_the_bits_of_one_rank():
    columns, step = 187, 96
    hidden, weight, bias, target, g = head(columns)
    whole = rlk_kernels.linear_logp(hidden, weight, target, bias=bias, backend="torch")
    for t in (hidden, weight, bias):
        t.requires_grad_()
    logits = rlk_kernels.linear(hidden, weight, bias, out_dtype=torch.float32, backend="torch")
    rlk_kernels.logp(logits, target, backend="torch").backward(g)
    one = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    linear_logp.linear_logp_parallel(
        one[0], one[1], target, None, bias=one[2], backend="torch"
    ).backward(g)
    for t, of_one in zip((hidden, weight, bias), one, strict=True):
        assert same(of_one.grad, t.grad)
    ranks = on_ranks(2, _linear_logp, columns, step)
    for y, dh, *_ in ranks:
        assert same(y, whole)
        assert same(dh, hidden.grad)
    for i, gradient in ((2, weight.grad), (3, bias.grad)):
        assert same(torch.cat([r[i] for r in ranks])[:columns], gradient)
        assert not torch.cat([r[i] for r in ranks])[columns:].any()


def _entropy(group: Any, columns: int, step: int) -> tuple[Tensor, ...]:
    linear_logp.ROWS, linear_logp.COLUMNS = 5, 48
    hidden, weight, _, target, g = head(columns)
    world = 1 if group is None else group.size()
    weight = torch.nn.functional.pad(weight, (0, 0, 0, step * world - columns))
    own = (weight if group is None else shard(weight, 0, group)).requires_grad_()
    y, entropy = linear_logp.linear_logp_parallel(
        hidden.requires_grad_(), own, target, group, vocabulary=columns, return_entropy=True,
        backend="torch",
    )  # fmt: skip
    (y * g + entropy * g.flip(0)).sum().backward()
    return entropy.detach(), hidden.grad, own.grad


def test_entropy_has_the_bits_of_one_rank():
    columns, step = 187, 96
    hidden, weight, _, target, g = head(columns)
    entropy, dh, dw = _entropy(None, columns, columns)
    for t in (hidden, weight):
        t.requires_grad_()
    y, whole = rlk_kernels.linear_logp(hidden, weight, target, return_entropy=True, backend="torch")
    (y * g + whole * g.flip(0)).sum().backward()
    assert same(entropy, whole.detach())
    # `linear_logp` adds the two gradients before it rounds either.
    for own, expected in ((dh, hidden.grad), (dw, weight.grad)):
        assert torch.allclose(own.float(), expected.float(), rtol=0.02, atol=1e-3)
    ranks = on_ranks(2, _entropy, columns, step)
    assert all(same(r[0], entropy) for r in ranks)
    assert all(same(r[1], dh) for r in ranks)
    assert same(torch.cat([r[2] for r in ranks])[:columns], dw)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("columns", [151_936, 128_256, 32_000, 1_024])
def test_a_shard_is_made_of_a_few_whole_subtrees(columns, tp):
    step, at = columns // tp, 0
    for rank in range(tp):
        trees = list(subtrees(rank * step, (rank + 1) * step))
        assert 1 <= len(trees) <= 16
        for tree in trees:
            assert tree.columns[0] == at
            assert at % (LEAF << tree.level) == 0
            at = tree.columns[1]
    assert at == columns


def test_nodes_that_are_merged_in_another_order_have_other_bits():
    """Shards that are merged from left to right are another tree."""
    logits = wide(64, 16 * 7, seed=7, dtype=torch.float32)
    trees = list(subtrees(0, 48)) + list(subtrees(48, 112))
    nodes = [shards.node_of(logits[:, a:b], "torch") for a, b in (t.columns for t in trees)]
    root = functools.reduce(shards.merge_pair, nodes)
    assert same(shards.merge([Subtree(0, 0)], [nodes[0]]), nodes[0])
    assert not same(shards.merge(trees, nodes), root)


def test_own_rows_are_what_is_left_of_gathered_ones():
    assert on_ranks(2, lambda group: own_rows(torch.arange(6), group).tolist()) == [
        [0, 1, 2],
        [3, 4, 5],
    ]


LIMITS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "raw_logprobs": True, "backend": "torch"}


def _sampled(group: Any) -> tuple[Tensor, ...]:
    logits, _, _ = vocabulary(700)
    own = torch.nn.functional.pad(logits, (0, 20), value=-torch.inf)
    where = torch.arange(len(logits)) * 31, torch.arange(len(logits))
    return tuple(sample_parallel(shard(own, 1, group), *where, group, **LIMITS))


def test_ranks_draw_the_tokens_of_one_rank():
    logits, _, _ = vocabulary(700)
    where = torch.arange(len(logits)) * 31, torch.arange(len(logits))
    expected = rlk_kernels.sample(logits, *where, **LIMITS)
    for drawn in on_ranks(3, _sampled):
        assert all(same(a, b) for a, b in zip(drawn, expected, strict=True))
