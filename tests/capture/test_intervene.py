"""Passes with interventions beside a capture: reused, repeated, or refused."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from synthetic import BATCH, compared_run, corrupt, draw, seal, write_pass, write_weights

from rlk_align.capture import intervene as module
from rlk_align.capture.intervene import intervene, source_of
from rlk_align.capture.request import TracePlan
from rlk_align.data import data_path
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.info import EngineInfo
from rlk_align.engines.process.job import Job
from rlk_align.errors import BadOption, MissingDependency, ModelError
from rlk_align.model.prompts import TokenBatch
from rlk_align.probe.graft import graft_passes
from rlk_align.trace.reader import Trace
from rlk_align.trace.records import load_record, save_record
from rlk_align.trace.run import Run
from rlk_align.trace.schema import TraceRecord


def silent(_stage: str, _done: int, _total: int) -> None:
    pass


class Worker:
    """Replaces the worker process: every pass has the drawn values."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.weights = {"embed": torch.ones(16, 8)}

    def __call__(self, job: Job, progress: Any) -> None:
        self.jobs.append(job)
        captured = job.tokens.parent if job.tokens else Path()
        for name in ("tokens.parquet", "prompts.jsonl"):
            shutil.copy(captured / name, job.folder / name)
        record = load_record(TraceRecord, captured / "trace.json")
        save_record(record.model_copy(update={"key": job.key}), job.folder / "trace.json")
        write_weights(job.folder, self.weights)
        for name in job.passes:
            write_pass(job.folder / name, draw())
        seal(job.folder)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(module, "run_worker", made)
    monkeypatch.setattr(module, "resolve_model", lambda _name: data_path("model"))
    return made


def ask(run: Run, *sources: str, **plan: Any) -> dict[str, Any]:
    """Grafts the rollout with a pass of each of these sides."""
    traces = {s: Trace(run.capture_folder(s)) for s in ("rollout", "train")}
    wanted = {
        s: ("prefill", Intervention(kind="graft", source=source_of(traces[s].read_pass("prefill"))))
        for s in sources
    }
    return intervene(traces["rollout"], "rollout", run, wanted, TracePlan(**plan), silent)


def test_what_is_there_is_taken_and_what_is_missing_is_run(worker: Worker, tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", corrupt(draw(), "layers.1.attn", [(0, 2)]))
    first = ask(run, "rollout")
    assert ask(run, "rollout")["rollout"].folder == first["rollout"].folder
    assert len(worker.jobs) == 1
    both = ask(run, "rollout", "train")
    assert len(worker.jobs) == 2
    assert worker.jobs[1].passes == (both["train"].folder.name,)
    assert both["rollout"].folder == first["rollout"].folder != both["train"].folder
    assert set(worker.jobs[1].interventions) == {both["train"].folder.name}
    # It is beside the captures, whose files are unchanged.
    assert both["train"].folder.parent.parent == run.folder / "captures"
    Run.open(str(run.folder)).check()


def test_other_contents_of_a_source_make_another_pass(worker: Worker, tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run", corrupt(draw(), "layers.1.attn", [(0, 2)]))
    one = ask(run, "train")["train"].folder
    other = compared_run(tmp_path / "other", corrupt(draw(), "layers.1.attn", [(0, 3)]))
    two = ask(other, "train")["train"].folder
    assert one.parent.name == two.parent.name
    assert one.name != two.name
    assert ask(run, "train", budget=10**6)["train"].folder.parent != one.parent


def test_an_engine_that_has_other_weights_now_is_refused(worker: Worker, tmp_path: Path) -> None:
    worker.weights = {"embed": torch.zeros(16, 8)}
    with pytest.raises(BadOption, match=r"rollout engine's weights are not those .*: embed"):
        ask(compared_run(tmp_path / "run"), "rollout")


def test_a_capture_from_elsewhere_without_its_model_or_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = compared_run(tmp_path / "run")
    with pytest.raises(ModelError, match="synthetic"):
        graft_passes(run, ["prefill_vs_train"], silent)
    monkeypatch.setattr(module, "resolve_model", lambda _name: data_path("model"))
    monkeypatch.setattr(EngineInfo, "missing", "transformers")
    with pytest.raises(MissingDependency, match="'hf' needs the package 'transformers'"):
        graft_passes(run, ["prefill_vs_train"], silent)


def test_a_run_without_the_pass_of_an_edge_is_refused(tmp_path: Path) -> None:
    run = compared_run(tmp_path / "run")
    with pytest.raises(BadOption, match="the rollout capture has no decode pass"):
        graft_passes(run, ["decode_vs_train"], silent)


@pytest.mark.parametrize("what", ["token ids", "shapes"])
def test_sides_whose_rows_or_features_are_not_each_others_are_refused(
    tmp_path: Path, what: str
) -> None:
    run = compared_run(tmp_path / "run")
    other = tmp_path / "run" / "captures" / "train"
    if what == "token ids":
        last = replace(BATCH.samples[-1], response_ids=(5, 4, 3, 2, 1, 9))
        TokenBatch((*BATCH.samples[:-1], last)).save(other / "tokens.parquet")
    else:
        record = load_record(TraceRecord, other / "trace.json")
        shape = replace(record.shape, intermediate=14)
        save_record(record.model_copy(update={"shape": shape}), other / "trace.json")
    seal(other)
    run.finish()
    with pytest.raises(BadOption, match=f"the sides differ in their {what}"):
        graft_passes(Run(run.folder), ["prefill_vs_train"], silent)
