"""Which distribution the log-probs of each side are of, as the attributes of its trace say."""

from collections.abc import Mapping
from typing import Any

from rlk_align.model.truncation import truncation
from rlk_align.results import SamplingDistribution, SideName
from rlk_align.trace.reader import Trace


def distributions(sides: Mapping[SideName, Trace]) -> dict[SideName, SamplingDistribution]:
    """The distribution of each side that states its temperature."""
    stated = {side: _distribution(trace.record.attributes) for side, trace in sides.items()}
    return {side: found for side, found in stated.items() if found is not None}


def _distribution(attributes: Mapping[str, Any]) -> SamplingDistribution | None:
    temperature, limits = attributes.get("temperature"), truncation(attributes)
    if not isinstance(temperature, int | float):
        return None
    if not all(isinstance(value, int | float) for value in limits.values()):
        return None
    return SamplingDistribution(temperature=temperature, limits=limits)
