"""The origin of the numbers: facts about engines side by side, differences first."""

from collections.abc import Mapping, Sequence

from rlk_align.results import EngineRecord


def side_by_side(facts: Sequence[Mapping[str, str]]) -> list[tuple[bool, str, list[str]]]:
    """Returns (whether the columns differ, name, a value for each column), differences first. A
    dash marks a missing value. Both parts keep the order of the facts."""
    names = dict.fromkeys(name for column in facts for name in column)
    rows = [(name, [column.get(name, "–") for column in facts]) for name in names]
    compared = [(len(set(values)) > 1, name, values) for name, values in rows]
    return sorted(compared, key=lambda row: not row[0])


def engine_facts(engine: EngineRecord) -> dict[str, str]:
    """Returns the recorded facts of an engine, by name."""
    facts = {
        "engine": engine.name,
        "version": engine.version,
        "dtype": engine.dtype,
        "model": engine.model,
    }
    facts |= {f"option {name}": str(value) for name, value in engine.options.items()}
    return facts | {name: str(value) for name, value in engine.environment.items()}
