"""A trainer whose forward multiplies by the weights that a rollout engine dequantises from fp8 in
blocks, and whose gradients are passed straight through to its own weights."""

from collections.abc import Collection
from typing import Any

from rlk_kernels.block_fp8 import BLOCK
from rlk_kernels.integrations.errors import NotSupported
from rlk_kernels.integrations.hf.modules import Fp8, HFExperts, HFLinear


def fake_quantise(
    model: Any,
    block: tuple[int, int] = BLOCK,
    powers_of_two: bool = False,
    ignored: Collection[str] = (),
) -> list[str]:
    """Makes every projection of a model with the kernels multiply by its weight, quantised and
    dequantised; returns their names. The output layer is left as it is, as are modules that
    `ignored` names: by the last parts of their names, e.g. `lm_head`, `mlp.gate`.

    Raises NotSupported if the model is without the kernels, has experts, or has no such module for
    a name of `ignored`.
    """
    named = dict(model.named_modules())
    if any(isinstance(module, HFExperts) for module in named.values()):
        raise NotSupported("fp8 of a model with sparse layers is not supported")
    linears = {name: m for name, m in named.items() if isinstance(m, HFLinear)}
    if not linears:
        raise NotSupported("no projection of this model is the kernels': call use_kernels first")
    unknown = [entry for entry in ignored if not any(_ends(name, entry) for name in named)]
    if unknown:
        raise NotSupported(f"ignored={', '.join(unknown)}: the model has no such module")
    chosen = [n for n in linears if not any(_ends(n, entry) for entry in ignored)]
    for name in chosen:
        linears[name].rlk_fp8 = Fp8(block, powers_of_two)
    return chosen


def _ends(name: str, entry: str) -> bool:
    """Whether a module's name ends with whole parts of a name, or is it."""
    return name == entry or name.endswith(f".{entry}")
