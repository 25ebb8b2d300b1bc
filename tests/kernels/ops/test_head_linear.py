"""`head_linear`: the bits of `linear` of each head, from tensors as latent attention has them."""

from dataclasses import replace

import pytest
import rlk_kernels as rk
import torch
from kernel_suite import LIMIT, rand
from rlk_kernels.device import facts
from rlk_kernels.ops.head_linear import launch, operator
from rlk_kernels.ops.head_linear.operator import head_linear_ref
from triton.tools.tensor_descriptor import TensorDescriptor

T, H, WIDTH, LATENT, ROTATED = 37, 3, 64, 128, 24
BACKENDS = ("torch", "triton", "tma")
"""tma: the kernel that reads with tensor maps, which the interpreter runs as well."""


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    if request.param != "tma":
        return request.param
    with_tma(monkeypatch)
    return "triton"


def with_tma(monkeypatch):
    here = replace(facts(torch.device("cpu")), tma=True, overlaps=False)
    monkeypatch.setattr(launch, "facts", lambda device: here)

    def described(x, shape, row, box):
        # The interpreter reads the tensor of a descriptor, which has an address alone on a GPU.
        return TensorDescriptor(x.detach().as_strided(shape, (row, 1)), [*shape], [row, 1], [*box])

    monkeypatch.setattr(launch, "_map", described)


def inputs(dtype):
    """(queries with rotated features behind, the weight of all heads, latents of each head)."""
    q = rand(T, H, WIDTH + ROTATED, dtype=dtype, device="cpu", seed=1)
    weight = rand(H, WIDTH + 48, LATENT, dtype=dtype, device="cpu", seed=2)
    return q, weight, rand(T, H, LATENT, dtype=dtype, device="cpu", seed=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_head_has_the_bits_of_linear(backend, dtype, request):
    q, weight, latents = inputs(dtype)
    keys, values = weight[:, :WIDTH].mT, weight[:, WIDTH:]
    if request.node.callspec.params["backend"] == "tma":
        assert launch.can_run(q[..., :WIDTH], keys) == (dtype != torch.float32)
    whole = rk.head_linear(q[..., :WIDTH], keys, q[..., WIDTH:], backend=backend)
    assert rk.last_backend("head_linear") == backend
    outputs = rk.head_linear(latents, values, backend=backend)
    assert whole.shape == (T, H, LATENT + ROTATED)
    assert outputs.shape == (T, H, 48)
    assert torch.equal(whole[..., LATENT:], q[..., WIDTH:])
    for h in range(H):
        one = rk.linear(q[:, h, :WIDTH], keys[h], backend=backend)
        assert torch.equal(whole[:, h, :LATENT], one)
        assert torch.equal(outputs[:, h], rk.linear(latents[:, h], values[h], backend=backend))
    for rows in (slice(0, 1), slice(5, 22), slice(0, 0)):
        part = rk.head_linear(q[rows, :, :WIDTH], keys, q[rows, :, WIDTH:], backend=backend)
        assert torch.equal(part, whole[rows])


def test_a_value_that_is_not_finite_stays_in_its_head(backend):
    _, weight, latents = inputs(torch.float16)
    clean = rk.head_linear(latents, weight[:, WIDTH:], backend=backend)
    latents[:, 1] = float("nan")
    weight[2] = float("inf")
    got = rk.head_linear(latents, weight[:, WIDTH:], backend=backend)
    assert torch.equal(got[:, 0], clean[:, 0])
    assert bool(got[:, 1].isnan().all())


def test_gradients_are_those_of_float64(backend):
    q, weight, _ = (x.requires_grad_() for x in inputs(torch.float16))
    keys = weight[:, :WIDTH].mT
    y = rk.head_linear(q[..., :WIDTH], keys, q[..., WIDTH:], backend=backend)
    up = rand(*y.shape, dtype=torch.float16, device="cpu", seed=4)
    exact = [x.detach().double().requires_grad_() for x in (q, weight)]
    truth = head_linear_ref(exact[0][..., :WIDTH], exact[1][:, :WIDTH].mT, exact[0][..., WIDTH:])
    wanted = truth, *torch.autograd.grad(truth, exact, up.double())
    grads = torch.autograd.grad(y, (q, weight), up)
    for value, true in zip((y, *grads), wanted, strict=True):
        assert float((value.detach().double() - true).norm() / true.norm()) <= LIMIT[torch.float16]


def test_what_the_kernel_cannot_read_is_computed_by_expert(monkeypatch):
    x = rand(4, H, 64, dtype=torch.bfloat16, device="cpu", seed=5)
    weight = rand(H, 48, 64, dtype=torch.bfloat16, device="cpu", seed=6)
    with_tma(monkeypatch)
    assert launch.can_run(x, weight)
    assert launch.can_run(x, weight.mT.contiguous().mT)
    assert not launch.can_run(x[:0], weight)
    assert not launch.can_run(x.transpose(0, 1).contiguous().transpose(0, 1), weight)
    assert not launch.can_run(x[..., :40], weight[..., :40])  # a part of a step of the sum
    assert not launch.can_run(x.flatten()[1 : 1 + 3 * H * 64].view(3, H, 64), weight)
    assert not launch.can_run(x[:, :1].expand(-1, H, -1), weight)
    assert not launch.can_run(x, weight[:1].expand(H, -1, -1))
    assert not launch.can_run(
        x, rand(H, 48, 128, dtype=torch.bfloat16, device="cpu", seed=7)[..., ::2]
    )


def test_opcheck(backend):
    x, weight, rest = (
        rand(*shape, dtype=torch.float32, device="cpu", seed=8).requires_grad_()
        for shape in ((3, 2, 16), (2, 5, 16), (3, 2, 4))
    )
    torch.library.opcheck(operator._head_linear, (x, weight, rest, backend))
