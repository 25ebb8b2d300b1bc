"""Runs the self-test. Clean captures are made once, faulty ones a few at a time, and each faulty
one is compared with a clean one of another engine."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import TypeVar

from rlk_align.capture.capture import capture, capture_each
from rlk_align.capture.request import CaptureRequest
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.prompts import load_prompts, save_prompts
from rlk_align.progress import Progress
from rlk_align.results import EdgeName, SideName
from rlk_align.selftest.biased_model import biased_model
from rlk_align.selftest.detect import alarms, detection, first_difference, first_shown, verdict_of
from rlk_align.selftest.faults.fault import Fault
from rlk_align.selftest.plan import (
    Case,
    cases,
    middle,
    pairs,
    pairs_of,
    refused,
    scoring_request,
)
from rlk_align.selftest.record import CleanPair, Detection, SelfTest
from rlk_align.selftest.tied_model import tied_model
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

Reported = TypeVar("Reported", Detection, CleanPair)
TOGETHER, SEEDS_TOGETHER = 16, 5
"""The numbers of faults and of seeds whose captures are on disk at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestRequest:
    """The faults, the engines and the model of a self-test."""

    engines: tuple[EngineSpec, ...]
    """Engines with different names."""
    faults: tuple[str, ...]
    seeds: int
    """The number of seeds of the pairs without a fault."""
    curves: bool
    model: str
    prompts: Path


def _quiet(_stage: str, _done: int, _total: int) -> None:
    """Captures and comparisons show no progress of their own."""


def _together(case: Case) -> tuple[str, str, bool, str]:
    """Cases with the same value can run in one process, one after another."""
    return case.engine.name, str(case.clean), case.chosen.fault.decode, case.chosen.fault.needs


def _name(detection: Detection) -> tuple[str, str, float]:
    engine = detection.rollout if detection.side == "rollout" else detection.train
    return detection.fault, engine, detection.strength


def selftest(
    request: SelfTestRequest,
    run: Run,
    progress: Progress,
    report: Callable[[Detection | CleanPair], None],
) -> SelfTest:
    """Plants every fault in every engine, on either side of every pair, and calls `report` with
    each result. Raises what capturing raises."""
    with run.locked():
        return _SelfTest(request, run, progress, report).run_all()


@dataclass
class _SelfTest:
    request: SelfTestRequest
    run: Run
    progress: Progress
    report: Callable[[Detection | CleanPair], None]
    _clean: dict[tuple[str, str], Trace] = field(default_factory=dict)

    def run_all(self) -> SelfTest:
        """Runs all faults and all clean pairs."""
        r = self.request
        self._prompts = self.run.folder / "selftest-prompts.jsonl"
        save_prompts(middle(load_prompts(r.prompts)), self._prompts)
        # The first engine of a pair can sample.
        first_engine = pairs(r.engines)[0][0]
        self._base = self._sampled(first_engine, 0)
        todo = sorted(cases(r.engines, r.faults, r.curves), key=_together)
        detections: list[Detection] = []
        for _, some in groupby(todo, key=_together):
            group = [*some]
            for start in range(0, len(group), TOGETHER):
                part = group[start : start + TOGETHER]
                done = len({*map(_name, detections)})
                detections += map(self._reported, self._detections(part, done, len(todo)))
        rows = sum(len(s.ids) for s in self._base.tokens.samples)
        clean = [self._reported(c) for c in self._clean_pairs()]
        versions = {t.record.engine: t.record.version for t in self._clean.values()}
        return SelfTest(
            engines={str(e): versions[e.name] for e in r.engines if e.name in versions},
            rows=rows,
            detections=detections,
            left_out=tuple(
                f"{c.chosen} in {c.engine}: {e.message}" for c, e in refused(r.engines, r.faults)
            ),
            clean=clean,
        )

    def _reported(self, result: Reported) -> Reported:
        self.report(result)
        return result

    def _request(
        self, engine: EngineSpec, fault: Fault | None, seed: int = 0, decode: bool = False
    ) -> CaptureRequest:
        model = str(self._model(fault.needs if fault else ""))
        request = scoring_request(engine, model, self._prompts)
        passes = ("decode", *request.passes) if decode else request.passes
        return replace(request, seed=seed, passes=passes)

    def _model(self, needs: str) -> Path:
        """The checkpoint, or a variant of it with the property that a fault needs."""
        model, folder = Path(self.request.model), self.run.folder
        if needs == "bias":
            return biased_model(model, folder / "biased-model")
        return tied_model(model, folder / "tied-model") if needs == "ties" else model

    def _sampled(self, engine: EngineSpec, seed: int) -> Trace:
        request = self._request(engine, None, seed, decode=True)
        return capture(request, "rollout", self.run, None, False, _quiet)

    def _scored(self, engine: EngineSpec, fault: Fault) -> Trace:
        """A clean capture of the tokens on which all faults are planted."""
        key = (str(engine), fault.needs)
        if key not in self._clean:
            request = self._request(engine, fault)
            tokens = self._base.folder / "tokens.parquet"
            self._clean[key] = capture(request, "train", self.run, tokens, False, _quiet)
        return self._clean[key]

    def _detections(self, some: Sequence[Case], done: int, total: int) -> Iterator[Detection]:
        """Detects faults that can be planted in one process, one after another."""
        decode = some[0].chosen.fault.decode
        requests = [self._request(c.faulty, c.chosen.fault, decode=decode) for c in some]
        tokens = None if decode else self._base.folder / "tokens.parquet"
        traces = capture_each(requests, "rollout", self.run, [tokens] * len(some), _quiet)
        for number, (case, faulty) in enumerate(zip(some, traces, strict=True), done):
            self.progress(f"fault {case.chosen} in {case.engine}", number, total)
            yield from self._of_case(case, faulty)
            shutil.rmtree(faulty.folder)

    def _of_case(self, case: Case, faulty: Trace) -> Iterator[Detection]:
        fault = case.chosen.fault
        planted = None if case.curve else self._planted(case, faulty)
        for pair in pairs_of(case, self.request.engines):
            sides: list[SideName] = ["rollout", "train"]
            if fault.decode:
                sides = ["rollout"]
            elif pair[0] != pair[1]:
                sides = [sides[pair.index(case.engine)]]
            for side in sides:
                other = pair[1] if side == "rollout" else pair[0]
                if fault.decode:
                    request = self._request(other, None)
                    tokens = faulty.folder / "tokens.parquet"
                    clean = capture(request, "train", self.run, tokens, False, _quiet)
                else:
                    clean = self._scored(case.beside(other), fault)
                yield detection(case, faulty, clean, pair, side, planted, _quiet)
                if fault.decode:
                    self._discard(clean)

    def _discard(self, trace: Trace) -> None:
        """Deletes a capture, unless it is a clean one that others are compared with: a fault of
        decode that changes no sampled token has the clean scores of the same tokens."""
        if trace.folder not in {clean.folder for clean in self._clean.values()}:
            shutil.rmtree(trace.folder)

    def _planted(self, case: Case, faulty: Trace) -> str | None:
        """The site at which the faulty engine first differs from the clean one. If the engine
        cannot show the fault's site, the first shown site after it counts as the fault's."""
        fault = case.chosen.fault
        passname = "decode" if fault.decode else "prefill"
        clean = self._sampled(case.clean, 0) if fault.decode else self._scored(case.clean, fault)
        site = first_difference(clean, faulty, passname)
        return fault.site if site == first_shown(fault.site, faulty, passname) else site

    def _clean_pairs(self) -> Iterator[CleanPair]:
        """Compares every pair without a fault, on new tokens for every seed."""
        for start in range(0, self.request.seeds, SEEDS_TOGETHER):
            seeds = range(start, min(start + SEEDS_TOGETHER, self.request.seeds))
            made: set[Path] = set()
            for pair in pairs(self.request.engines):
                self.progress(f"clean: {pair[0]} against {pair[1]}", start, self.request.seeds)
                sampled, scored = self._clean_captures(pair, seeds)
                made |= {t.folder for t in (*sampled, *scored)}
                for seed, a, b in zip(seeds, sampled, scored, strict=True):
                    yield CleanPair(
                        seed=seed,
                        rollout=str(pair[0]),
                        train=str(pair[1]),
                        tokens=a.tokens.sampled_tokens,
                        alarms=_blamed(a, b),
                    )
            for folder in made:
                shutil.rmtree(folder)

    def _clean_captures(
        self, pair: tuple[EngineSpec, EngineSpec], seeds: Sequence[int]
    ) -> tuple[list[Trace], list[Trace]]:
        """The rollout engine's samples for each seed, and the other engine's scores of them."""
        requests = [self._request(pair[0], None, seed, decode=True) for seed in seeds]
        sampled = capture_each(requests, "rollout", self.run, [None] * len(seeds), _quiet)
        requests = [self._request(pair[1], None)] * len(seeds)
        tokens = [t.folder / "tokens.parquet" for t in sampled]
        return sampled, capture_each(requests, "train", self.run, tokens, _quiet)


def _blamed(rollout: Trace, train: Trace) -> list[str]:
    """The false alarms of a comparison of two engines without a fault."""
    edges: tuple[EdgeName, ...] = ("prefill_vs_train", "decode_vs_train")
    blamed = [a for edge in edges for a in alarms(verdict_of(rollout, train, edge, _quiet))]
    return list(dict.fromkeys(blamed))
