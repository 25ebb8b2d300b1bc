"""Creates and calls custom operators of torch.

An operator has an implementation, which runs on tensors; a fake implementation, which returns the
shapes and dtypes of the results to a compiler; and for autograd a backward with its `setup`, or an
error.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import CustomOpDef

from rlk_kernels import private_api

SECOND = "gradients of its gradients are not implemented"
"""The error of a backward through the backward of an operator."""

_on_gpus = torch.library.Library("rlk", "FRAGMENT")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of an operator that `call` uses."""

    name: str
    implementation: Callable
    differentiable: type[torch.autograd.Function] | None
    """The implementation and its backward as a function of autograd; None if there is no backward,
    or if the operator writes to an argument."""


_parts: dict[CustomOpDef, _Parts] = {}


def custom_op(
    name: str,
    fake: Callable,
    *,
    writes: tuple[str, ...] = (),
    setup: Callable | None = None,
    backward: Callable | None = None,
    gradients: tuple | None = None,
    no_gradient: tuple[str, str] | None = None,
) -> Callable[[Callable], CustomOpDef]:
    """Decorates an implementation, which becomes the operator `rlk::name`.

    fake: the argument of `torch.library.register_fake`. writes: the names of the arguments that the
    operator writes to. setup, backward: the arguments of `torch.library.register_autograd`.
    gradients: instead of these, what `gradients_by` takes.
    no_gradient: (the public operator, the reason), if every backward through the operator raises
    NotImplementedError.

    A compiled model calls the operator through torch's dispatch. On GPUs the dispatch calls the
    implementation directly, because the wrapper of `torch.library.custom_op` costs time.
    """

    def refuse(ctx, *grads):
        raise NotImplementedError(": ".join(no_gradient or ()))

    def make(implementation: Callable) -> CustomOpDef:
        op = torch.library.custom_op(f"rlk::{name}", implementation, mutates_args=writes)
        op.register_fake(fake)
        before, back = (setup, backward) if gradients is None else gradients_by(*gradients)
        back = refuse if no_gradient is not None else back
        if back is not None:
            op.register_autograd(back, setup_context=before)
        _on_gpus.impl(name, implementation, "CUDA")
        function = None if back is None or writes else _function(name, implementation, before, back)
        _parts[op] = _Parts(name, implementation, function)
        return op

    return make


def gradients_by(
    tensors: int, operator: CustomOpDef, keeps_results: bool = False
) -> tuple[Callable, Callable]:
    """The setup and the backward of an operator whose gradients another operator computes. That one
    takes the first `tensors` arguments, the gradients of the results, and the other arguments, and
    returns gradients of the first arguments, which are cast to the dtypes of these. keeps_results:
    it takes the results before their gradients, and the first result alone has a gradient."""

    def setup(ctx, inputs, output):
        saved, ctx.options = inputs[:tensors], inputs[tensors:]
        if keeps_results:
            saved = (*saved, *output)
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)

    def backward(ctx, *grads):
        none = (None,) * (tensors + len(ctx.options))
        if grads[0] is None:
            return none
        dense = (g.contiguous() for g in (grads[:1] if keeps_results else grads))
        saved = ctx.saved_tensors
        found = call(operator, *saved, *dense, *ctx.options)
        if isinstance(found, Tensor):
            found = (found,)
        cast = [g.to(x.dtype) for g, x in zip(found, saved, strict=False)]
        return (*cast, *none[len(cast) :])

    return setup, backward


def _function(
    name: str, implementation: Callable, setup: Callable | None, back: Callable
) -> type[torch.autograd.Function]:
    """The operator as a function of autograd, which skips torch's dispatch."""

    def forward(ctx, *args):
        result = implementation(*args)
        if isinstance(result, list):  # autograd sees the tensors of a tuple alone
            result = tuple(result)
        if setup is not None:
            setup(ctx, args, result)
        return result

    functions = {"forward": staticmethod(forward), "backward": staticmethod(back)}
    return type(f"Differentiable_{name}", (torch.autograd.Function,), functions)


def refuse_transforms(op: str, *, vmap: bool = True) -> None:
    """Raises NotImplementedError if torch would differentiate `op` without a backward: in
    torch.func.grad, jvp and their derivatives, and in forward mode, whose tangents would be zeros.
    vmap: whether torch.vmap may call the operator."""
    stack = private_api.transforms() or ()
    grad = any(x.key() == private_api.gradient_transform for x in stack)
    if grad or private_api.in_forward_mode() or (stack and not vmap):
        raise NotImplementedError(
            f"{op}: transforms of torch.func and forward mode are not supported; take gradients "
            "with torch.autograd (backward, torch.autograd.grad)"
        )


_PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors without special behaviour."""
_NO_TENSORS = frozenset({bool, int, float, str, type(None), torch.dtype})
"""Types that are never tensors; a look-up is several times as fast as `isinstance(x, Tensor)`."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """A context in which x's GPU is the current one, on which kernels are launched. A model may be
    on several GPUs; torch's operators also run on the GPU of their tensors."""
    if torch.compiler.is_compiling() or not _on_another_gpu(x):
        return nullcontext()
    return torch.cuda.device(x.get_device())


def _on_another_gpu(x: Tensor) -> bool:
    index = x.get_device() if type(x) in _PLAIN else -1
    return index >= 0 and index != private_api.current_device() >= 0


def call(op: CustomOpDef, *args, inference: Callable | None = None):
    """`op(*args)`, without torch's dispatch if there is no compiler, mode, transform or tensor
    subclass, because the dispatch costs several times as much as a launch. If a gradient is needed,
    a function of autograd has op's backward. The first argument decides the GPU (`on_device_of`).
    inference: runs instead of op's implementation if no gradient is needed."""
    if torch.compiler.is_compiling():
        return op(*args)
    if _on_another_gpu(args[0]):
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
