"""Where both sides' numbers come from, side by side, differences first."""

from dataclasses import dataclass

from rlk_align.results import Comparison, EngineRecord


@dataclass(frozen=True)
class Fact:
    """One thing that is known of both sides; a dash where a side does not say."""

    name: str
    rollout: str
    train: str

    @property
    def differs(self) -> bool:
        return self.rollout != self.train


def provenance(comparison: Comparison) -> list[Fact]:
    """Facts that differ come first; each half keeps the order of the engines' records."""
    rollout, train = (engine_facts(comparison.engines[side]) for side in ("rollout", "train"))
    names = dict.fromkeys([*rollout, *train])
    facts = [Fact(name, rollout.get(name, "–"), train.get(name, "–")) for name in names]
    return sorted(facts, key=lambda fact: not fact.differs)


def engine_facts(engine: EngineRecord) -> dict[str, str]:
    """All that an engine says of itself, by name."""
    facts = {
        "engine": engine.name,
        "version": engine.version,
        "dtype": engine.dtype,
        "model": engine.model,
    }
    facts |= {f"option {name}": str(value) for name, value in engine.options.items()}
    return facts | {name: str(value) for name, value in engine.environment.items()}
