"""The planted fault of an engine's spec, put into the live engine from outside."""

import importlib

from rlk_align.engines.base import Engine
from rlk_align.engines.faults.catalogue import choose
from rlk_align.engines.faults.operators import Operators, plant

OPERATORS = {
    "hf": "rlk_align.engines.hf.operators:HFOperators",
    "megatron": "rlk_align.engines.megatron.operators:MegatronOperators",
    "vllm": "rlk_align.engines.vllm.operators:VLLMOperators",
}
"""Engine -> its live operators. `faults.lists` says which faults it can have."""


class PlantedFault:
    """The fault in one engine, whose spec may come to name another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._operators: Operators | None = None

    def plant(self) -> None:
        """Puts the spec's fault, if any, in place of the one before."""
        if self._operators is not None:
            self._operators.close()
            self._operators = None
        spec = self._engine.spec
        fault = spec.option("fault")
        if fault is not None:
            module, _, name = OPERATORS[spec.name].partition(":")
            operators = getattr(importlib.import_module(module), name)(self._engine)
            self._operators = operators
            plant(choose(spec.name, str(fault)), operators)
