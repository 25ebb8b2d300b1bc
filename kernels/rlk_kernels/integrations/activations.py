"""The activations of transformers' MLPs that the kernels compute, by their classes."""

import inspect
import sys
from pathlib import Path
from typing import Any

from rlk_kernels.integrations.errors import NotSupported

ACTIVATIONS = {
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "ReLUSquaredActivation"): "relu2",
}
"""(module, class) -> the activation that `profile.act` or `profile.act_alone` computes."""


def file_of(function: Any) -> Path:
    return Path(getattr(getattr(function, "__code__", None), "co_filename", ""))


def where(function: Any) -> str:
    function = inspect.unwrap(getattr(function, "func", function))
    module = getattr(function, "__module__", None)
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def act_of(mlp: Any) -> Any:
    """The activation of an MLP; families have different names for it."""
    return next(
        getattr(mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name)
    )


def activation_of(act: Any) -> str:
    """The activation of an MLP, as `profile.act` takes it. Raises NotSupported for another one, or
    one with hooks, because the kernels never call the module. DeepSpeed's own hooks are accepted:
    they gather and release parameters, and an activation has none."""
    plain = " or ".join(name for _, name in ACTIVATIONS)
    kind = type(act).__module__, type(act).__qualname__
    if kind not in ACTIVATIONS:
        raise NotSupported(f"act_fn is a {type(act).__name__}; only a plain {plain} is supported")
    for hook in (*act._forward_hooks.values(), *act._forward_pre_hooks.values()):
        if not _of_zero(hook):
            raise NotSupported(
                f"act_fn is a {type(act).__name__} with hooks, of which {where(hook)} is not "
                f"ZeRO's; only a plain {plain} is supported"
            )
    return ACTIVATIONS[kind]


def check_silu(act: Any, whose: str = "experts") -> None:
    """Raises NotSupported for an activation unless `activation_of` says that it is silu."""
    if (activation := activation_of(act)) != "silu":
        raise NotSupported(f"{whose} with {activation} are not supported; with silu they are")


ZERO = "deepspeed.runtime.zero.parameter_offload"
ZERO_HOOKS = frozenset(
    f"DeepSpeedZeRoOffload._register_deepspeed_module.<locals>._{name}_module_hook"
    for name in ("pre_forward", "post_forward", "pre_backward", "post_backward")
)
"""The hooks that ZeRO-3 puts on every module, in that module of DeepSpeed 0.19.8."""
_TIMED = "instrument_w_nvtx.<locals>.wrapped_fn"
"""The name of the function in which DeepSpeed wraps one of these hooks."""


def _of_zero(hook: Any) -> bool:
    """Whether ZeRO-3 itself put a hook there: the hook's source file and its name are ZeRO's."""
    function = inspect.unwrap(hook)
    if getattr(function, "__qualname__", "") == _TIMED:
        function = inspect.getclosurevars(function).nonlocals.get("func", function)
    zero = sys.modules.get(ZERO)
    return (
        zero is not None
        and getattr(function, "__qualname__", "") in ZERO_HOOKS
        and file_of(function) == Path(zero.__file__ or "")
    )
