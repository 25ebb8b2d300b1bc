"""What the graft passes of one edge say of each unit, as frozen records.

A is the edge's first engine, B its second; X(xY) is a unit's output in X on Y's recorded inputs.
"""

from typing import Literal

from rlk_align.results import Cell, Count, EdgeName, Result, SideName, Size

Label = Literal["clean", "introducer", "amplifier", "undetermined"]


class Difference(Result):
    """One difference of a unit's output, element by element in float64, over some rows."""

    rms: Size
    rel_l2: Size
    """The difference's L2 norm over that of the output of the engine that is grafted, on its own
    inputs."""
    max_abs: Size


class Split(Result):
    """One output's difference, split."""

    site: str
    introduced: Difference
    inherited: Difference
    rounding: Size
    """The largest rounding error of a float64 subtraction here; 0 but for values of very different
    magnitude. Introduced, inherited and the two errors add up to the observed difference
    exactly."""


class Order(Result):
    """One engine grafted with the other's inputs. B grafted: introduced = A(xA) - B(xA), inherited
    = B(xA) - B(xB). A grafted: introduced = A(xB) - B(xB), inherited = A(xA) - A(xB). Either way
    they add up to A(xA) - B(xB)."""

    grafted: SideName
    passname: str
    rows: Count
    """Rows of which all that is needed is recorded; the figures below are of these."""
    left_out: Count
    """Rows of which it is not."""
    reason: str
    """Why rows are left out; empty where none is."""
    introduced_rows: Count
    """Rows in which anything was introduced."""
    first: Cell | None
    """The first of them, by sample and position."""
    largest: Cell | None
    """Where what was introduced is largest, by its L2 norm over that of the output."""
    splits: list[Split]
    """One for each output of the unit; empty where there are no rows."""
    inputs_rel_l2: Size | None
    """How far the recorded inputs of the two engines lie apart."""

    @property
    def gain(self) -> float | None:
        """Relative size of what is inherited over that of the inputs' difference; None where the
        inputs are equal."""
        if not self.splits or not self.inputs_rel_l2:
            return None
        return max(s.inherited.rel_l2 for s in self.splits) / self.inputs_rel_l2


class Unit(Result):
    """An operator, or a region of operators that an engine computes as one."""

    edge: EdgeName
    name: str
    """The site's name, or a region's: `layers.3.attn_residual+mlp_norm`."""
    sites: list[str]
    region: bool
    layer: Count | None
    op_class: str
    """The class of the last operator in it."""
    inputs: list[str]
    """Recorded sites that it reads."""
    label: Label
    """`introducer`: it gives other outputs on equal inputs, in either order, which is a proof
    without a threshold. `amplifier`: it introduces nothing, and what it inherits is relatively
    larger than at its inputs. `clean`: neither. `undetermined`: no order could be determined."""
    reason: str
    """Why it is undetermined."""
    orders: list[Order]
    """B grafted, then A grafted."""
    interaction: list[Difference]
    """The difference of what the two introduced, by output, over rows of both orders: A(xA) - B(xA)
    - A(xB) + B(xB). Empty where one order is undetermined."""

    @property
    def introduced_rows(self) -> int:
        """Rows in which it introduced, the order with the most."""
        return max((o.introduced_rows for o in self.orders), default=0)

    @property
    def gain(self) -> float | None:
        """The larger of the two orders'."""
        return max((o.gain for o in self.orders if o.gain is not None), default=None)

    def part(self, which: Literal["introduced", "inherited"]) -> Difference | None:
        """The larger of its outputs', relatively, in the first order that was determined."""
        for order in self.orders:
            if order.splits:
                parts: list[Difference] = [getattr(s, which) for s in order.splits]
                return max(parts, key=lambda d: d.rel_l2)
        return None
