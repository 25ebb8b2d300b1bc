"""The worker with an imaginary engine: passes, controls, and how a capture is resumed."""

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from synthetic import SHAPE, SITES, compared

from rlk_align.engines import worker
from rlk_align.engines.base import Engine, Logprobs, Sampled, SamplesDone, Sampling
from rlk_align.engines.common.intervention import Intervention
from rlk_align.engines.common.parameters import LiveParameter, ParameterRecord, record_parameter
from rlk_align.engines.process.job import Events, Job
from rlk_align.engines.spec import EngineSpec
from rlk_align.errors import BadOption, CorruptTrace, ModelError, PromptError, TraceNotWritten
from rlk_align.judge.load import load_contract
from rlk_align.judge.verdict import judge
from rlk_align.model.prompts import TokenBatch
from rlk_align.trace.reader import Trace
from rlk_align.trace.writer import PassWriter

PASSES = tuple(
    f"{kind}{variant}" for kind in ("decode", "prefill") for variant in ("", ".untapped", ".repeat")
)


class Imaginary(Engine):
    """Derives its values from (site, sample, position); noise and faults can be enabled."""

    calls: ClassVar[list[str]] = []
    closed = 0
    noise = 0.0
    fails_in = ""
    samples_otherwise: ClassVar[dict[int, int]] = {}
    """Sample -> the index of the first token that differs in production."""

    def open(self) -> None:
        type(self).calls.append("open")

    def version(self) -> str:
        return "0"

    def dtype(self) -> str:
        return "float32"

    def attributes(self) -> dict[str, Any]:
        return {"layers": 2}

    def weights(self) -> Iterator[ParameterRecord]:
        yield record_parameter(LiveParameter("embed", torch.ones(4, 4)))

    def sample(
        self, batch: TokenBatch, sampling: Sampling, tap: PassWriter | None, done: SamplesDone
    ) -> Sampled:
        responses = [
            [(sampling.seed + len(s.prompt_ids) + k) % 16 for k in range(sampling.max_new_tokens)]
            for s in batch.samples
        ]
        for i, k in type(self).samples_otherwise.items() if self.production else ():
            responses[i][k:] = [t ^ 1 for t in responses[i][k:]]
        logprobs = self._compute("decode", batch.with_responses(responses), tap, done)
        return Sampled(responses, logprobs)

    def score(self, batch: TokenBatch, tap: PassWriter | None, done: SamplesDone) -> Logprobs:
        return self._compute("prefill", batch, tap, done)

    def close(self) -> None:
        type(self).closed += 1

    def _compute(
        self, kind: str, batch: TokenBatch, tap: PassWriter | None, done: SamplesDone
    ) -> Logprobs:
        mode = "production" if self.production else "tapped" if tap else "untapped"
        type(self).calls.append(f"{kind} {mode}")
        if self.fails_in == f"{kind} {mode}":
            raise TraceNotWritten("the disk is full", "free some")
        shift = type(self).noise * len(type(self).calls)
        logprobs: Logprobs = {}
        for i, s in enumerate(batch.samples):
            last = len(s.ids) - (kind == "decode")
            for number, site in enumerate(SITES[:-1] if tap else ()):
                wanted = s.sampled_positions if site.sampled_rows_only else range(last)
                position = np.array(wanted)
                # A first token attends to its own value alone: q_rope, k_rope, attn follow v_proj.
                alone = {0: 3} if site.op == "attn" else {}
                numbers = [number - alone.get(p, 0) + i / 8 + p / 64 for p in wanted]
                base = torch.tensor(numbers) + shift
                tap(
                    site.name,
                    base[:, None].repeat(1, site.features),
                    np.full(len(wanted), i),
                    position,
                )
            logprobs[i] = np.array([-1 - p / 64 - shift for p in s.sampled_positions])
            done(i + 1)
        return logprobs


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    kind = type("Fresh", (Imaginary,), {"calls": []})
    monkeypatch.setattr(worker, "load_engine", lambda _name, _modules=False: kind)
    model, folder = tmp_path / "model", tmp_path / "capture"
    model.mkdir()
    folder.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": SHAPE.layers,
        "hidden_size": SHAPE.hidden,
        "num_attention_heads": SHAPE.heads,
        "num_key_value_heads": SHAPE.kv_heads,
        "intermediate_size": SHAPE.intermediate,
        "vocab_size": SHAPE.vocab,
        "max_position_embeddings": 32,
    }
    (model / "config.json").write_text(json.dumps(config))
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"ids": [1, 2, 3]}\n{"ids": [4]}\n')
    return Job(
        engine=EngineSpec("hf"),
        model=model,
        folder=folder,
        key="k",
        prompts=prompts,
        tokens=None,
        passes=PASSES,
        max_new_tokens=5,
        seed=3,
        budget=10**9,
        layers=None,
        sites=(),
    )


def engine() -> type[Imaginary]:
    return worker.load_engine("hf")


def run(job: Job, **changes: object) -> Trace:
    changed = job.model_copy(update=changes)
    shutil.copy(job.prompts, changed.folder / "prompts.jsonl")  # as the parent does
    worker.run(changed, Events(changed.folder))
    return Trace(changed.folder)


def test_a_job_writes_a_whole_trace(job: Job) -> None:
    trace = run(job)
    assert engine().calls == [
        "open",
        *("decode tapped", "decode untapped", "decode tapped"),
        *("prefill tapped", "prefill untapped", "prefill tapped"),
    ]
    assert engine().closed == 1
    assert [s.prompt_ids for s in trace.tokens.samples] == [(1, 2, 3), (4,)]
    assert [s.response_ids for s in trace.tokens.samples] == [(6, 7, 8, 9, 10), (4, 5, 6, 7, 8)]
    assert trace.record.dtype == "float32"
    assert list(trace.weights) == ["embed"]
    for name in PASSES:
        reader = trace.read_pass(name)
        sites = [s.name for s in SITES] if "untapped" not in name else ["logprob"]
        assert list(reader.record.sites) == sites
        rows = reader.rows("logprob")
        got = reader.values("logprob", rows, np.arange(10))
        assert got[:, 0].tolist() == [-1 - p / 64 for p in (2, 3, 4, 5, 6, 0, 1, 2, 3, 4)]
    events = [json.loads(line) for line in (job.folder / "events.jsonl").read_text().splitlines()]
    done = [e["stage"] for e in events if e.get("done") == e.get("total") == 2]
    assert done == list(PASSES)


def test_finished_passes_stay_beside_further_ones(job: Job) -> None:
    run(job, passes=PASSES[:3])
    engine().calls.clear()
    trace = run(job, passes=PASSES[3:])
    assert engine().calls == ["open", "prefill tapped", "prefill untapped", "prefill tapped"]
    assert len(trace.tokens.samples[0].response_ids) == 5
    assert set(trace.passes) == set(PASSES)


def test_finished_passes_outlive_a_failure(job: Job) -> None:
    engine().fails_in = "prefill untapped"
    with pytest.raises(TraceNotWritten):
        run(job)
    assert engine().closed == 1
    assert Trace(job.folder).has_pass("prefill")
    assert not Trace(job.folder).has_pass("prefill.untapped")
    engine().fails_in = ""
    assert set(run(job, passes=PASSES[4:]).passes) == set(PASSES)


def test_another_runs_tokens_are_scored(job: Job, tmp_path: Path) -> None:
    first = run(job)
    folder = tmp_path / "train"
    folder.mkdir()
    second = run(
        job,
        folder=folder,
        tokens=first.folder / "tokens.parquet",
        passes=("prefill", "prefill.untapped", "prefill.repeat"),
    )
    assert second.tokens == first.tokens
    comparison = compared(first, second, ("decode_vs_prefill", "prefill_vs_train"))
    assert comparison.controls.observer == "bitwise"
    assert [e.metrics.tokens for e in comparison.edges] == [10, 10]
    assert all(e.paired_rows == e.expected_rows for e in comparison.edges)
    assert judge(comparison, load_contract("bitwise", "float32")).status == "pass"


def test_noise_is_measured(job: Job, tmp_path: Path) -> None:
    """Each call of this engine shifts its values further, so that no pass repeats another."""
    engine().noise = 0.25
    first = run(job)
    noise = compared(first, first).controls.noise["rollout"]
    assert noise.first_site == "embed"
    # From the first prefill to its repetition there are two calls.
    assert noise.max_abs_dlogp == pytest.approx(0.5, abs=1e-6)


def test_production_is_a_job_of_its_own_and_is_measured(job: Job) -> None:
    trace = run(job)
    record = (job.folder / "trace.json").read_bytes()
    engine().calls.clear()
    engine().noise = 0.125
    trace = run(job, passes=("prefill.production",))
    assert engine().calls == ["open", "prefill production"]
    assert (job.folder / "trace.json").read_bytes() == record
    production = compared(trace, trace).production
    assert production.tokens == 10
    assert production.max_abs_dlogp == pytest.approx(0.25, abs=1e-6)


def test_production_compares_a_decode_as_far_as_it_samples_the_same(job: Job) -> None:
    run(job)
    engine().samples_otherwise = {1: 2}
    trace = run(job, passes=("decode.production",))
    [(_, found)] = compared(trace, trace).production_passes.items()
    assert (found.metrics.tokens, found.expected) == (7, 10)
    assert found.metrics.bit_mismatches == 0
    # The prompt's one token, and two that were sampled alike.
    assert found.parted == [(1, 2)]
    assert found.graphs is None


def test_what_is_compiled_at_first_is_not_timed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run(job)
    engine().calls.clear()
    monkeypatch.setattr(EngineSpec, "info", replace(job.engine.info, compiles=True))
    first = engine()._compute

    def slow_at_first(self: Imaginary, *args: Any) -> Logprobs:
        time.sleep(1.0 * (len(type(self).calls) == 1))
        return first(self, *args)

    monkeypatch.setattr(engine(), "_compute", slow_at_first)
    trace = run(job, passes=("prefill.production",))
    assert engine().calls == ["open", "prefill production", "prefill production"]
    assert trace.read_pass("prefill.production").record.seconds < 0.5


@pytest.mark.parametrize(
    ("line", "new", "says"),
    [
        ('{"ids": [1, 16]}', 5, "16"),
        (json.dumps({"ids": [1] * 28}), 5, "too long"),
        ('{"ids": [1]}', 32, "too long"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_before_loading(
    job: Job, line: str, new: int, says: str
) -> None:
    job.prompts.write_text(line)
    with pytest.raises(PromptError, match=says):
        run(job, max_new_tokens=new)
    assert engine().calls == []


def test_a_parameter_in_eight_bits_is_recorded() -> None:
    """A user's patch may leave such a parameter in an engine."""
    value = torch.ones(4, 4).to(torch.float8_e4m3fn)
    assert record_parameter(LiveParameter("embed", value)).dtype == "float8_e4m3fn"
    value[1, 2] = float("nan")
    with pytest.raises(ModelError, match="1 of 16 entries are NaN"):
        record_parameter(LiveParameter("embed", value))


def test_damaged_tokens_are_corrupt(job: Job, tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    with pytest.raises(CorruptTrace):
        run(job, tokens=tmp_path / "t.parquet")


def test_an_error_is_handed_to_the_parent(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.folder / "job.json").write_text(job.model_dump_json())
    job.prompts.write_text("{")
    monkeypatch.setattr(worker, "_end_with_parent", lambda: None)
    monkeypatch.setattr(worker.sys, "argv", ["worker", str(job.folder / "job.json")])
    with pytest.raises(SystemExit) as end:
        worker.main()
    assert end.value.code == 2
    last = json.loads((job.folder / "events.jsonl").read_text().splitlines()[-1])
    assert last["error"] == "PromptError"
    assert ":1" in last["message"]


def test_interventions_reach_an_engine_that_takes_them(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode is forced to the sampled tokens; all values are kept, or only the log-probs."""
    run(job)
    told: list[Any] = []

    class Willing(Imaginary):
        intervenes = True

        def sample(self, batch, sampling, tap, done, intervention=None):  # type: ignore[no-untyped-def]
            told.append((sampling.forced, batch.sampled_tokens > 0, tap is not None, intervention))
            return super().sample(batch, sampling, tap, done)

        def score(self, batch, tap, done, intervention=None):  # type: ignore[no-untyped-def]
            told.append((None, batch.sampled_tokens > 0, tap is not None, intervention))
            return super().score(batch, tap, done)

    monkeypatch.setattr(worker, "load_engine", lambda _name, _modules=False: Willing)
    seen = Intervention(kind="perturb", sites=("embed",))
    unseen = seen.model_copy(update={"observed": False})
    plans = {"decode.perturb-1": seen, "prefill.perturb-2": unseen}
    update = {"passes": tuple(plans), "interventions": plans}
    run(job.model_copy(update=update))
    assert told == [(True, True, True, seen), (None, True, True, unseen)]
    trace = Trace(job.folder)
    for name, kept in zip(plans, (True, False), strict=True):
        reader = trace.read_pass(name)
        rows = reader.rows("layers.0.q_proj")
        assert rows is not None
        assert ((rows.shard >= 0) == kept).all()
        assert (reader.rows("logprob").shard >= 0).all()


def test_an_engine_that_takes_no_interventions_says_so(job: Job) -> None:
    plans = {"prefill.perturb-1": Intervention(kind="perturb")}
    update = {"passes": tuple(plans), "interventions": plans}
    with pytest.raises(BadOption, match="'hf' does not support interventions"):
        run(job.model_copy(update=update))
