"""Checks that a model runs transformers' own code, because code of another library may repeat the
work of the kernels or bypass them."""

import inspect
import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import of_code
from rlk_kernels.integrations.operators import Counted, mlp_of

ACTIVATIONS = {
    type(ACT2FN["silu"]): "silu",
    type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh",
}
"""transformers' class -> the activation that `profile.act` computes."""


def check_forwards(model: Any, replaced: dict[str, Any]) -> None:
    """Raises NotSupported if a forward is not that of the family's module in transformers: of a
    causal LM, of its parts that call operators, or of a module in `replaced`, by name."""
    inner = model.model
    parts = {"the model": model, "the model's decoder": inner}
    for i, layer in enumerate(inner.layers):
        name = "self_attn" if hasattr(layer, "self_attn") else "linear_attn"
        branch = getattr(layer, name)
        if branch.layer_idx != i:
            raise NotSupported(f"layers.{i} has layer_idx={branch.layer_idx}: renumber the layers")
        parts |= {f"layers.{i}": layer, f"layers.{i}.{name}": branch}
        # A sparse layer calls its router and its experts, which are replaced.
        block = mlp_of(layer)
        parts |= {f"layers.{i}.mlp": block} if hasattr(block, "experts") else {}
    for name, module in (parts | replaced).items():
        if "forward" in vars(module):
            raise NotSupported(
                f"the forward of {name} was replaced in this object by "
                f"{_where(vars(module)['forward'])}: call use_kernels first"
            )
        # A `Counted` module has the kernels from an earlier call.
        if type(module) not in (nn.Linear, nn.Embedding) and not isinstance(module, Counted):
            _check_forward(name, module, model.config.model_type)


def _check_forward(name: str, module: Any, family: str) -> None:
    known = [Path(sys.modules[name].__file__ or "").parent for name in ("transformers", "torch")]
    code = of_code(family)
    modeling = known[0] / "models" / code / f"modeling_{code}.py"
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
    if name.endswith(("proj", ".shared_gate", ".qkv_in", ".z", ".b", ".a")):
        plain = nn.Linear
    scaled = name == "embed" and hasattr(module, "embed_scale")  # `check_forwards` checks it
    if plain is not None and type(module) is not plain and not scaled:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise NotSupported(
            f"{name} is a {kind}; only a torch.nn.{plain.__name__} is supported: merge adapters"
        )
    if name == "embed":
        asked = [a for a in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, a)]
        if asked:
            raise NotSupported(f"{name} with {', '.join(asked)} is not supported")
    if name.endswith("act"):
        activation_of(module.activation_fn if hasattr(module, "activation_fn") else module.act_fn)
    if name.endswith(".conv"):
        check_silu(ACT2FN[module.activation], "gated delta nets")
    if name.endswith(".moe_out"):
        check_silu(module.act_fn)


def activation_of(act: Any) -> str:
    """The activation of an MLP, as `profile.act` takes it. Raises NotSupported for another one, or
    one with hooks, because the kernels never call the module. DeepSpeed's own hooks are accepted:
    they gather and release parameters, and an activation has none."""
    plain = " or ".join(kind.__name__ for kind in ACTIVATIONS)
    if type(act) not in ACTIVATIONS:
        raise NotSupported(f"act_fn is a {type(act).__name__}; only a plain {plain} is supported")
    for hook in (*act._forward_hooks.values(), *act._forward_pre_hooks.values()):
        if not _of_zero(hook):
            raise NotSupported(
                f"act_fn is a {type(act).__name__} with hooks, of which {_where(hook)} is not "
                f"ZeRO's; only a plain {plain} is supported"
            )
    return ACTIVATIONS[type(act)]


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
        and _file(function) == Path(zero.__file__ or "")
    )
