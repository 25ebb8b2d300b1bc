"""What the self-test plants, where, and which engines it then compares; no torch is needed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.registry import engine_info, require_installed
from rlk_align.engines.spec import COMMON_OPTIONS, EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.families import ModelShape
from rlk_align.model.prompts import Prompt
from rlk_align.model.sites import model_sites
from rlk_align.selftest.faults.catalogue import FAULTS, Chosen, faults_of, planted_as
from rlk_align.selftest.faults.fault import ALL

OWN = {
    "fault": "the self-test plants the faults itself: name them by --faults",
    "model": "the self-test gives all engines one model: name it by --model",
}
"""Options of engines that the self-test sets -> what to say where they are given."""


PROMPTS, NEW_TOKENS = 8, 16
"""How much text the faults are seen on: some 600 rows of the embedded prompts."""


def middle(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of middle length: short ones show little of attention, long ones take long."""
    every = sorted(prompts, key=lambda p: len(p.ids or p.text or ""))
    first = max(0, (len(every) - PROMPTS) // 2)
    return every[first : first + PROMPTS]


def scoring_request(engine: EngineSpec, model: str, prompts: Path) -> CaptureRequest:
    """A capture of what a self-test compares."""
    return CaptureRequest(
        engine=engine,
        model=model,
        prompts=prompts,
        max_new_tokens=NEW_TOKENS,
        passes=("prefill",),
        controls=False,
    )


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in one engine."""

    chosen: Chosen
    engine: EngineSpec
    curve: bool = False
    """Whether it is a point of a curve, and need not be seen."""

    @property
    def clean(self) -> EngineSpec:
        """The engine without the fault, with what the fault needs."""
        return self.engine.plus(self._needed)

    @property
    def faulty(self) -> EngineSpec:
        """The engine with the fault."""
        return self.engine.plus(f"{self._needed},fault={self.chosen}")

    @property
    def _needed(self) -> str:
        needed = self.chosen.needs(self.engine.name)
        return ",".join(f"{name}={value}" for name, value in needed.items())

    def beside(self, engine: EngineSpec) -> EngineSpec:
        """The engine of the clean side, with what the fault needs there."""
        return engine.plus(self.chosen.fault.both)


def check_engines(texts: Sequence[str]) -> tuple[EngineSpec, ...]:
    """The engines to compare; those that faults can be planted in and that are installed where none
    is named. Raises BadOption, MissingDependency, UnknownEngine."""
    if not texts:
        return tuple(EngineSpec(name) for name in ALL if engine_info(name).installed)
    chosen: dict[str, EngineSpec] = {}
    for text in texts:
        spec = EngineSpec.parse(text)
        for option in OWN.keys() & spec.options.keys():
            raise BadOption(f"--engines {text}: {OWN[option]}")
        if spec.option("python") is None:
            require_installed(spec.name)
        if spec.name in chosen:
            raise BadOption(
                f"--engines {chosen[spec.name]},{text}: engine {spec.name!r} is named twice",
                "name it once; `compare` takes the same engine on both sides",
            )
        chosen[spec.name] = spec
    if not any(faults_of(name) for name in chosen):
        raise BadOption(
            f"--engines {_list(texts)}: none of them supports planted faults", f"add {_list(ALL)}"
        )
    if not any(spec.info.samples for spec in chosen.values()):
        raise BadOption(f"--engines {_list(texts)}: none of them samples", "add hf or vllm")
    return tuple(chosen.values())


def check_faults(
    names: Sequence[str], shape: ModelShape, engines: Sequence[EngineSpec]
) -> tuple[str, ...]:
    """Returns the named faults, or all that a model of that shape has a place for where none is
    named. Raises BadOption for an unknown one, and for a named one that has no place in the model
    or can be planted in none of the engines."""
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
        if not cases(engines, [name], curves=False):
            why = f"it cannot be planted in {_list(map(str, engines))}"
            error = next((error for _, error in refused(engines, [name])), BadOption(why))
            raise BadOption(f"--faults {name}: {error.message}", error.fix)
    return tuple(dict.fromkeys(names)) or tuple(fitting)


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def pairs(engines: Sequence[EngineSpec]) -> list[tuple[EngineSpec, EngineSpec]]:
    """(rollout, training engine) of every two engines; one engine alone is compared with itself."""
    if len(engines) == 1:
        return [(engines[0], engines[0])]
    # vLLM is nobody's trainer, and what cannot sample is nobody's rollout.
    order = sorted(engines, key=lambda e: (e.name != "vllm", not e.info.samples))
    return [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]


def pairs_of(case: Case, engines: Sequence[EngineSpec]) -> Iterator[tuple[EngineSpec, EngineSpec]]:
    """The pairs that a case is seen in; a point of a curve in the first of them alone."""
    fault = case.chosen.fault
    chosen = [p for p in pairs(engines) if case.engine in p]
    if fault.decode:
        chosen = [p for p in chosen if p[0] == case.engine]
    if fault.both and fault.both.partition("=")[0] not in COMMON_OPTIONS:
        # An engine that cannot have the fault may not mean the same by these options.
        having = {written.partition(":")[0] for written in fault.engines}
        chosen = [p for p in chosen if having.issuperset(planted_as(e.name) for e in p)]
    yield from chosen[:1] if case.curve else chosen


def cases(engines: Sequence[EngineSpec], faults: Sequence[str], curves: bool) -> list[Case]:
    """Every fault in every engine that can have it, in that order, and the points of its curve."""
    planned = []
    for case in _usual(engines, faults):
        if _refusal(case, engines):
            continue
        planned.append(case)
        name, fault = case.chosen.name, case.chosen.fault
        if curves and fault.strength and fault.expected == "named" and not fault.decode:
            planned += [
                Case(Chosen(name, fault, strength), case.engine, curve=True)
                for strength in fault.strength.curve
                if strength != fault.strength.default
            ]
    return planned


def refused(
    engines: Sequence[EngineSpec], faults: Sequence[str]
) -> Iterator[tuple[Case, BadOption]]:
    """The cases that the engines' options rule out, and why."""
    for case in _usual(engines, faults):
        if error := _refusal(case, engines):
            yield case, error


def _usual(engines: Sequence[EngineSpec], faults: Sequence[str]) -> Iterator[Case]:
    """Every fault, as strong as usual, in every engine that can have it with some options."""
    for engine in engines:
        known = faults_of(engine.name)
        for name in faults:
            if name in known:
                strength = known[name].strength
                usual = strength.default if strength else 0.0
                case = Case(Chosen(name, known[name], usual), engine)
                if any(pairs_of(case, engines)):
                    yield case


def _refusal(case: Case, engines: Sequence[EngineSpec]) -> BadOption | None:
    try:
        _specs(case, engines)
    except BadOption as error:
        return error
    return None


def _specs(case: Case, engines: Sequence[EngineSpec]) -> list[EngineSpec]:
    """All that a case runs. Raises BadOption where an engine's options do not go with the fault."""
    return [case.faulty, *(case.beside(e) for pair in pairs_of(case, engines) for e in pair)]
