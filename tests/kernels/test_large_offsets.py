"""Offsets into tensors of more than 2**31 elements, in every Triton kernel that runs interpreted.

The first and the last program of each axis run, on memory that is reserved and hardly touched; the
interpreter (`interpreter_dot.py`) raises where a whole number of 32 bits overflows, as an offset
would that wraps on a GPU. What is computed is not looked at.
"""

import inspect
import itertools

import pytest
import torch
import triton
import triton.language as tl
from rlk_kernels.losses.linear_grpo import kernels as loss_kernels
from rlk_kernels.matmul.accumulate.accumulate import accumulate
from rlk_kernels.matmul.accumulate.plan import PartialProduct, lo_accumulator
from rlk_kernels.matmul.product import product
from rlk_kernels.numerics.column_sum import kernels as column_sum
from rlk_kernels.ops.attention import backward, forward, sinks_kernels
from rlk_kernels.ops.attention.call import AttentionCall
from rlk_kernels.ops.embedding import kernels as embedding
from rlk_kernels.ops.kv_cache import kernels as kv_cache
from rlk_kernels.ops.linear_logp import launch as linear_logp
from rlk_kernels.ops.linear_logp.options import RowStatistics, options_of
from rlk_kernels.ops.logp import kernels as logp
from rlk_kernels.ops.norm_add_norm import kernels as norm_add_norm
from rlk_kernels.ops.norm_rope import kernels as norm_rope
from rlk_kernels.ops.rms_norm import kernels as rms_norm
from rlk_kernels.ops.rope import kernels as rope
from rlk_kernels.ops.swiglu import kernels as swiglu
from torch import arange, zeros
from triton.runtime import interpreter

FAR = 1 << 30
HALF = torch.float16
HOW = 1e-6, True, False
"""The epsilon of a norm, and whether it is cast as in HF and multiplies by 1 + weight."""
SPEC = options_of(torch.float32, 0.0, 1.0, 1.0)


def at_corners(self, *args, **kwargs):
    """`GridExecutor.__call__` of the programs at the ends of the grid, in the tensors' own
    memory."""
    known = inspect.getfullargspec(self.fn).args
    scope = interpreter._patch_lang(self.fn)
    try:
        arguments = inspect.getcallargs(
            self.fn, *args, **{name: x for name, x in kwargs.items() if name in known}
        )
        for name, x in arguments.items():
            arguments[name] = x if name in self.constexprs else interpreter._implicit_cvt(x)
        grid = (*self.grid, 1, 1)[:3]
        interpreter.interpreter_builder.set_grid_dim(*grid)
        for place in itertools.product(*({0, size - 1} for size in grid)):
            interpreter.interpreter_builder.set_grid_idx(*place)
            self.fn(**arguments)
    finally:
        scope.restore()


@pytest.fixture(autouse=True)
def only_corners_run(monkeypatch):
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", at_corners)


def vast(*shape, dtype=HALF):
    """Memory that nobody has touched: zeros."""
    return torch.empty(shape, dtype=dtype)


def spread(*shape, far, by=FAR):
    """Zeros whose dimension `far` has elements `by` apart."""
    strides = list(torch.empty(shape).stride())
    strides[far] = by
    size = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + 1
    return vast(size).as_strided(shape, strides)


def attend(q, k, v, table=None, **options):
    """Forward, and the backward where there is no table."""
    cu_q = torch.tensor([0, q.shape[0]], dtype=torch.int32)
    cu_k = cu_q if table is None else cu_q[1:]
    call = AttentionCall(q, k, v, cu_q, cu_k, table, True, 0.1, None)
    out, lse, _ = forward.forward(call, **options)
    if table is None:
        backward.backward(call, lse, out)


def attend_many(tokens, heads, dim):
    """The first block of rows of a long sequence, and a sequence of one token behind it."""
    q, k = vast(tokens, heads, dim), vast(tokens, 1, dim)
    cu = torch.tensor([0, tokens - 1, tokens], dtype=torch.int32)
    forward.forward(AttentionCall(q, k, k, cu, cu, None, True, 0.1, None), split=False)


def paged(k):
    table = torch.full((1, 4), k.shape[0] - 1, dtype=torch.int32)
    for split in (False, True):
        attend(zeros(3, 3, 16, dtype=HALF), k, k, table, split=split)


def statistics(t):
    z, n = zeros(t, 1), zeros(t)
    return RowStatistics(z, n, n, n, n, z)


def gradients_of_rows(e):
    t, v = e.shape
    rows, g = statistics(t), torch.ones(t)
    loss_kernels.rebase(e, torch.full((1, t), 100.0), rows, v)
    loss_kernels.clear_dead_rows(e, 0 * g, RowStatistics(*[torch.full((t, 1), torch.inf)] * 6))
    loss_kernels.scale_rows(e, g, e)
    linear_logp.store_id_gradients(e, arange(t)[:, None], rows, g[:, None], g, None, SPEC, 0, v)


def logits(x):
    row = zeros(x.shape[0])
    ids = arange(x.shape[0])
    logp.forward(x, ids, ids[:, None], 2, SPEC)
    logp.backward(x, ids, torch.stack([row, row], 1), row, SPEC)


def partial_sums(a, b, m, n):
    out = vast(m, n)
    lo = lo_accumulator(out, 2)
    for first in (True, False):
        accumulate(PartialProduct(a=a, b=b, out=out, lo=lo, trans_a=False, first=first, last=False))


def long_linear_logp(h, w):
    rows, _ = linear_logp.forward(h, w, None, arange(h.shape[0])[:, None], SPEC, True)
    g = torch.ones(h.shape[0])
    linear_logp.backward(
        h, w, None, arange(h.shape[0])[:, None], rows, g[:, None], g, g, SPEC, [True, True, False]
    )


LONG = (1 << 15) + 9, 1 << 16
MANY = (1 << 17) + 1
"""With 64 heads of 256 in each; more than 2**31 elements, both."""
CASES = {
    "rms_norm, rows": lambda: rms_norm.forward(spread(3, 64, far=0), None, zeros(64), *HOW),
    "rms_norm, residual": lambda: rms_norm.forward(
        spread(3, 64, far=0), spread(3, 64, far=0), zeros(64), *HOW
    ),
    "rms_norm, heads": lambda: rms_norm.forward(spread(2, 3, 8, far=1), None, zeros(8), *HOW),
    "rms_norm, long": lambda: rms_norm.forward(vast(*LONG), None, zeros(LONG[1]), *HOW),
    "rms_norm, gradient": lambda: rms_norm.backward(
        vast(*LONG), zeros(LONG[1]), vast(*LONG), vast(*LONG), 1e-6, False
    ),
    "norm_add_norm, rows": lambda: norm_add_norm.forward(
        spread(3, 64, far=0), spread(3, 64, far=0), zeros(64), zeros(64), 1e-6, False
    ),
    "norm_add_norm, long": lambda: norm_add_norm.forward(
        vast(*LONG), vast(*LONG), zeros(LONG[1]), zeros(LONG[1]), 1e-6, False
    ),
    "column_sum": lambda: column_sum.sum_blocks(vast(*LONG)),
    "swiglu, rows": lambda: swiglu.forward(spread(3, 64, far=0), spread(3, 64, far=0)),
    "swiglu, gradient": lambda: swiglu.backward(*(vast(*LONG) for _ in range(3))),
    "rope, heads": lambda: rope.rotate(
        spread(2, 3, 8, far=1), spread(2, 3, 8, far=1), arange(2), zeros(4), None, 1.0, HALF, False
    ),
    "rope, tokens": lambda: rope.rotate(
        *[spread(3, 2, 8, far=0)] * 2, arange(3), zeros(4), None, 1.0, HALF, False
    ),
    "rope, long": lambda: rope.rotate(
        vast(MANY, 64, 256), vast(MANY, 1, 256), arange(MANY), zeros(128), None, 1.0, HALF, False
    ),
    "norm_rope, long": lambda: norm_rope.norm_rotate(
        vast(MANY, 64, 256), vast(MANY, 1, 256), zeros(256), zeros(256),
        arange(MANY), zeros(128), None, *HOW, HALF, False,
    ),
    "embedding, rows": lambda: embedding.forward(arange(3), spread(3, 64, far=0)),
    "embedding, long": lambda: embedding.forward(arange(LONG[0]), vast(1, LONG[1]).expand(LONG)),
    "embedding, gradient": lambda: embedding.backward(
        arange(LONG[0]) - LONG[0] + 1, vast(*LONG), 1  # the last token alone is in the table
    ),
    "write_kv_cache, heads": lambda: kv_cache.write(
        spread(2, 2, 3, 8, far=2), spread(2, 2, 3, 8, far=2), spread(2, 3, 8, far=1),
        spread(2, 3, 8, far=1), arange(2),
    ),
    "write_kv_cache, blocks": lambda: kv_cache.write(
        spread(3, 2, 2, 8, far=0), spread(2, 3, 2, 8, far=1), *[zeros(3, 2, 8)] * 2, 2 * arange(3)
    ),
    "logp, rows": lambda: logits(spread(3, 40, far=0)),
    "logp, long": lambda: logits(vast(*LONG)),
    "logits' gradients": lambda: gradients_of_rows(spread(3, 64, far=0)),
    "a loss's scale": lambda: loss_kernels.scale(vast(*LONG), torch.tensor(1.0)),
    "linear_logp": lambda: long_linear_logp(spread(3, 64, far=0), spread(3, 64, far=0)),
    "linear, rows": lambda: product(
        spread(3, 64, far=0), spread(3, 64, far=0), None, False, True, zeros(3, 3)
    ),
    "linear, K": lambda: product(
        spread(3, 33, far=1, by=FAR >> 4), vast(33, 3), None, False, False, zeros(3, 3)
    ),
    "linear, long": lambda: product(
        vast(LONG[0], 8), vast(LONG[1], 8), None, False, True, vast(*LONG)
    ),
    "partial sums": lambda: partial_sums(spread(3, 3, far=0), spread(3, 24, far=0), 3, 24),
    "partial sums, long": lambda: partial_sums(vast(LONG[0], 8), vast(8, LONG[1]), *LONG),
    "attention, heads of q": lambda: attend(spread(3, 3, 16, far=1), *[zeros(3, 3, 16).half()] * 2),
    "attention, heads of k": lambda: attend(zeros(3, 3, 16).half(), *[spread(3, 3, 16, far=1)] * 2),
    "attention, tokens": lambda: attend(*[spread(3, 3, 16, far=0)] * 3),
    "attention, long": lambda: attend_many(MANY, 64, 256),
    "paged_attention, blocks": lambda: paged(spread(3, 1, 3, 16, far=0)),
    "paged_attention, places": lambda: paged(spread(1, 4, 3, 16, far=1)),
    "paged_attention, heads": lambda: paged(spread(3, 2, 3, 16, far=2)),
    "sinks": lambda: sinks_kernels.gradient_parts(
        *sinks_kernels.add(vast(MANY, 64, 256), zeros(64, MANY), zeros(64)), zeros(64),
        vast(MANY, 64, 256),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_offsets_have_64_bits(name):
    CASES[name]()


@triton.jit
def _narrow_kernel(x_ptr, stride):
    tl.load(x_ptr + tl.program_id(0) * stride)


def test_an_offset_of_32_bits_is_noticed():
    with pytest.raises(Exception, match="int32 overflow"):
        _narrow_kernel[(3,)](spread(3, 1, far=0), FAR)
