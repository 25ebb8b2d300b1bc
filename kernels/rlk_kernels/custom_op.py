"""Custom operators of torch: how one is made of its parts, and how it is called.

An operator has an implementation, which runs on tensors; a fake one, which gives the shapes and
dtypes of the results to a compiler; and for autograd a backward with its `setup`, or a refusal.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import CustomOpDef

from rlk_kernels import private_api

SECOND = "gradients of its gradients are not implemented"
"""Why the backward of an operator has no backward itself."""

_on_gpus = torch.library.Library("rlk", "FRAGMENT")


@dataclass(frozen=True, slots=True)
class _Parts:
    """What `call` takes of an operator."""

    name: str
    implementation: Callable
    differentiable: type[torch.autograd.Function] | None
    """The implementation and its backward for autograd alone; None where there is no backward, and
    for an operator that writes to an argument."""


_parts: dict[CustomOpDef, _Parts] = {}


def custom_op(
    name: str,
    fake: Callable,
    *,
    writes: tuple[str, ...] = (),
    setup: Callable | None = None,
    backward: Callable | None = None,
    no_gradient: tuple[str, str] | None = None,
) -> Callable[[Callable], CustomOpDef]:
    """Decorates the implementation of the operator `rlk::name`, which becomes that operator.

    fake: as `torch.library.register_fake` takes it. writes: the arguments that it writes to.
    setup, backward: as `torch.library.register_autograd` takes them. no_gradient: (the public
    operator, why) of the NotImplementedError that every backward through the operator raises.

    A compiled model calls the operator by torch's dispatch. On GPUs the dispatch gets the
    implementation itself, without the wrapper of `torch.library.custom_op`, which costs time.
    """

    def refuse(ctx, *grads):
        raise NotImplementedError(": ".join(no_gradient or ()))

    def make(implementation: Callable) -> CustomOpDef:
        op = torch.library.custom_op(f"rlk::{name}", implementation, mutates_args=writes)
        op.register_fake(fake)
        back = refuse if no_gradient is not None else backward
        if back is not None:
            op.register_autograd(back, setup_context=setup)
        _on_gpus.impl(name, implementation, "CUDA")
        function = None if back is None or writes else _function(name, implementation, setup, back)
        _parts[op] = _Parts(name, implementation, function)
        return op

    return make


def _function(
    name: str, implementation: Callable, setup: Callable | None, back: Callable
) -> type[torch.autograd.Function]:
    """An operator for autograd alone, without the dispatch around it."""

    def forward(ctx, *args):
        result = implementation(*args)
        if setup is not None:
            setup(ctx, args, result)
        return result

    functions = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    return type(f"Differentiable_{name}", (torch.autograd.Function,), functions)


def refuse_transforms(op: str, *, vmap: bool = True) -> None:
    """Raise NotImplementedError where torch would differentiate `op` other than by a backward: in
    torch.func.grad, jvp and their derivatives, and in forward mode, where tangents would be zeros.
    `vmap`: whether torch.vmap may take it row by row."""
    stack = private_api.transforms() or ()
    grad = any(x.key() == private_api.gradient_transform for x in stack)
    if grad or private_api.in_forward_mode() or (stack and not vmap):
        raise NotImplementedError(
            f"{op}: transforms of torch.func and forward mode are not supported; take gradients "
            "with torch.autograd (backward, torch.autograd.grad)"
        )


_PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that behave as torch's own."""
_NO_TENSORS = frozenset({bool, int, float, str, type(None), torch.dtype})
"""Types that `isinstance(x, Tensor)` need not be asked of: it takes several times as long."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Makes x's GPU the current one (for a model on several GPUs), as torch's own operators do:
    kernels are launched on the current GPU."""
    if torch.compiler.is_compiling() or not _lies_elsewhere(x):
        return nullcontext()
    return torch.cuda.device(x.get_device())


def _lies_elsewhere(x: Tensor) -> bool:
    index = x.get_device() if type(x) in _PLAIN else -1
    return index >= 0 and index != private_api.current_device() >= 0


def call(op: CustomOpDef, *args, inference: Callable | None = None):
    """`op(*args)`, without torch's dispatch where it has nothing to do: no compiler, mode,
    transform or tensor subclass. Dispatching costs several times what a launch does. Where a
    gradient is needed, autograd is told of op's backward like that of any function. The first
    argument decides the GPU (`on_device_of`); `inference`: runs instead of op's own function where
    no gradient is needed."""
    if torch.compiler.is_compiling():
        return op(*args)
    if _lies_elsewhere(args[0]):
        with on_device_of(args[0]):
            return call(op, *args, inference=inference)
    parts = _parts[op]
    if (
        not private_api.DIRECT_DISPATCH
        or private_api.innermost_transform() is not None
        or private_api.in_forward_mode()
    ):
        refuse_transforms(f"rlk::{parts.name}")
        return op(*args)
    grad, differentiated = torch.is_grad_enabled(), False
    for x in args:
        kind = type(x)
        if kind in _NO_TENSORS:
            continue
        if kind in _PLAIN:
            differentiated = differentiated or (grad and x.requires_grad)
        elif isinstance(x, Tensor):
            return op(*args)
    if private_api.dispatch_modes() > 0:
        return op(*args)
    if differentiated:
        return op(*args) if parts.differentiable is None else parts.differentiable.apply(*args)
    return (inference or parts.implementation)(*args)
