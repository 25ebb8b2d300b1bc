"""Would the tests notice? Each invariance claim is broken on purpose, and its test must fail."""

import math

import pytest
import rlk_kernels as rk
import torch
import triton
import triton.language as tl
from kernel_suite import Row, differing_rows, packed, row_operators
from rlk_kernels.numerics import error_free
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.attention import portable as attention_portable


def broken(name, run, dtype=torch.float32, size=96):
    op = row_operators(dtype, "cpu", size=size)[name]
    return Row(op.make, run, op.truth, op.torch_run)


def notices(op: Row, backend: str = "torch", rows: int = 129) -> bool:
    batch = op.make(rows)
    picked = [torch.arange(m) for m in (1, 2, 3, 7, 16, 17, 33, 64, 65)]
    return any(differing_rows(op, backend, batch, p) for p in picked)


def test_a_split_of_k_chosen_by_the_batch_is_noticed():
    weight = torch.randn(89, 101)

    def run(x, backend):
        if x.shape[0] >= 64:
            return rk.linear(x, weight)
        halves = [rk.linear(x[:, s], weight[:, s]) for s in (slice(0, 50), slice(50, 101))]
        return halves[0] + halves[1]

    assert notices(broken("linear", run))


def test_a_block_order_that_depends_on_the_batch_is_noticed():
    """Sums over 8 columns at a time, the block size taken from the batch."""

    def run(x, backend):
        block = 8 if x.shape[0] > 16 else 32
        total = torch.zeros(x.shape[0])
        for start in range(0, x.shape[1], block):
            total = total + x[:, start : start + block].square().cumsum(-1)[:, -1]
        return x / (total[:, None] / x.shape[1] + 1e-6).sqrt()

    assert notices(broken("rms_norm", run))


def test_a_mean_of_a_block_of_rows_is_noticed():
    """A layer norm that subtracts the mean of 16 rows."""

    def run(x, backend):
        mean = torch.cat([part.mean().expand(len(part)) for part in x.split(16)])[:, None]
        return rk.layer_norm(x, torch.ones(x.shape[1]), 1e-6) + mean

    assert notices(broken("layer_norm", run))


def test_a_sum_in_the_order_of_arrival_is_noticed():
    """What an atomic does: the partial sums of a row are added in no order of the row's own."""
    generator = torch.Generator().manual_seed(0)

    def run(x, backend):
        parts = x.square().view(x.shape[0], -1, 1).split(8, dim=1)
        order = torch.randperm(len(parts), generator=generator).tolist()
        total = torch.zeros(x.shape[0], 1)
        for i in order:
            total = total + parts[i].sum(1)
        return x / (total / x.shape[1] + 1e-6).sqrt()

    assert notices(broken("rms_norm", run))


def test_a_grid_shared_by_the_batch_is_noticed(monkeypatch):
    """The exact product with one grid for all rows instead of one per row."""
    monkeypatch.setattr(
        error_free, "_slice",
        lambda x, exponent, width: (x.double() * 2.0 ** (9 - int(exponent.max()))).round_(),
    )  # fmt: skip
    weight = torch.randn(89, 101).bfloat16()
    scale = torch.logspace(-2, 2, 129)[:, None]

    def run(x, backend):
        return rk.linear((x * scale[: x.shape[0]]).bfloat16(), weight)

    assert notices(broken("linear", run, torch.bfloat16))


def prefill_equals_decode(backend, n=100, dim=16):
    q, k, v, cu, _ = packed([n], [n], 2, 1, dim, torch.float32, "cpu")
    whole = rk.attention(q, k, v, cu, cu, backend=backend)
    for p in (0, 64, n - 1):
        ends = torch.tensor([0, 1]), torch.tensor([0, p + 1])
        one = rk.attention(q[p : p + 1], k[: p + 1], v[: p + 1], *ends, backend=backend)
        if not torch.equal(one, whole[p : p + 1]):
            return False
    return True


def test_attention_is_intact_before_it_is_broken(backend, monkeypatch):
    monkeypatch.setattr(attention_forward, "CHUNK", 64)
    assert prefill_equals_decode(backend)


def test_a_chunk_size_that_depends_on_the_batch_is_noticed(monkeypatch):
    """Flash-decoding as usual: the split of the keys follows the number of queries."""
    forward = attention_forward.forward

    def by_batch(call):
        monkeypatch.setattr(attention_forward, "CHUNK", 32 if call.q.shape[0] == 1 else 1024)
        return forward(call)

    monkeypatch.setattr(attention_forward, "forward", by_batch)
    assert not prefill_equals_decode("triton")


def test_blocks_of_keys_aligned_to_the_query_are_noticed(monkeypatch):
    """The portable chunks counted from the row's last key instead of from key 0."""
    weighted = attention_portable.weighted_sum

    def from_the_end(p, v):
        return weighted(p.flip(-1), v.flip(-2)) if p.shape[-1] % 2 else weighted(p, v)

    monkeypatch.setattr(attention_portable, "weighted_sum", from_the_end)
    monkeypatch.setattr(attention_portable, "CHUNK", 8)
    monkeypatch.setattr(
        attention_portable, "_weighted_chunk", lambda p, v: (p @ v.double()).float().double()
    )
    assert not prefill_equals_decode("torch")


def test_a_value_grid_shared_by_a_block_of_keys_is_noticed(monkeypatch):
    """Keys that a row does not see must not choose the grid of those it sees."""

    def shared(p, v):
        top = 2.0 ** math.ceil(math.log2(float(v.abs().max())))
        return p @ (v.double() / top * 256).round_() * top / 256

    monkeypatch.setattr(attention_portable, "_weighted_chunk", shared)
    q, k, v, cu, _ = packed([40], [40], 2, 1, 16, torch.float32, "cpu")
    v[30:] *= 100
    whole = rk.attention(q, k, v, cu, cu)
    ends = torch.tensor([0, 10])
    assert not torch.equal(rk.attention(q[:10], k[:10], v[:10], ends, ends), whole[:10])


@triton.jit
def _chunk_sum_kernel(x_ptr, y_ptr, K, SPLIT: tl.constexpr):
    """A row's sum in SPLIT pieces: the mutant below takes SPLIT from the batch."""
    row = tl.program_id(0)
    total = 0.0
    for piece in range(SPLIT):
        cols = piece * (128 // SPLIT) + tl.arange(0, 128 // SPLIT)
        total += tl.sum(tl.load(x_ptr + row * K + cols, mask=cols < K, other=0.0), 0)
    tl.store(y_ptr + row, total)


@pytest.mark.parametrize("honest", [True, False])
def test_a_triton_split_chosen_by_the_batch_is_noticed(honest):
    def run(x, backend):
        y = torch.empty(x.shape[0])
        split = 4 if honest or x.shape[0] < 64 else 1
        _chunk_sum_kernel[(x.shape[0],)](x, y, x.shape[1], split)
        return y

    assert notices(broken("rms_norm", run), "triton") is not honest


def test_an_unwritten_output_element_is_noticed():
    """within_budget is written so that NaN fails, and so does empty."""
    from kernel_suite import within_budget

    truth = torch.zeros(3, dtype=torch.float64)
    assert within_budget(torch.zeros(3), truth, torch.zeros(3), torch.float32)
    hole = torch.tensor([0.0, math.nan, 0.0])
    assert not within_budget(hole, truth, torch.zeros(3), torch.float32)
    assert not within_budget(torch.zeros(0), truth[:0], torch.zeros(0), torch.float32)
