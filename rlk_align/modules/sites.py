"""The modules of a model by their names in the checkpoint, and where each side has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlk_align.modules.definition import DefinedModule
from rlk_align.modules.names import likeness, same_name
from rlk_align.modules.pairing import Holding, Pairing
from rlk_align.modules.stored import StoredWeights


@dataclass(frozen=True, slots=True)
class ModuleSite:
    """A module of the model."""

    name: str
    """Its name in the checkpoint; of an activation, and of a head that is tied, in transformers'
    code."""
    path: str
    """Its name in transformers' code."""
    module: DefinedModule
    tensors: Mapping[str, str]
    """Name of a parameter -> the checkpoint's tensor."""

    def holding(self, pairing: Pairing) -> Holding | None:
        """Where a side has the module's weight; of several parameters with it, the one whose name
        is most alike."""
        tensor = self.tensors.get("weight")
        held = pairing.of_tensor(tensor) if tensor else []
        wanted = f"{self.path}.weight"
        return max(held, key=lambda h: (h.whole, likeness(h.live, wanted)), default=None)


def module_sites(
    defined: Mapping[str, DefinedModule], stored: StoredWeights, of_transformers: Sequence[Pairing]
) -> list[ModuleSite]:
    """Every module of the model. `of_transformers`: the pairings of the sides whose engine has the
    names of transformers' code, which may differ from the checkpoint's."""
    sites = []
    for path, module in defined.items():
        tensors = {}
        for name in module.parameters:
            tensor = _tensor(f"{path}.{name}", stored, of_transformers)
            if tensor is not None:
                tensors[name] = tensor
        weight = tensors.get("weight", "")
        # The module whose weight another one shares has its own name in the checkpoint alone.
        tied = any(same_name(f"{other}.weight", weight) for other in defined if other != path)
        name = path if tied or not weight else weight.rpartition(".")[0]
        sites.append(ModuleSite(name, path, module, tensors))
    return sites


def _tensor(
    parameter: str, stored: StoredWeights, of_transformers: Sequence[Pairing]
) -> str | None:
    if parameter in stored.tensors:
        return parameter
    for pairing in of_transformers:
        for held in pairing.holdings:
            if held.live == parameter:
                return held.tensor
    return next((name for name in stored.names if same_name(parameter, name)), None)
