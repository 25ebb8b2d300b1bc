"""What all operators have in common, for one call of each (`operator_cases`): devices, dtypes,
unchanged inputs, torch.compile, transforms of torch.func, and gradients by each way of a call."""

from functools import partial

import pytest
import rlk_kernels as rk
import torch
from operator_cases import CASES, OPERATORS, differentiable, tensors_of
from rlk_kernels import custom_op
from torch.utils._python_dispatch import TorchDispatchMode

TENSORS = {
    name: [where for where, x in case.arguments().items() if torch.is_tensor(x)]
    for name, case in CASES.items()
}
OF_SEVERAL = [(name, where) for name, all_of in TENSORS.items() for where in all_of if all_of[1:]]
COMPILED = [name for name, case in CASES.items() if case.compiled]
DIFFERENTIABLE = [name for name, case in CASES.items() if case.gradient]


def test_every_public_operator_has_a_case():
    assert {name.partition(",")[0] for name in CASES} == OPERATORS


@pytest.mark.parametrize(("name", "where"), OF_SEVERAL)
def test_a_tensor_on_another_device_is_refused(name, where):
    case = CASES[name]
    with torch.no_grad(), pytest.raises(rk.UnsupportedDevice, match="meta"):
        case.run({where: case.arguments()[where].to("meta")})


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e5m2])
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.leaves() and TENSORS[n][1:]])
def test_no_operator_takes_other_dtypes(name, dtype):
    case = CASES[name]
    with pytest.raises(rk.UnsupportedDtype):
        case.run({where: x.to(dtype) for where, x in case.leaves().items()})


def with_gradients(run, leaves):
    """(each output and whether it is differentiable, the leaves' gradients)."""
    leaves = {where: x.clone().requires_grad_() for where, x in leaves.items()}
    outputs = differentiable(result := run(leaves))
    found = [(x.requires_grad, x.detach()) for x in tensors_of(result)]
    up = [x.detach().cos() for x in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), up, allow_unused=True)
    return found, grads


def are_equal(one, other):
    same = [a == b and x.equal(y) for (a, x), (b, y) in zip(one[0], other[0], strict=True)]
    pairs = zip(one[1], other[1], strict=True)
    return all(same) and all(a is b if a is None or b is None else a.equal(b) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_inputs_are_not_modified(name, backend):
    case = CASES[name]
    before = {w: x.clone() for w, x in case.arguments().items() if torch.is_tensor(x)}
    if case.gradient:
        with_gradients(partial(case.run, backend=backend), case.leaves())
    case.run(backend=backend)
    assert all(case.arguments()[where].equal(x) for where, x in before.items())


@pytest.mark.parametrize("name", COMPILED)
def test_every_operator_is_traced_whole(name, backend, monkeypatch):
    """The graphs run eagerly: what is shown is that there is no graph break, and the same bits."""
    monkeypatch.setenv("RLK_BACKEND", backend)
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(case.run, fullgraph=True, backend="aot_eager")
    rk.reset_backend_calls()
    if not case.gradient:
        pairs = zip(tensors_of(case.run()), tensors_of(compiled()), strict=True)
        assert all(a.equal(b) for a, b in pairs)
        return
    traced = with_gradients(compiled, case.leaves())
    recorded = rk.backend_calls()
    assert {ran for _, ran in recorded} == {backend}
    assert are_equal(with_gradients(case.run, case.leaves()), traced)
    assert all(x is None or bool(x.isfinite().all()) for x in traced[1])


class _Dispatched(TorchDispatchMode):
    """Has every operator go through torch's dispatch."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_past_the_dispatch_are_those_of_the_dispatch(name, monkeypatch):
    case, dispatched = CASES[name], []

    def counting(what, run, *arguments):
        dispatched.append(what)
        return run(*arguments)

    for op, parts in custom_op._parts.items():
        for device, run in list(op._backend_fns.items()):
            monkeypatch.setitem(op._backend_fns, device, partial(counting, parts.name, run))
    case.run({where: x.clone().requires_grad_() for where, x in case.leaves().items()})
    assert not dispatched or not case.dispatched
    direct = with_gradients(case.run, case.leaves())
    dispatched.clear()
    with _Dispatched():
        assert are_equal(with_gradients(case.run, case.leaves()), direct)
    assert bool(dispatched) or not case.dispatched


def first_leaf(case):
    """(function of the first floating-point input, that input)."""
    where, x = next(iter(case.leaves().items()))
    return lambda x, backend: case.run({where: x}, backend), x


def refused(name):
    """By the operator's name where it refuses itself, and otherwise by torch."""
    if CASES[name].dispatched or name.startswith("linear_grpo_loss"):
        return pytest.raises(NotImplementedError, match=r"rlk::|linear_grpo_loss")
    return pytest.raises((NotImplementedError, RuntimeError), match="transforms")


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_transforms_that_differentiate_are_refused(name, backend):
    """torch's forward mode alone would return tangents of zero."""
    run, x = first_leaf(CASES[name])

    def total(x):
        return sum(y.sum() for y in tensors_of(run(x, backend)) if y.is_floating_point())

    for transformed in (
        lambda: torch.func.grad(total)(x),
        lambda: torch.func.jvp(total, (x,), (x,)),
        lambda: torch.func.grad(lambda x: torch.vmap(total)(x).sum())(torch.stack([x, x])),
    ):
        with refused(name):
            transformed()


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_or_refused(name, backend):
    run, x = first_leaf(CASES[name])
    rows = torch.stack([x, 2 * x])

    def outputs(x):
        return tuple(tensors_of(run(x, backend)))

    if not CASES[name].dispatched:
        with refused(name):
            torch.vmap(outputs)(rows)
        return
    each = zip(*map(outputs, rows), strict=True)
    for mapped, expected in zip(torch.vmap(outputs)(rows), each, strict=True):
        assert torch.equal(mapped, torch.stack(expected))


# The gradient of rope is a rotation, which has one.
@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if not n.startswith("rope")])
def test_gradients_of_gradients_are_refused_by_name(name, backend):
    run, x = first_leaf(CASES[name])
    x = x.clone().requires_grad_()
    outputs = differentiable(run(x, backend))
    up = [torch.ones_like(y).requires_grad_() for y in outputs]
    (grad,) = torch.autograd.grad(outputs, x, up, create_graph=True)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"gradients of|twice"):
        grad.square().sum().backward()
