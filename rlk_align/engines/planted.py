"""The planted fault of an engine's spec, put into the live engine from outside."""

import importlib
from contextlib import ExitStack

from rlk_align.engines.base import Engine
from rlk_align.engines.faults.catalogue import choose

PLANTERS = {
    "hf": "rlk_align.engines.hf.operators",
    "megatron": "rlk_align.engines.megatron.operators",
    "vllm": "rlk_align.engines.vllm.planting",
}
"""Engine -> the module whose `plant_fault(engine, chosen)` puts a fault into its live model, and
returns what takes it out again. `faults.lists` says which faults it can have."""


class PlantedFault:
    """The fault in one engine, whose spec may come to name another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._planted: ExitStack | None = None

    def plant(self) -> None:
        """Puts the spec's fault, if any, in place of the one before; called on all ranks."""
        if self._planted is not None:
            self._planted.close()
            self._planted = None
        spec = self._engine.spec
        fault = spec.option("fault")
        if fault is not None:
            planter = importlib.import_module(PLANTERS[spec.name])
            self._planted = planter.plant_fault(self._engine, choose(spec.name, str(fault)))
