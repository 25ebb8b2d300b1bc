"""The plan of a self-test: which fault is planted in which engine, and which pairs are compared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.registry import engine_info, require_installed
from rlk_align.engines.spec import COMMON_OPTIONS, EngineSpec
from rlk_align.errors import BadOption
from rlk_align.model.prompts import Prompt
from rlk_align.model.shape import ModelShape
from rlk_align.model.sites import model_sites
from rlk_align.selftest.faults.catalogue import FAULTS, Chosen, faults_of, planted_as
from rlk_align.selftest.faults.fault import ALL

OWN = {
    "fault": "the self-test plants the faults itself: name them by --faults",
    "model": "the self-test gives all engines one model: name it by --model",
}
"""Option of an engine that the self-test sets itself -> the error's message if it is given."""


ROLLOUTS = ("vllm", "sglang")
"""Engines that are the rollout side of a pair."""
PROMPTS, NEW_TOKENS = 8, 16
"""The prompts of a self-test and the tokens that it samples for each: some 600 rows."""


def middle(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Returns the prompts of middle length: short ones hardly test attention, and long ones are
    slow."""
    every = sorted(prompts, key=lambda p: len(p.ids or p.text or ""))
    first = max(0, (len(every) - PROMPTS) // 2)
    return every[first : first + PROMPTS]


def scoring_request(engine: EngineSpec, model: str, prompts: Path) -> CaptureRequest:
    """Returns the request of a capture that a self-test compares."""
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
    """Whether it is a point of a curve, which may be missed."""

    @property
    def clean(self) -> EngineSpec:
        """The engine without the fault, with the options that the fault needs."""
        return self.engine.plus(self._needed)

    @property
    def faulty(self) -> EngineSpec:
        """The engine with the fault and the options that it needs."""
        return self.engine.plus(f"{self._needed},fault={self.chosen}")

    @property
    def _needed(self) -> str:
        needed = self.chosen.needs(self.engine.name)
        return ",".join(f"{name}={value}" for name, value in needed.items())

    def beside(self, engine: EngineSpec) -> EngineSpec:
        """Returns the engine of the clean side, with the options that the fault needs there."""
        return engine.plus(self.chosen.fault.both)


def check_engines(texts: Sequence[str]) -> tuple[EngineSpec, ...]:
    """Returns the engines to compare; if none is named, all installed ones that support planted
    faults. Raises BadOption, MissingDependency or UnknownEngine."""
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
    """Returns the named faults or, if none is named, all whose operators the model has. Raises
    BadOption for an unknown fault, and for a named one whose operators the model lacks or that can
    be planted in none of the engines."""
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
    """Returns (rollout engine, training engine) of every two engines. A single engine is compared
    with itself."""
    if len(engines) == 1:
        return [(engines[0], engines[0])]
    # vLLM and SGLang do not train, and some engines cannot sample.
    order = sorted(engines, key=lambda e: (e.name not in ROLLOUTS, not e.info.samples))
    return [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]


def pairs_of(case: Case, engines: Sequence[EngineSpec]) -> Iterator[tuple[EngineSpec, EngineSpec]]:
    """Yields the pairs in which a case is compared; for a point of a curve only the first of
    them."""
    fault = case.chosen.fault
    chosen = [p for p in pairs(engines) if case.engine in p]
    if fault.decode:
        chosen = [p for p in chosen if p[0] == case.engine]
    if fault.both and fault.both.partition("=")[0] not in COMMON_OPTIONS:
        # In an engine that does not support the fault these options may mean something else.
        having = {written.partition(":")[0] for written in fault.engines}
        chosen = [p for p in chosen if having.issuperset(planted_as(e.name) for e in p)]
    yield from chosen[:1] if case.curve else chosen


def cases(engines: Sequence[EngineSpec], faults: Sequence[str], curves: bool) -> list[Case]:
    """Returns every fault in every engine that supports it, and the points of its curve."""
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
    """Yields the cases that the engines' options exclude, with the reason."""
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
    """All engines that a case runs. Raises BadOption if an engine's options exclude the fault."""
    return [case.faulty, *(case.beside(e) for pair in pairs_of(case, engines) for e in pair)]
