"""Plants the fault that an engine's spec names into the live engine, from outside the engine."""

from contextlib import ExitStack
from pkgutil import resolve_name

from rlk_align.engines.base import Engine
from rlk_align.selftest.faults.catalogue import choose


def plant_fault(engine: Engine) -> ExitStack:
    """Plants the fault of `engine.spec`, on all ranks. Closing the returned stack removes it again.
    Raises BadOption if the model has no operator that the fault could change."""
    spec = engine.spec
    planter = resolve_name(spec.info.planting)
    planted: ExitStack = planter(engine, choose(spec.name, str(spec.option("fault"))))
    return planted
