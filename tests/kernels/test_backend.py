"""Which backend runs, that it can be asked, and the errors when it cannot."""

import contextlib
from dataclasses import replace

import planning
import pytest
import rlk_kernels as rk
import torch
from rlk_kernels import custom_op, device, private_api
from rlk_kernels.matmul import plan as matmul
from rlk_kernels.matmul import product
from torch._subclasses.fake_tensor import FakeTensorMode

X, W = torch.randn(3, 8), torch.randn(5, 8)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("RLK_BACKEND", raising=False)
    rk.reset_backend_calls()


def test_public_names():
    errors = ["KernelError", "UnknownBackend", "UnsupportedDevice", "UnsupportedDtype"]
    errors += ["UnsupportedShape", "KernelFailed"]
    operators = ["attention", "embedding", "linear", "linear_grpo_loss", "linear_logp", "logp"]
    operators += ["group_advantages", "paged_attention", "rms_norm", "rope", "swiglu", "softcap"]
    operators += ["clamped_swiglu", "activation", "layer_norm", "position_scale"]
    operators += ["gated_delta_rule", "cached_gated_delta_rule", "delta_gates", "gated_rms_norm"]
    operators += ["causal_conv1d", "cached_causal_conv1d", "add_lora"]
    operators += ["lora_shrink", "lora_expand", "sample", "kept_tokens"]
    operators += ["linear_sample"]
    operators += ["latent_attention", "paged_latent_attention"]
    operators += [
        "norm_add_norm",
        "norm_rope",
        "write_kv_cache",
        "route",
        "route_corrected",
        "group_by_expert",
    ]
    operators += [
        "grouped_linear",
        "grouped_swiglu",
        "head_linear",
        "combine_experts",
        "load_balancing_loss",
    ]
    operators += ["router_z_loss", "policy_loss", "linear_policy_loss", "dpo_loss"]
    about = ["backend_calls", "last_backend", "reset_backend_calls", "warm_up"]
    about += ["ExpertGroups", "Schedule", "paged_schedule", "warm_up_paged_attention"]
    about += ["warm_up_experts", "warm_up_paged_latent_attention", "Sampled"]
    assert sorted(rk.__all__) == sorted(errors + operators + about)


def test_a_cpu_tensor_gets_the_portable_backend_and_it_is_recorded():
    assert rk.last_backend("linear") is None
    rk.linear(X, W)
    assert rk.last_backend("linear") == "torch"
    assert rk.backend_calls() == {("linear", "torch"): 1}


def test_the_argument_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("RLK_BACKEND", "triton")
    rk.linear(X, W)
    assert rk.last_backend("linear") == "triton"
    rk.linear(X, W, backend="torch")
    assert rk.last_backend("linear") == "torch"


@pytest.mark.parametrize("where", ["argument", "environment"])
def test_an_unknown_backend_is_named(where, monkeypatch):
    monkeypatch.setenv("RLK_BACKEND", "cuda" if where == "environment" else "")
    with pytest.raises(rk.UnknownBackend, match=r"cuda.*choose from"):
        rk.linear(X, W, backend="cuda" if where == "argument" else None)


def test_triton_without_a_gpu_is_an_error_and_not_the_other_backend(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(rk.UnsupportedDevice, match="backend='torch'"):
        rk.linear(X, W, backend="triton")
    assert rk.backend_calls() == {}


def test_triton_refuses_float64():
    with pytest.raises(rk.UnsupportedDtype, match="float64"):
        rk.linear(X.double(), W.double(), backend="triton")


def test_no_rows_are_fine(backend):
    empty = torch.empty(0, 8)
    none = torch.tensor([0, 0])
    assert rk.linear(empty, W, backend=backend).shape == (0, 5)
    assert rk.rms_norm(empty, W[0], 1e-6, backend=backend).shape == (0, 8)
    assert rk.swiglu(empty, empty, backend=backend).shape == (0, 8)
    assert rk.softcap(empty, 2.0, backend=backend).shape == (0, 8)
    clamp = {"alpha": 1.7, "limit": 7.0, "backend": backend}
    assert rk.clamped_swiglu(empty, empty, **clamp).shape == (0, 8)
    assert rk.activation(empty, "relu2", backend=backend).shape == (0, 8)
    assert rk.layer_norm(empty, W[0], 1e-6, backend=backend).shape == (0, 8)
    positions = torch.empty(0).long()
    assert rk.position_scale(positions, beta=0.1, context=4, backend=backend).shape == (0,)
    assert rk.embedding(torch.empty(0).long(), W, backend=backend).shape == (0, 8)
    assert rk.logp(empty, torch.empty(0).long(), backend=backend).shape == (0,)
    assert rk.sample(empty, positions, positions, top_k=3, backend=backend).ids.shape == (0,)
    assert rk.kept_tokens(empty, top_p=0.5, backend=backend).shape == (0, 8)
    drawn = rk.linear_sample(empty, W, positions, positions, raw_logprobs=True, backend=backend)
    assert {len(x) for x in drawn} == {0}
    lora = torch.ones(1, 2, 8), torch.ones(1, 5, 2), torch.ones(1)
    assert rk.add_lora(empty, empty[:, :5], *lora, backend=backend).shape == (0, 5)
    heads = torch.empty(0, 2, 8)
    assert rk.attention(heads, heads, heads, none, none, backend=backend).shape == (0, 2, 8)
    out = rk.rope(heads, heads, torch.empty(0).long(), theta=1e4, backend=backend)
    assert out[0].shape == (0, 2, 8)


def test_no_features_are_fine_and_have_gradients_of_no_numbers(backend):
    x, w = torch.zeros(3, 0, requires_grad=True), torch.zeros(5, 0, requires_grad=True)
    y = rk.linear(x, w, torch.ones(5), backend=backend)
    assert torch.equal(y, torch.ones(3, 5))
    grads = torch.autograd.grad(y.sum() + rk.swiglu(x, x, backend=backend).sum(), (x, w))
    assert [g.shape for g in grads] == [x.shape, w.shape]


def test_registration_passes_torchs_own_check():
    ops = torch.ops.rlk
    torch.library.opcheck(ops.gemm, (X, W, None, False, True, torch.float32, "torch"))
    torch.library.opcheck(ops.gemm, (X, W, None, False, True, None, "torch"))
    torch.library.opcheck(ops.rms_norm, (X, None, W[0], 1e-6, True, False, "torch"))
    torch.library.opcheck(ops.rms_norm, (X, X.clone(), W[0], 1e-6, True, False, "torch"))
    torch.library.opcheck(ops.swiglu, (X, X.clone(), True, "torch"))
    torch.library.opcheck(ops.softcap, (X, 2.0, "torch"))
    torch.library.opcheck(ops.clamped_swiglu, (X, X.clone(), 1.7, 7.0, "torch"))
    torch.library.opcheck(ops.activation, (X, True, "torch"))
    torch.library.opcheck(ops.layer_norm, (X, W[0], W[1], 1e-6, "torch"))
    torch.library.opcheck(ops.position_scale, (torch.arange(3), 0.1, 2, "torch"))
    scales, slots = torch.ones(2), torch.tensor([1, -1, 0])
    torch.library.opcheck(ops.lora_shrink, (X, torch.ones(2, 4, 8), scales, slots, "torch"))
    of_b = torch.ones(3, 4), torch.ones(2, 8, 4), scales, slots, "torch"
    torch.library.opcheck(ops.lora_expand, (X, *of_b))
    factors = torch.ones(2, 2, 4, 8), torch.ones(2, 8, 4), torch.ones(2, 2), slots, [5, 3]
    torch.library.opcheck(ops.add_lora, (X, X.clone(), *factors, "torch"))
    torch.library.opcheck(ops.embedding, (torch.tensor([1, 2]), W, "torch"))
    torch.library.opcheck(ops.logp, (X, torch.tensor([1, 2, 3]), 5.0, 0.5, 1.0, "torch"))
    requests = torch.arange(3), torch.arange(3) + 1, torch.ones(3)
    limits = torch.tensor([3, 0, 2], dtype=torch.int32), torch.full((3,), 0.9), None
    torch.library.opcheck(ops.sample, (X, *requests, *limits, True, "torch"))
    torch.library.opcheck(ops.kept_tokens, (X, requests[2], *limits, "torch"))
    torch.library.opcheck(ops.linear_sample, (X, W, None, *requests, torch.bfloat16, True, "torch"))
    top = torch.tensor([[1], [0], [2]])
    torch.library.opcheck(
        ops.logp_and_more, (X, torch.tensor([1, 2, 3]), top, 2, 0.0, 1.0, 1.0, "torch")
    )
    cu = torch.tensor([0, 3], dtype=torch.int32)
    h = X[:, None].clone()
    torch.library.opcheck(
        ops.attention, (h, h + 1, h + 2, None, cu, cu.clone(), True, 0.5, None, 0.0, "torch")
    )
    rope = (torch.arange(3), None, None, 1e4, 8, 1.0, torch.float32, False, "torch")
    torch.library.opcheck(ops.rope, (h, h.clone(), *rope))
    arguments = rope[0], torch.ones(4), torch.full((1,), 1.2)
    torch.library.opcheck(ops.rope, (h, h.clone(), *arguments, *rope[3:]))
    torch.library.opcheck(ops.linear_into, (torch.empty(3, W.shape[0]), X, W, None, "torch"))
    grad = torch.zeros(W.shape)
    torch.library.opcheck(ops.add_weight_grad, (grad, X @ W.mT, X, "torch"))
    cache, lens = h[None].clone(), torch.tensor([3], dtype=torch.int32)
    shared = (0.5, None, 0.0, None, None, False, "torch")
    torch.library.opcheck(
        ops.paged_attention_into,
        (torch.empty_like(h), h, cache, cache + 1, None, cu[None, :1], lens, cu, *shared),
    )
    ids, ones = torch.tensor([1, 2, 0]), torch.ones(3)
    prepare = (ids, ones, torch.ones(1), True, cu, 1, "grpo", None, -100, "torch")
    torch.library.opcheck(ops.grpo_prepare, prepare)
    options = (torch.float32, 0.0, 1.0, 1.0, 0.1, 0.2, 0.2, [True, True, False], "torch")
    arguments = (X.clone(), W.clone(), None, ids, None, ones, -ones, ones.double())
    torch.library.opcheck(ops.linear_grpo_loss, (*arguments, *options))


@pytest.fixture
def hopper(monkeypatch):
    """A GPU of the Hopper generation that is not there, and a Triton whose version can be set."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(device, "capability", lambda of: (9, 0))
    device.facts.cache_clear()
    yield lambda version: monkeypatch.setattr(device, "triton_version", lambda: version)
    device.facts.cache_clear()


@pytest.mark.parametrize("version", ["3.6.0", "3.9.1+git2", "3.10.0", "3.5.1", "4.0.0"])
def test_a_triton_that_does_not_fit_the_hopper_kernels_is_said_once(version, hopper, recwarn):
    hopper(version)
    flags = [device.facts(torch.device("cpu")).gluon for _ in range(3)]
    said = [x for x in recwarn if x.category is device.HopperKernelsUnused]
    if version.startswith(("3.6", "3.9")):
        assert flags == [True] * 3
        assert not said
    else:
        assert flags == [False] * 3
        [one] = said
        assert "Triton >= 3.6 and < 3.10" in str(one.message)
        assert version in str(one.message)
        assert "same bits" in str(one.message)


H200 = planning.H200
HALF = torch.bfloat16


@pytest.mark.parametrize(("gluon", "expected"), [(True, "triton/hopper"), (False, "triton")])
def test_plans_say_which_implementation_is_recorded(gluon, expected):
    here = replace(H200, gluon=gluon, cuda=gluon)
    linear = matmul.ProductShape(300, 4096, 4096, HALF, HALF, False, True, True, True, True)
    wide = matmul.ProductShape(4096, 8192, 4096, HALF, torch.float32, False, True, True, True, True)
    assert matmul.plan_product(linear, here, True).implementation == expected
    assert matmul.plan_product(wide, here, True).implementation == expected
    logits = matmul.LogitsShape(4096, 32000, 4096, HALF, torch.float32, True)
    for kind in ("statistics", "exponentials", "gradient"):
        assert matmul.plan_epilogue(logits, kind, True, here, True).implementation == expected


def test_what_the_plan_says_is_recorded(monkeypatch):
    """With the launch left out: `linear` on an H200 that is not there."""
    monkeypatch.setattr(product, "facts", lambda of: H200)
    monkeypatch.setattr(product, "trusted", lambda *_: True)
    monkeypatch.setattr(product, "launch", lambda *_: None)
    x, w = torch.zeros(300, 4096, dtype=HALF), torch.zeros(4096, 4096, dtype=HALF)
    rk.linear(x, w, backend="triton")
    assert rk.last_backend("linear") == "triton/hopper"
    rk.linear(x[:, 1:], w[:, 1:], backend="triton")  # no tensor map describes it
    assert rk.last_backend("linear") == "triton"
    assert rk.backend_calls() == {("linear", "triton/hopper"): 1, ("linear", "triton"): 1}


class OnGPU:
    """Stands for a tensor on a GPU."""

    requires_grad = False

    def __init__(self, index: int) -> None:
        self.index = index

    def get_device(self) -> int:
        return self.index


class Operator:
    """Stands for an operator: notes which GPU is the current one."""

    def __init__(self, current: list[int]) -> None:
        self.current, self.ran = current, []

    def __call__(self, *args) -> None:
        self.ran.append(self.current[-1])


def test_an_operator_runs_on_the_gpu_of_its_tensors(monkeypatch):
    """A model over several GPUs does not make each of them the current one."""
    current = [0]

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(custom_op, "_PLAIN", (OnGPU,))
    monkeypatch.setattr(private_api, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    op = Operator(current)
    monkeypatch.setitem(custom_op._parts, op, custom_op._Parts("op", op, None))
    for index in (0, 1, 3, -1):  # the last: on no GPU
        custom_op.call(op, OnGPU(index))
    assert op.ran == [0, 1, 3, 0]
    with custom_op.on_device_of(OnGPU(2)):
        assert current[-1] == 2
        custom_op.call(op, OnGPU(2))
    assert op.ran[-1] == 2
    assert current == [0]


def test_which_gpu_is_not_asked_of_fake_tensors_nor_while_a_graph_is_traced(monkeypatch):
    asked = []
    monkeypatch.setattr(private_api, "current_device", lambda: asked.append(1) or 5)
    op = Operator([0])
    monkeypatch.setitem(custom_op._parts, op, custom_op._Parts("op", op, None))
    with FakeTensorMode():
        custom_op.call(op, torch.empty(2, device="meta"))

    @torch.compile(fullgraph=True, backend="eager")
    def traced(x):
        with custom_op.on_device_of(x):
            return x + 1

    assert traced(torch.zeros(1)) == 1
    assert not asked


def test_a_plan_follows_what_is_aligned(monkeypatch):
    """Also where an earlier call had as many addresses that are not."""
    monkeypatch.setattr(product, "facts", lambda of: H200)
    monkeypatch.setattr(product, "trusted", lambda *_: True)
    planned = []
    monkeypatch.setattr(product, "launch", lambda plan, *_: planned.append(plan.kernel))
    room = torch.zeros(300 * 4096 + 8, dtype=HALF)
    w = torch.zeros(4096, 4096, dtype=HALF)
    for x_at, out_at in ((0, 1), (1, 0), (0, 0)):
        x, out = (room[at : at + 300 * 4096].view(300, 4096) for at in (x_at, out_at))
        product.product(x, w, None, False, True, out)
    assert planned == ["hopper", "pointer", "hopper"]


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("k", [512, 4096])
def test_results_of_other_dtypes_are_not_those_of_the_kernel_for_hopper(out_dtype, k):
    shape = matmul.ProductShape(300, 4096, k, HALF, HALF, False, True, True, True, True)
    assert matmul.plan_product(shape, H200, True).kernel == "hopper"
    other = shape._replace(out_dtype=out_dtype)
    assert matmul.plan_product(other, H200, True).kernel != "hopper"
    wide = matmul.plan_product(shape._replace(k=512, out_dtype=torch.float32), H200, True)
    assert wide.kernel == "hopper"


def test_any_kernel_for_hopper_makes_the_call_one():
    assert matmul.recorded_implementation(["triton", "triton/hopper", "triton"]) == "triton/hopper"
    assert matmul.recorded_implementation({"triton"}) == "triton"
