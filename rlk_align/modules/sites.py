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
        held = pairing.by_tensor.get(tensor, []) if tensor else []
        wanted = f"{self.path}.weight"
        return max(held, key=lambda h: (h.whole, likeness(h.live, wanted)), default=None)


def module_sites(
    defined: Mapping[str, DefinedModule], stored: StoredWeights, pairings: Sequence[Pairing]
) -> list[ModuleSite]:
    """Every module of the model. `pairings`: those of both sides. An engine that has the names of
    transformers' code shows which tensor a module has that is renamed as it is loaded."""
    sites = []
    for path, module in defined.items():
        tensors = {}
        for name in module.parameters:
            tensor = _tensor(f"{path}.{name}", stored, pairings)
            if tensor is not None:
                tensors[name] = tensor
        weight = tensors.get("weight", "")
        holder = weight.rpartition(".")[0]
        # A head that is tied has the weight of another module, and no name in the checkpoint.
        tied = not same_name(path, holder) and holder in defined
        name = path if tied or not weight else holder
        sites.append(ModuleSite(name, path, module, tensors))
    return sites


def _tensor(parameter: str, stored: StoredWeights, pairings: Sequence[Pairing]) -> str | None:
    if parameter in stored.tensors:
        return parameter
    for pairing in pairings:
        for held in pairing.by_parameter.get(parameter, []):
            return held.tensor
    return next(iter(stored.names.same(parameter)), None)
