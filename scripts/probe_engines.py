"""What the probe finds of real engines, and what it costs: one engine against another.

    python scripts/probe_engines.py --model M --prompts F --out reports/engines/engines-probe \\
        --rollout vllm --train megatron --seconds 400 -- compare probe attribute amplify faults

Stages, in the order they are named:

    compare     rlk-align compare of a healthy pair: budgets, verdict, seconds of each part
    probe, probe=EDGE
                graft passes of prefill_vs_train, or of another edge, and their decomposition, from
                the run of `compare`
    attribute   contributions of the introducers to the log-probs
    amplify     the rollout engine's response to one ulp at the embedding
    faults      the self-test: planted faults in either engine, against the other without one
    dtype=D, rollout=SPEC
                `compare` again, in another dtype, or with another rollout, on the short prompts

Writes OUT.jsonl, a line for everything that was found, as it comes. What was captured stays in
--folder, and is taken from there when a later call goes on.
"""

import argparse
import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from probe_lines import by_op, passes, rounding_table, summary, told
from probe_monitor import Monitor, Stages, machine

import rlk_align.probe.attribute as attribution
from rlk_align.capture.request import CaptureRequest, TracePlan
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import RlkError
from rlk_align.judge.verdict import Verdict, over_budget
from rlk_align.judge.wording import how_off
from rlk_align.model.edges import EDGES
from rlk_align.model.families import read_shape
from rlk_align.model.prompts import Prompt, load_prompts, save_prompts
from rlk_align.model.sites import RowIndex
from rlk_align.pipeline import CompareRequest, compare
from rlk_align.probe.amplify import amplification
from rlk_align.probe.decompose import decompose
from rlk_align.probe.determined import RecordedEnd
from rlk_align.probe.graft import GraftedEdge, graft_passes
from rlk_align.probe.units import Unit
from rlk_align.results import EdgeName
from rlk_align.selftest.plan import check_faults
from rlk_align.selftest.record import CleanPair, Detection
from rlk_align.selftest.run import SelfTestRequest, selftest
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

EDGE: EdgeName = "prefill_vs_train"
SHORT, NEW_TOKENS = (8, 16, 40), 16
"""Prompts of the faults: how many, and how long they are."""


class Probe:
    """All stages, on one model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.monotonic()
        self.folder: Path = args.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lines = args.out.with_suffix(".jsonl")
        self.monitor = Monitor()
        self.plan = TracePlan(budget=args.budget)
        self.short = self.folder / "short.jsonl"
        self.run: Run | None = None
        self.edge: GraftedEdge | None = None
        self.units: list[Unit] = []

    @property
    def left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.started)

    def tell(self, kind: str, **found: Any) -> None:
        at = round(time.monotonic() - self.started, 1)
        line = json.dumps({"kind": kind, "at": at, **found}, default=str)
        with self.lines.open("a") as file:
            file.write(line + "\n")
        print(line if len(line) < 1500 else line[:1500] + " ...", flush=True)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Stages]:
        """Tells of its seconds and memory; what it raises is told, and the next stage begins."""
        stages = Stages(name)
        self.monitor.take()
        try:
            yield stages
        except Exception as error:  # the next stage is to run all the same
            self.tell("failed", stage=name, error=f"{type(error).__name__}: {error}")
            traceback.print_exc()
            self._logs()
        gc.collect()
        own = 0
        if torch.cuda.is_available():
            own = torch.cuda.max_memory_allocated()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds = round(time.monotonic() - stages.started, 1)
        peaks = {**self.monitor.take(), "gpu_peak_here_gb": round(own / 1e9, 2)}
        self.tell("stage", stage=name, seconds=seconds, parts=stages.done(), **peaks)

    def _logs(self) -> None:
        for log in sorted(self.folder.glob("**/worker.log"), key=lambda p: p.stat().st_mtime)[-1:]:
            print(f"--- {log}", *log.read_text(errors="replace").splitlines()[-40:], sep="\n")

    def all(self) -> None:
        self.tell("machine", **machine(), command=sys.argv)
        self._short_prompts()
        for text in self.args.stages:
            name, _, value = text.partition("=")
            if self.left < 20:
                self.tell("left out", stage=text)
                continue
            if name == "probe" and value:
                self._probe(value)
            elif value:
                self._again(name, value)
            else:
                getattr(self, f"_{name}")()

    def _short_prompts(self) -> None:
        """The ends of prompts, of few tokens each."""
        every = load_prompts(self.args.prompts)
        if any(p.ids is None for p in every):
            save_prompts(every[: SHORT[0]], self.short)
            return
        count, low, high = SHORT
        few = []
        for i in range(count):
            prompt, length = every[i % len(every)], low + (high - low) * i // (count - 1)
            ids = (prompt.ids or ())[-length:]
            few.append(Prompt(f"s{i}", None, ids))
        save_prompts(few, self.short)

    def _request(
        self, spec: str, prompts: Path, new_tokens: int, passes: tuple[str, ...]
    ) -> CaptureRequest:
        return CaptureRequest(
            engine=EngineSpec.parse(spec),
            model=str(self.args.model),
            prompts=prompts,
            max_new_tokens=new_tokens,
            trace=self.plan,
            passes=passes,
        )

    def _compared(
        self, name: str, pair: tuple[str, str], prompts: Path, new: int, tell: Stages
    ) -> Run:
        run = Run(self.folder / name)
        run.folder.mkdir(parents=True, exist_ok=True)
        request = CompareRequest(
            rollout=self._request(pair[0], prompts, new, ("decode", "prefill")),
            train=self._request(pair[1], prompts, new, ("prefill",)),
            judged=EDGES,
            command=tuple(sys.argv),
        )
        verdict = compare(request, run, tell)
        self._tell_verdict(name, verdict, run)
        return run

    def _compare(self) -> None:
        with self.stage("compare") as tell:
            pair = (self.args.rollout, self.args.train)
            new = self.args.max_new_tokens
            self.run = self._compared("run", pair, self.args.prompts, new, tell)

    def _again(self, what: str, value: str) -> None:
        rollout, train = (EngineSpec.parse(s) for s in (self.args.rollout, self.args.train))
        if what == "dtype":
            rollout, train = (
                EngineSpec(s.name, {**s.options, "dtype": value}) for s in (rollout, train)
            )
        else:
            rollout = EngineSpec.parse(value)
        name = f"{what}-{value}".replace(":", "-").replace("=", "-").replace(",", "-")
        with self.stage(name) as tell:
            self._compared(name, (str(rollout), str(train)), self.short, NEW_TOKENS, tell)

    def _tell_verdict(self, name: str, verdict: Verdict, run: Run) -> None:
        c = verdict.comparison
        for role in ("rollout", "train"):
            trace = Trace(run.capture_folder(role))
            self.tell("capture", run=name, role=role, passes=passes(trace.folder))
        self.tell(
            "verdict",
            run=name,
            status=verdict.status,
            contract=verdict.contract.id,
            doubts=verdict.doubts,
            notes=verdict.notes,
            tokens=c.tokens,
            rows={e.name: [e.paired_rows, e.expected_rows] for e in c.edges},
            metrics={e.name: e.metrics.model_dump() for e in c.edges},
            first={e.name: e.first_bitwise and e.first_bitwise.site for e in c.edges},
            introduced={e.name: by_op(e) for e in c.edges},
            over={
                e.name: [
                    [o.unit.site, o.side, [how_off(u, verdict.contract) for u in o.units]]
                    for o in over_budget(verdict, e)
                ]
                for e in c.edges
            },
            breaches=[
                [b.edge, b.limit, b.metric, b.site, b.side, b.passname, b.value, b.fail]
                for b in verdict.breaches
            ],
            engines={k: [e.name, e.version, e.dtype, e.options] for k, e in c.engines.items()},
            controls=c.controls and c.controls.model_dump(),
        )
        for line in rounding_table(verdict):
            self.tell("rounding", run=name, **line)

    def _opened_run(self) -> bool:
        """The run of `compare`, of this call or of one before."""
        if self.run is None:
            with contextlib.suppress(RlkError):
                self.run = Run.open(str(self.folder / "run"))
        return self.run is not None

    def _probe(self, name: EdgeName = EDGE) -> None:
        if not self._opened_run():
            return
        assert self.run is not None
        self.edge = None
        with self.stage(f"graft {name}") as tell:
            (self.edge,) = graft_passes(self.run, (name,), tell, self.plan)
        if self.edge is None:
            return
        for role in ("rollout", "train"):
            folders = self.run.folder.glob(f"captures/{role}[-.]*")
            self.tell("forwards", role=role, passes={f.name: passes(f) for f in folders})
        with self.stage("self-graft") as tell:
            index = RowIndex(self.edge.tokens)
            for end in (self.edge.first, self.edge.second):
                recorded = RecordedEnd(end, index)
                sites = list(end.own.record.sites)
                wrong = {s: n for s in sites if (n := recorded.not_reproduced(s))}
                self.tell("self-graft", side=end.side, sites=len(sites), not_reproduced=wrong)
        with self.stage("decompose") as tell:
            self.units = decompose(self.edge, tell)
            for u in self.units:
                self.tell("unit", edge=name, **told(u))
            labels = [u.label for u in self.units]
            self.tell(
                "labels",
                edge=name,
                **{label: labels.count(label) for label in dict.fromkeys(labels)},
            )

    def _attribute(self) -> None:
        if not self.units:
            self._probe()
        if self.run is None or self.edge is None or not self.units:
            return
        attribution.OPENED = self.args.opened
        with self.stage("attribute") as tell:
            found = attribution.attribute(self.run, self.edge, self.units, tell, self.plan)
            self.tell("attribution", **found.model_dump())
            self.tell("contributions", **summary(found))

    def _amplify(self) -> None:
        if not self._opened_run():
            return
        assert self.run is not None
        with self.stage("amplify") as tell:
            for a in amplification(self.run, "rollout", ["embed"], tell, plan=self.plan):
                largest = a.largest
                self.tell(
                    "amplification",
                    perturbed=a.perturbed,
                    rel_l2=a.rel_l2,
                    gain=a.gain,
                    max_abs_dlogp=a.max_abs_dlogp,
                    mean_abs_dlogp=a.mean_abs_dlogp,
                    largest=largest and [largest.name, largest.gain],
                    responses={r.name: r.rel_l2 for r in a.responses},
                )

    def _faults(self) -> None:
        """The self-test of these faults, in either engine, on the short prompts."""
        pair = [EngineSpec.parse(s) for s in (self.args.rollout, self.args.train)]
        asked = self.args.faults.split(",") if self.args.faults else ()
        engines = tuple({s.name: s for s in pair}.values())
        named = check_faults(asked, read_shape(Path(self.args.model)), engines)
        request = SelfTestRequest(
            engines=engines,
            faults=named,
            seeds=0,
            curves=self.args.curves,
            model=str(self.args.model),
            prompts=self.short,
            planted=tuple(filter(None, self.args.planted.split(","))),
            together=self.args.together,
        )
        run = Run(self.folder / "faults")
        run.folder.mkdir(parents=True, exist_ok=True)
        with self.stage("faults") as tell:
            selftest(request, run, tell, self._tell_fault)

    def _tell_fault(self, found: Detection | CleanPair) -> None:
        if isinstance(found, Detection):
            self.tell("fault", as_expected=found.as_expected, **found.model_dump())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/probe"))
    parser.add_argument("--rollout", default="vllm")
    parser.add_argument("--train", default="megatron")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument(
        "--budget", type=int, default=16 * 10**9, help="bytes of a capture's values"
    )
    parser.add_argument("--opened", type=float, default=0.8, help="share of layers looked into")
    parser.add_argument("--seconds", type=float, default=500, help="no stage begins after them")
    parser.add_argument("--together", type=int, default=14, help="faults of one process")
    parser.add_argument("--faults", help="names; default: all")
    parser.add_argument("--planted", default="", help="engines that get them; default: all")
    parser.add_argument("--curves", action="store_true", help="weaker faults too")
    parser.add_argument("stages", nargs="*", default=["compare", "probe"])
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    Probe(args).all()


if __name__ == "__main__":
    main()
