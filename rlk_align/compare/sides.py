"""The two sides of a comparison, each with the other."""

from rlk_align.results import SideName
from rlk_align.trace.reader import Trace


def both_ways(rollout: Trace, train: Trace) -> tuple[tuple[SideName, Trace, Trace], ...]:
    """(side, its trace, the trace of the other side), for each side."""
    return ("rollout", rollout, train), ("train", train, rollout)
