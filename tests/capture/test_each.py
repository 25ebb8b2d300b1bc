"""Captures that differ only in their fault, which one process makes one after another."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import warm
from command import write_few_prompts

from rlk_align.capture import capture as capturing
from rlk_align.capture import supervise
from rlk_align.capture.request import CaptureRequest
from rlk_align.data import data_path
from rlk_align.engines.process.job import Job
from rlk_align.engines.spec import EngineSpec
from rlk_align.model.sites import model_sites
from rlk_align.trace.reader import Trace
from rlk_align.trace.run import Run

SPECS = ("hf", "hf:fault=proj-gain", "hf:fault=weight-element", "hf:fault=logprob-base-2")


def _request(spec: str, prompts: Path) -> CaptureRequest:
    return CaptureRequest(
        engine=EngineSpec.parse(spec),
        model=str(data_path("model")),
        prompts=prompts,
        max_new_tokens=2,
        passes=("prefill",),
        controls=False,
    )


def _digests(trace: Trace) -> dict[str, list]:
    reader = trace.read_pass("prefill")
    sites = [s.name for s in model_sites(trace.record.shape)]
    return {site: reader.rows(site).digest.tolist() for site in sites}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs for which a process was started."""
    started: list[Job] = []
    run = capturing.run_worker

    def spy(job: Job, progress: object) -> None:
        started.append(job)
        run(job, progress)

    monkeypatch.setattr(capturing, "run_worker", spy)
    start = partial(warm.start_worker, supervise.start_process)
    monkeypatch.setattr(supervise, "start_process", start)
    return started


def _quiet(*_: object) -> None:
    return


def test_each_is_what_it_would_be_alone(tmp_path: Path, jobs: list[Job]) -> None:
    prompts = write_few_prompts(tmp_path / "few.jsonl")
    requests = [_request(spec, prompts) for spec in SPECS]
    together, alone = Run(tmp_path / "together"), Run(tmp_path / "alone")
    first = capturing.capture_each(requests[:1], "rollout", together, [None], _quiet)[0]
    tokens = first.folder / "tokens.parquet"
    # The first capture exists already; the last one follows two other faults.
    traces = capturing.capture_each(requests, "train", together, [tokens] * 4, _quiet)
    assert [len(job.then) for job in jobs] == [0, 3]
    again = capturing.capture_each(requests, "train", together, [tokens] * 4, _quiet)
    assert len(jobs) == 2
    assert [t.folder for t in again] == [t.folder for t in traces]
    single = capturing.capture(requests[3], "train", alone, tokens, False, _quiet)
    assert single.folder.name == traces[3].folder.name
    assert _digests(single) == _digests(traces[3])
    assert single.weights == traces[3].weights == traces[0].weights
    # Each has only its own fault.
    clean, scaled, changed, based = map(_digests, traces)
    assert clean["layers.1.attn"] == scaled["layers.1.attn"]
    assert clean["layers.1.o_proj"] != scaled["layers.1.o_proj"]
    assert clean["layers.1.o_proj"] == changed["layers.1.o_proj"]
    assert {n for n, w in traces[2].weights.items() if w != traces[0].weights[n]} == {
        "layers.2.q_proj"
    }
    assert {site for site in clean if clean[site] != based[site]} == {"logprob"}
    assert [t.record.options.get("fault") for t in traces] == [
        None,
        "proj-gain",
        "weight-element",
        "logprob-base-2",
    ]


def test_a_sharded_engine_says_its_weights_again_after_a_forward(
    tmp_path: Path, jobs: list[Job]
) -> None:
    prompts = write_few_prompts(tmp_path / "few.jsonl")
    run = Run(tmp_path / "run")
    asked = [replace(_request("hf", prompts), seed=seed) for seed in (0, 1)]
    sampled = capturing.capture_each(asked, "rollout", run, [None, None], _quiet)
    tokens = [t.folder / "tokens.parquet" for t in sampled]
    sharded = [_request("fsdp:dp=2", prompts)] * 2
    first, second = capturing.capture_each(sharded, "train", run, tokens, _quiet)
    assert [len(job.then) for job in jobs] == [1, 1]
    assert first.weights == second.weights
    assert first.folder != second.folder
