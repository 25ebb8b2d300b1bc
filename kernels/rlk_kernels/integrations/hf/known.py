"""Whether a model runs transformers' own code: code that another library put there may repeat the
kernels' work or bypass them."""

import inspect
import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from rlk_kernels.integrations.errors import NotServed
from rlk_kernels.integrations.operators import Counted

SILU = type(ACT2FN["silu"])


def check_forwards(model: Any, replaced: dict[str, Any]) -> None:
    """Raises NotServed where the forward of a causal LM, of what holds its operators, or of one
    that is to be replaced, by name, is not that of its family's module of transformers."""
    inner = model.model
    parts = {"the model": model, "the model's decoder": inner}
    for i, layer in enumerate(inner.layers):
        if layer.self_attn.layer_idx != i:
            raise NotServed(
                f"layers.{i} has layer_idx={layer.self_attn.layer_idx}: renumber the layers"
            )
        parts |= {f"layers.{i}": layer, f"layers.{i}.self_attn": layer.self_attn}
        # A sparse layer's router and experts are replaced, and called by it.
        parts |= {f"layers.{i}.mlp": layer.mlp} if hasattr(layer.mlp, "experts") else {}
    for name, module in (parts | replaced).items():
        if "forward" in vars(module):
            raise NotServed(
                f"the forward of {name} was replaced in this one object, by "
                f"{_where(vars(module)['forward'])}: call use_kernels before"
            )
        # Already ours: the model gets the kernels a second time.
        if not isinstance(module, nn.Linear | nn.Embedding | Counted):
            _check_forward(name, module, model.config.model_type)


def _check_forward(name: str, module: Any, family: str) -> None:
    known = [Path(sys.modules[name].__file__ or "").parent for name in ("transformers", "torch")]
    modeling = known[0] / "models" / family / f"modeling_{family}.py"
    function = type(module).forward
    # Their decorators are no other code.
    while hasattr(function, "__wrapped__") and set(known) & set(_file(function).parents):
        function = function.__wrapped__
    if _file(function) != modeling:
        raise NotServed(
            f"{name} is a {type(module).__qualname__} whose forward is {_where(function)}; that of "
            f"transformers.models.{family} is served"
        )


def _file(function: Any) -> Path:
    return Path(getattr(getattr(function, "__code__", None), "co_filename", ""))


def _where(function: Any) -> str:
    function = inspect.unwrap(getattr(function, "func", function))
    module = getattr(function, "__module__", None)
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def check_plain(name: str, module: Any) -> None:
    """Raises NotServed for what stands in a linear's place (an adapter, quantised weights), and for
    what an embedding, an MLP or experts were changed to compute."""
    plain = {"embed": nn.Embedding, "logits": nn.Linear}.get(name)
    if name.endswith("proj"):
        plain = nn.Linear
    if plain is not None and type(module) is not plain:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        raise NotServed(
            f"{name} is a {kind}; a torch.nn.{plain.__name__} is served: merge adapters"
        )
    if name == "embed":
        asked = [a for a in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, a)]
        if asked:
            raise NotServed(f"{name} with {', '.join(asked)} is not served: rows are copied")
    if name.endswith(("act", ".moe_out")):
        check_silu(module.act_fn)


def check_silu(act: Any) -> None:
    """Raises NotServed for an activation other than config.json's, or one with hooks: the kernels
    never call the module. DeepSpeed's own hooks gather and release parameters, of which it has
    none."""
    if type(act) is not SILU:
        raise NotServed(f"act_fn is a {type(act).__name__}; a plain {SILU.__name__} is served")
    hooks = [*act._forward_hooks.values(), *act._forward_pre_hooks.values()]
    for hook in hooks:
        if not _of_zero(hook):
            raise NotServed(
                f"act_fn is a {SILU.__name__} with hooks, of which {_where(hook)} is not ZeRO's: a "
                f"plain {SILU.__name__} is served"
            )


ZERO = "deepspeed.runtime.zero.parameter_offload"
ZERO_HOOKS = frozenset(
    f"DeepSpeedZeRoOffload._register_deepspeed_module.<locals>._{name}_module_hook"
    for name in ("pre_forward", "post_forward", "pre_backward", "post_backward")
)
"""What ZeRO-3 puts on every module, in that module of DeepSpeed 0.19.8."""
_TIMED = "instrument_w_nvtx.<locals>.wrapped_fn"
"""What DeepSpeed wraps one of them in, which names nothing that it wraps."""


def _of_zero(hook: Any) -> bool:
    """Whether ZeRO-3 itself put a hook there: a function of its own source file, by its name."""
    function = inspect.unwrap(hook)
    if getattr(function, "__qualname__", "") == _TIMED:
        function = inspect.getclosurevars(function).nonlocals.get("func", function)
    zero = sys.modules.get(ZERO)
    return (
        zero is not None
        and getattr(function, "__qualname__", "") in ZERO_HOOKS
        and _file(function) == Path(zero.__file__ or "")
    )
