"""The description of a planted fault, which needs no engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlk_align.model.sites import Site

Kind = Literal["computation", "weights", "copies", "positions", "boundaries", "sparse"]
"""`copies`: a product computes with a copy of its weight; `sparse`: planted through the engine's
`SparseLayers`."""
Expected = Literal["named", "rounding", "precheck"]

ALL = ("hf", "vllm", "megatron")


@dataclass(frozen=True, slots=True)
class Strength:
    """The strength of a fault: its unit and its values."""

    unit: str
    default: float
    curve: tuple[float, ...]
    """Ascending strengths, of which the self-test finds the smallest that is named."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault at one operator of the model."""

    sites: tuple[str, ...]
    """The canonical operators with the fault, in execution order. The first one must be named."""
    what: str
    """The fault in a sentence."""
    formula: str
    """`module:function` in `selftest.formulas`."""
    strength: Strength | None = None
    engines: tuple[str, ...] = ALL
    """The engines in which it can be planted, with the options that it needs."""
    both: str = ""
    """Options that both sides need for an effect of the fault, e.g. `dtype=float32`."""
    idle: str = ""
    """An option with which the fault changes nothing, e.g. `dtype=float32`."""
    not_beside_kernels: Mapping[str, str] = field(default_factory=dict)
    """Engine -> why the fault cannot be planted there beside the kernels."""
    kind: Kind = "computation"
    expected: Expected = "named"
    """`rounding`: legitimate rounding, which a bitwise comparison finds and a budget may allow;
    `precheck`: found by the precheck, before any value is compared."""
    mismatch: str = ""
    """The name of the mismatch that the precheck must report."""
    decode: bool = False
    """Whether only rows of decode steps have the fault."""
    needs: Literal["", "bias", "ties", "shared", "variant"] = ""
    """A property that the model needs: biases, experts whose logits tie, shared experts, or an
    operator that some families have in a form of their own."""
    also_at: tuple[str, ...] = ()
    """Later operators that are recomputed from the inputs of a faulty one, and may be over their
    budgets too."""
    operator: str = ""
    """The record of the catalogue that its layer must have, if it is a fault of such layers
    alone."""
    without: str = ""
    """A site that the model must lack."""
    op_class: str = ""
    """The key of its group in the catalogue."""

    @property
    def site(self) -> str:
        """The operator that must be named."""
        return self.sites[0]

    @property
    def sparse(self) -> bool:
        """Whether it is a fault of sparse layers."""
        return self.op_class == "routing"

    def fits(self, sites: Mapping[str, "Site"]) -> bool:
        """Whether a model with these sites has its operators. Operators within the experts have
        rows by token and expert, which only faults of sparse layers can handle."""
        if self.needs == "bias" and any(s.sparse for s in sites.values()):
            return False
        if self.without in sites:
            return False
        if not all(n in sites and self.sparse == sites[n].sparse for n in self.sites):
            return False
        layer = sites[self.site].layer
        records = {s.operator.name for s in sites.values() if s.layer == layer}
        return not self.operator or self.operator in records
