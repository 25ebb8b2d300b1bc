"""On a GPU: the gradients of attention, against float64 and bit for bit."""

import pytest
import rlk_kernels as rk
import torch
from covering import pairwise
from kernel_suite import attention_truth, packed, same, torch_attention, within_budget
from rlk_kernels.device import facts
from rlk_kernels.ops.attention import backward as attention_backward
from rlk_kernels.ops.attention import forward as attention_forward
from rlk_kernels.ops.attention.call import AttentionCall

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2, 128), (6, 6, 80), (7, 1, 64), (4, 2, 256)])
def test_gradients_are_right_the_same_in_20_runs_and_free_of_neighbours(dtype, shape):
    lens_q, lens_k = [100, 1, 257], [100, 300, 400]
    q, k, v, cu_q, cu_k = packed(lens_q, lens_k, *shape, dtype, "cuda")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = rk.attention(*leaves, cu_q, cu_k)
    do = torch.randn_like(out)
    runs = [torch.autograd.grad(out, leaves, do, retain_graph=True) for _ in range(20)]
    assert all(same(grads, runs[0]) for grads in runs[1:])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    exact = torch.autograd.grad(attention_truth(*wide, cu_q, cu_k)[0], wide, do.double())
    torch_leaves = [x.detach().requires_grad_() for x in leaves]
    torchs = torch.autograd.grad(torch_attention(*torch_leaves, cu_q, cu_k), torch_leaves, do)
    for value, truth, torch_value in zip(runs[0], exact, torchs, strict=True):
        assert within_budget(value, truth, torch_value, dtype)
    # dq of the last sequence alone, and of its last 57 queries alone
    for count in (257, 57):
        part = slice(358 - count, 358)
        lone = [q.detach()[part], *(x.detach()[400:] for x in (k, v))]
        lone = [x.requires_grad_() for x in lone]
        bounds = [torch.tensor([0, m], device="cuda") for m in (count, 400)]
        dq = torch.autograd.grad(rk.attention(*lone, *bounds), lone, do[part])[0]
        assert torch.equal(dq, runs[0][0][part])


BACKWARD = [
    ([100, 1, 333, 257], [100, 1100, 500, 257]),
    ([5, 0, 64, 3, 7], [0, 7, 64, 900, 200]),
    ([640], [640]),
]


def backward(lens_q, lens_k, shape, dtype, causal, window, behind=7):
    """The arguments' gradients, of tensors with rows of NaN behind the last sequence."""
    q, k, v, cu_q, cu_k = packed(lens_q, lens_k, *shape, dtype, "cuda")
    rows = [torch.cat([x, x.new_full((behind, *x.shape[1:]), float("nan"))]) for x in (q, k, v)]
    scale = shape[2] ** -0.5
    sizes = (cu_q.int(), cu_k.int())
    call = AttentionCall(*rows, *sizes, None, causal, scale, window)
    _, lse, _ = attention_forward.forward(call)
    do = torch.cat([torch.randn_like(q), q.new_full((behind, *q.shape[1:]), float("nan"))])
    return [attention_backward.backward(call, lse, do, special) for special in (True, False)]


@pytest.mark.parametrize(
    ("dtype", "shape", "window", "causal"),
    pairwise(
        DTYPES[:2], [(4, 1, 128), (2, 2, 64), (7, 1, 64), (8, 1, 128)], [None, 200], [True, False]
    ),
)
def test_the_backward_for_hopper_has_the_bits_of_the_other(dtype, shape, window, causal):
    if not facts(torch.device("cuda:0")).gluon:
        pytest.skip("hopper/dq.py is for Hopper and the Triton of device.GLUON_TRITON")
    for lens in BACKWARD:
        special, plain = backward(*lens, shape, dtype, causal, window)
        assert special[3] == "triton/hopper"
        assert same(special[:3], plain[:3]), lens
        for grad, lengths in zip(special, (lens[0], lens[1], lens[1]), strict=False):
            assert bool(grad[: sum(lengths)].isfinite().all())
            assert not bool(grad[sum(lengths) :].any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 2, 128), (4, 4, 64), (6, 6, 80)])
def test_outputs_and_gradients_are_free_of_the_packing(dtype, shape):
    lens = [200, 700, 31]
    q, k, v, cu, _ = packed(lens, lens, *shape, dtype, "cuda")
    do = torch.randn_like(q)

    def computed(part, bounds):
        leaves = [x[part].detach().requires_grad_() for x in (q, k, v)]
        out = rk.attention(*leaves, bounds, bounds)
        return out.detach(), *torch.autograd.grad(out, leaves, do[part])

    whole = computed(slice(None), cu)
    for b, n in enumerate(lens):
        part = slice(int(cu[b]), int(cu[b + 1]))
        lone = computed(part, torch.tensor([0, n], device="cuda"))
        assert same(lone, [x[part] for x in whole])
    order = [2, 0, 1]
    index = torch.cat([torch.arange(int(cu[b]), int(cu[b + 1])) for b in order]).cuda()
    shuffled = torch.tensor([0, *[lens[b] for b in order]]).cumsum(0).cuda()
    assert same(computed(index, shuffled), [x[index] for x in whole])
