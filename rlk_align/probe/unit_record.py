"""The records of a decomposition: what the graft passes of an edge show about each unit.

A is the edge's first engine, B its second; X(xY) is a unit's output in X on Y's recorded inputs.
"""

from typing import Literal

from rlk_align.results import Cell, Count, EdgeName, Result, SideName, Size

Label = Literal["clean", "introducer", "amplifier", "undetermined"]


class Difference(Result):
    """One difference of a unit's output, element by element in float64, over some rows."""

    rms: Size
    rel_l2: Size
    """The L2 norm of the difference over that of the grafted engine's output on its own inputs."""
    max_abs: Size


class Split(Result):
    """The difference of one output, split into an introduced and an inherited part."""

    site: str
    introduced: Difference
    inherited: Difference
    rounding: Size
    """The largest rounding error of the two float64 subtractions; 0 except for values of very
    different magnitude. The two parts and the two errors add up to the observed difference
    exactly."""


class Order(Result):
    """One engine grafted with the other's inputs. If B is grafted, introduced = A(xA) - B(xA) and
    inherited = B(xA) - B(xB). If A is grafted, introduced = A(xB) - B(xB) and inherited = A(xA) -
    A(xB). In both orders the two add up to A(xA) - B(xB)."""

    grafted: SideName
    passname: str
    rows: Count
    """Rows whose inputs and outputs were all recorded; the figures below are of these rows."""
    left_out: Count
    """The other expected rows."""
    reason: str
    """Why rows are left out; empty if none is."""
    introduced_rows: Count
    """Rows in which a difference was introduced."""
    first: Cell | None
    """The first of these rows, by sample and position."""
    largest: Cell | None
    """The row with the largest introduced difference, by its L2 norm over that of the output."""
    splits: list[Split]
    """One for each output of the unit; empty if there are no rows."""
    inputs_rel_l2: Size | None
    """The relative distance of the two engines' recorded inputs."""

    @property
    def gain(self) -> float | None:
        """The relative size of the inherited difference over that of the inputs' difference; None
        if the inputs are equal."""
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
    """The class of its last operator."""
    inputs: list[str]
    """Recorded sites that it reads."""
    label: Label
    """`introducer`: its outputs differ on equal inputs in at least one order, which is a proof
    without a threshold. `amplifier`: it introduces nothing, and the inherited difference is
    relatively larger at its outputs than at its inputs. `clean`: neither. `undetermined`: no order
    could be determined."""
    reason: str
    """Why the unit is undetermined."""
    orders: list[Order]
    """B grafted, then A grafted."""
    interaction: list[Difference]
    """For each output, the difference between the two orders' introduced differences, over the rows
    of both: A(xA) - B(xA) - A(xB) + B(xB). Empty if an order is undetermined."""

    @property
    def introduced_rows(self) -> int:
        """Rows in which it introduced a difference, in the order with most of them."""
        return max((o.introduced_rows for o in self.orders), default=0)

    @property
    def gain(self) -> float | None:
        """The larger gain of the two orders."""
        return max((o.gain for o in self.orders if o.gain is not None), default=None)

    def part(self, which: Literal["introduced", "inherited"]) -> Difference | None:
        """The relatively largest part among its outputs, in the first order that was determined."""
        for order in self.orders:
            if order.splits:
                parts: list[Difference] = [getattr(s, which) for s in order.splits]
                return max(parts, key=lambda d: d.rel_l2)
        return None
