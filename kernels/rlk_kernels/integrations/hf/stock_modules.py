"""Checks that a model runs transformers' own code, because code of another library may repeat the
work of the kernels or bypass them."""

import inspect
import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.operators import Counted

SILU = type(ACT2FN["silu"])


def check_forwards(model: Any, replaced: dict[str, Any]) -> None:
    """Raises NotSupported if a forward is not that of the family's module in transformers: of a
    causal LM, of its parts that call operators, or of a module in `replaced`, by name."""
    inner = model.model
    parts = {"the model": model, "the model's decoder": inner}
    for i, layer in enumerate(inner.layers):
        if layer.self_attn.layer_idx != i:
            raise NotSupported(
                f"layers.{i} has layer_idx={layer.self_attn.layer_idx}: renumber the layers"
            )
        parts |= {f"layers.{i}": layer, f"layers.{i}.self_attn": layer.self_attn}
        # A sparse layer calls its router and its experts, which are replaced.
        parts |= {f"layers.{i}.mlp": layer.mlp} if hasattr(layer.mlp, "experts") else {}
    for name, module in (parts | replaced).items():
        if "forward" in vars(module):
            raise NotSupported(
                f"the forward of {name} was replaced in this object by "
                f"{_where(vars(module)['forward'])}: call use_kernels first"
            )
        # A `Counted` module has the kernels from an earlier call.
        if not isinstance(module, nn.Linear | nn.Embedding | Counted):
            _check_forward(name, module, model.config.model_type)


def _check_forward(name: str, module: Any, family: str) -> None:
    known = [Path(sys.modules[name].__file__ or "").parent for name in ("transformers", "torch")]
    modeling = known[0] / "models" / family / f"modeling_{family}.py"
    function = type(module).forward
    # Decorators of transformers and torch do not count as other code.
    while hasattr(function, "__wrapped__") and set(known) & set(_file(function).parents):
        function = function.__wrapped__
    if _file(function) != modeling:
        raise NotSupported(
            f"{name} is a {type(module).__qualname__} whose forward is {_where(function)}; only "
            f"that of transformers.models.{family} is supported"
        )


def _file(function: Any) -> Path:
    return Path(getattr(getattr(function, "__code__", None), "co_filename", ""))


def _where(function: Any) -> str:
    function = inspect.unwrap(getattr(function, "func", function))
    module = getattr(function, "__module__", None)
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def check_plain(name: str, module: Any) -> None:
    """Raises NotSupported for a module that stands in for a linear (an adapter, quantised weights),
    and for settings of an embedding, an MLP or experts that change their values."""
    plain = {"embed": nn.Embedding, "logits": nn.Linear}.get(name)
    if name.endswith("proj"):
        plain = nn.Linear
    if plain is not None and type(module) is not plain:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise NotSupported(
            f"{name} is a {kind}; only a torch.nn.{plain.__name__} is supported: merge adapters"
        )
    if name == "embed":
        asked = [a for a in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, a)]
        if asked:
            raise NotSupported(f"{name} with {', '.join(asked)} is not supported")
    if name.endswith(("act", ".moe_out")):
        check_silu(module.activation_fn if hasattr(module, "activation_fn") else module.act_fn)


def check_silu(act: Any) -> None:
    """Raises NotSupported for an activation other than config.json's, or one with hooks, because
    the kernels never call the module. DeepSpeed's own hooks are accepted: they gather and release
    parameters, and an activation has none."""
    if type(act) is not SILU:
        raise NotSupported(
            f"act_fn is a {type(act).__name__}; only a plain {SILU.__name__} is supported"
        )
    for hook in (*act._forward_hooks.values(), *act._forward_pre_hooks.values()):
        if not _of_zero(hook):
            raise NotSupported(
                f"act_fn is a {SILU.__name__} with hooks, of which {_where(hook)} is not ZeRO's; "
                f"only a plain {SILU.__name__} is supported"
            )


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
        and _file(function) == Path(zero.__file__ or "")
    )
