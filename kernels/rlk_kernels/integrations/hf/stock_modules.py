"""Checks that a model runs transformers' own code, because code of another library may repeat the
work of the kernels or bypass them."""

import sys
from pathlib import Path
from typing import Any

from torch import nn
from transformers.activations import ACT2FN

from rlk_kernels.integrations.activations import act_of, activation_of, check_silu, file_of, where
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.families import of_code
from rlk_kernels.integrations.hf.adapter import is_adapter
from rlk_kernels.integrations.operators import Counted, mlp_of


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
                f"{where(vars(module)['forward'])}: call use_kernels first"
            )
        # A `Counted` module has the kernels from an earlier call.
        known = type(module) in (nn.Linear, nn.Embedding, nn.LayerNorm) or is_adapter(module)
        if not known and not isinstance(module, Counted):
            _check_forward(name, module, model.config.model_type)


def _check_forward(name: str, module: Any, family: str) -> None:
    known = [Path(sys.modules[name].__file__ or "").parent for name in ("transformers", "torch")]
    code = of_code(family)
    modeling = known[0] / "models" / code / f"modeling_{code}.py"
    function = type(module).forward
    # Decorators of transformers and torch do not count as other code.
    while hasattr(function, "__wrapped__") and set(known) & set(file_of(function).parents):
        function = function.__wrapped__
    if file_of(function) != modeling:
        raise NotSupported(
            f"{name} is a {type(module).__qualname__} whose forward is {where(function)}; only "
            f"that of transformers.models.{family} is supported"
        )


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
        activation_of(act_of(module))
    if name.endswith(".conv"):
        check_silu(ACT2FN[module.activation], "gated delta nets")
    if name.endswith(".moe_out") and hasattr(module, "act_fn"):
        check_silu(module.act_fn)
