"""The attributes of a model that several ranks have, each its own copy."""

from typing import Any

from rlk_align.engines.process.ranks import Ranks
from rlk_align.record.shared.together import of_all


def of_ranks(ranks: Ranks, attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of all ranks. Where a rank has another value, the value is a text that names
    the ranks of each, which equals no attribute of the other side."""
    return merged(of_all(ranks, attributes))


def merged(every: list[dict[str, Any]]) -> dict[str, Any]:
    """The attributes of these ranks, in rank order."""
    return {name: _merged(name, every) for name in dict.fromkeys(n for of in every for n in of)}


def _merged(name: str, every: list[dict[str, Any]]) -> Any:
    values = [of.get(name) for of in every]
    if all(value == values[0] for value in values):
        return values[0]
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(str(value), []).append(rank)
    said = [
        f"{value} on rank{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}"
        for value, held in holders.items()
    ]
    return "; ".join(said)
