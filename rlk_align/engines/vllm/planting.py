"""A fault in vLLM: planted by each of its workers, where the live models are."""

from contextlib import ExitStack
from typing import Any

from rlk_align.engines.faults.catalogue import Chosen
from rlk_align.engines.vllm.operators import FaultPlan
from rlk_align.errors import BadOption


def plant_fault(engine: Any, chosen: Chosen) -> ExitStack:
    """Into the models of all ranks. Raises BadOption for a model that has no place for it."""
    if engine.production:
        raise BadOption("a fault cannot be planted in compiled code", "--no-production")
    plan = FaultPlan(str(chosen), engine.shape, engine.model_path)
    refused = engine.llm.collective_rpc("rlk_plant", args=(plan,))
    for error in filter(None, refused):
        raise error
    planted = ExitStack()
    planted.callback(engine.llm.collective_rpc, "rlk_uproot")
    return planted
