"""What the self-test plants, where, and which engines it then compares; no torch is needed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlk_align.engines.faults.catalogue import FAULTS, Chosen, faults_of
from rlk_align.engines.faults.fault import ALL
from rlk_align.engines.registry import engine_info, require_installed
from rlk_align.errors import BadOption
from rlk_align.model.families import ModelShape
from rlk_align.model.sites import model_sites


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one engine."""

    chosen: Chosen
    engine: str
    curve: bool = False
    """Whether it is a point of a curve, and need not be seen."""

    @property
    def options(self) -> str:
        """What the engine needs beside the fault."""
        return _written(self.chosen.needs(self.engine))

    @property
    def other_options(self) -> str:
        """What the clean side needs."""
        return self.chosen.fault.both

    @property
    def spec(self) -> str:
        """The faulty engine's."""
        return spec(self.engine, f"{self.options},fault={self.chosen}".lstrip(","))


def spec(engine: str, options: str) -> str:
    """`NAME:OPTIONS`."""
    return f"{engine}:{options}" if options else engine


def _written(options: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items())


def check_engines(names: Sequence[str]) -> tuple[str, ...]:
    """Engines in which faults can be planted; all that are installed where none is named. Raises
    BadOption, MissingDependency, UnknownEngine."""
    if not names:
        return tuple(name for name in ALL if engine_info(name).installed)
    for name in names:
        if ":" in name:
            raise BadOption(
                f"--engines {name}: the self-test takes engines without options",
                f"--engines {name.partition(':')[0]}",
            )
        require_installed(name)
        if not faults_of(name):
            raise BadOption(
                f"--engines {name}: it supports no planted fault", f"choose {_list(ALL)}"
            )
    return tuple(dict.fromkeys(names))


def check_faults(names: Sequence[str], shape: ModelShape) -> tuple[str, ...]:
    """Returns the named faults, or all that a model of that shape has a place for where none is
    named. Raises BadOption for an unknown one, and for a named one that has no place."""
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        raise BadOption(f"--faults {_list(unknown)}: unknown", f"choose from {_list(FAULTS)}")
    sites = {s.name: s for s in model_sites(shape)}
    fitting = {name: fault for name, fault in FAULTS.items() if fault.fits(sites)}
    for name in names:
        if name not in fitting:
            where = ", ".join(FAULTS[name].sites)
            raise BadOption(
                f"--faults {name}: this {shape.model_type} model lacks the operator where it is "
                f"planted, {where}",
                f"choose from {_list(fitting)}",
            )
    return tuple(dict.fromkeys(names)) or tuple(fitting)


def _list(names: Sequence[str] | dict) -> str:
    return ", ".join(names)


def pairs(engines: Sequence[str]) -> list[tuple[str, str]]:
    """(rollout, training engine) of every two engines; one engine alone is compared with itself."""
    if len(engines) == 1:
        return [(engines[0], engines[0])]
    # vLLM is nobody's trainer, and what cannot sample is nobody's rollout.
    order = sorted(engines, key=lambda e: (e != "vllm", not engine_info(e).samples))
    return [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]


def pairs_of(case: Case, engines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The pairs that a case is seen in; a point of a curve in the first of them alone."""
    fault = case.chosen.fault
    chosen = [p for p in pairs(engines) if case.engine in p]
    if fault.decode:
        chosen = [p for p in chosen if p[0] == case.engine]
    if fault.both:
        # An engine that cannot have the fault may not mean the same by these options.
        having = {written.partition(":")[0] for written in fault.engines}
        chosen = [p for p in chosen if having.issuperset(p)]
    yield from chosen[:1] if case.curve else chosen


def cases(engines: Sequence[str], faults: Sequence[str], curves: bool) -> list[Case]:
    """Every fault in every engine that can have it, in that order, and the points of its curve."""
    planned = []
    for engine in engines:
        known = faults_of(engine)
        for name in faults:
            if name not in known:
                continue
            fault = known[name]
            usual = fault.strength.default if fault.strength else 0.0
            case = Case(Chosen(name, fault, usual), engine)
            if not list(pairs_of(case, engines)):
                continue
            planned.append(case)
            if curves and fault.strength and fault.expected == "named" and not fault.decode:
                planned += [
                    Case(Chosen(name, fault, strength), engine, curve=True)
                    for strength in fault.strength.curve
                    if strength != usual
                ]
    return planned
