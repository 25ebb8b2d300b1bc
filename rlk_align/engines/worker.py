"""The process of one engine: `python -m rlk_align.engines.worker JOB.json`.

It loads the model, writes the manifest, runs each pass of the job, and ends. For an engine of
several ranks, torchrun starts this module once more for each rank. The process's output goes to
worker.log or rankN.log; progress and errors go to the parent through events.jsonl.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import traceback
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlk_align.engines.base import Engine, Logprobs, Sampled, SamplesDone, Sampling
from rlk_align.engines.manifest import write_manifest
from rlk_align.engines.process import heartbeat
from rlk_align.engines.process.heartbeat import HEARTBEATS
from rlk_align.engines.process.job import Events, Job, failed
from rlk_align.engines.process.launch import children_watched, launch, rank_log
from rlk_align.engines.process.plan import KEEP_LOGPROBS, CapturePlan, plan_capture, plan_modules
from rlk_align.engines.process.ranks import barrier, check_device, destroy_process_group, join
from rlk_align.engines.process.versions import versions
from rlk_align.engines.registry import load_engine
from rlk_align.engines.row_checks import row_checks
from rlk_align.engines.spec import EngineSpec
from rlk_align.engines.tested import tested_range, untested
from rlk_align.errors import BadOption, RlkError
from rlk_align.model.outline import read_outline
from rlk_align.model.prompts import Prompt, Sample, TokenBatch, check_lengths, load_prompts
from rlk_align.model.shape import read_shape
from rlk_align.model.sites import model_sites
from rlk_align.model.tokenise import tokenise
from rlk_align.results import Cell
from rlk_align.trace.checksums import add_checksums
from rlk_align.trace.records import writing
from rlk_align.trace.schema import TRACE_FILES
from rlk_align.trace.writer import NO_CHECKS, PassWriter

if TYPE_CHECKING:
    from rlk_align.engines.patch import BasePatch


def run(job: Job, events: Events) -> None:
    """Runs a job, or this rank's part of it. Raises RlkError for the user's errors."""
    spec = job.engine
    shape = read_outline(job.model) if job.modules else read_shape(job.model)
    prompts = load_prompts(job.prompts)
    events.send(stage="tokenising")
    prompt_ids = tokenise(job.model, prompts)
    batch = _initial_batch(job, prompts, prompt_ids)
    production = all(p.endswith(".production") for p in job.passes)
    engine = load_engine(spec.name, job.modules)(spec, job.model, shape, production)
    engine.heartbeats = job.folder / HEARTBEATS
    engine.kernels = patch = _kernels(spec)
    new_tokens = 0 if batch.sampled_tokens else job.max_new_tokens
    check_lengths(batch, shape.context - spec.info.spare_positions, shape.vocab, new_tokens)
    dtype = spec.dtype(shape.dtype)
    sites = None if job.modules else model_sites(shape)
    plan = (
        plan_modules(job, batch, dtype) if sites is None else plan_capture(job, sites, batch, dtype)
    )
    events.send(stage=str(plan))
    if spec.info.ranks:
        engine.ranks = join(spec.device, job.timeout)
    mode = ", compiled" if production and spec.info.compiles else ""
    events.send(stage=f"loading {spec.name}{mode}")
    if job.interventions and not engine.intervenes:
        raise BadOption(
            f"engine {spec.name!r} does not support interventions: its sites cannot be written"
        )
    try:
        engine.open()
        planted = ExitStack()
        replace_fault(engine, planted)
        if patch is not None:
            engine.replaced = patch.replaced(engine)
        with children_watched(job.engine, job.folder):
            if not production:
                write_manifest(job, engine, prompt_ids)
            for name in job.passes:
                batch = _run_pass(job, engine, batch, name, plan, events)
            for following in job.then:
                _run_following(following, engine, planted, prompts, prompt_ids, events)
    finally:
        engine.close()
        if patch is not None:
            patch.take_out()
    destroy_process_group()


def _kernels(spec: EngineSpec) -> "BasePatch | None":
    if spec.option("kernels") == "off":
        return None
    from rlk_align.engines.patch import patch_of

    return patch_of(spec)


def replace_fault(engine: Engine, planted: ExitStack) -> None:
    """Removes the fault in `planted`, and plants the one that the engine's spec names, if it names
    one. All ranks call this. Raises BadOption if the model lacks the fault's operator."""
    planted.close()
    if engine.spec.option("fault") is not None:
        from rlk_align.selftest.planting.plant import plant_fault

        planted.enter_context(plant_fault(engine))


def _run_following(
    job: Job,
    engine: Engine,
    planted: ExitStack,
    prompts: list[Prompt],
    prompt_ids: dict[str, list[int]],
    events: Events,
) -> None:
    """Runs a job with another fault, seed or tokens in the loaded engine."""
    engine.spec = job.engine
    replace_fault(engine, planted)
    batch = _initial_batch(job, prompts, prompt_ids)
    plan = plan_capture(job, model_sites(engine.shape), batch, engine.dtype())
    write_manifest(job, engine, prompt_ids)
    for name in job.passes:
        batch = _run_pass(job, engine, batch, name, plan, events)


def _initial_batch(job: Job, prompts: list[Prompt], prompt_ids: dict[str, list[int]]) -> TokenBatch:
    tokens = job.folder / "tokens.parquet"
    if job.tokens is not None:
        batch = TokenBatch.load(job.tokens)
        if job.tokens != tokens and os.environ.get("RANK", "0") == "0":
            with writing(tokens):
                batch.save(tokens)
        return batch
    if tokens.is_file():
        return TokenBatch.load(tokens)
    return TokenBatch(tuple(Sample(p.id, tuple(prompt_ids[p.id])) for p in prompts))


def _run_pass(
    job: Job, engine: Engine, batch: TokenBatch, name: str, plan: CapturePlan, events: Events
) -> TokenBatch:
    """Runs one pass. Returns the batch with its responses, which the first decode pass samples."""
    kind, _, variant = name.partition(".")
    total, first = len(batch.samples), engine.ranks.rank == 0

    def progress(done: int) -> None:
        if first:
            events.send(**_stage(job, name, done, total))

    progress(0)
    if variant == "production" and job.engine.info.compiles:
        # The first run compiles what is not compiled yet; the second one is timed and recorded.
        _computed(job, engine, batch, name, None, progress)
    with _open_part(job, engine, name, plan) as writer:
        tapped = variant in ("", "repeat") or name in job.interventions
        with _all_called(engine, batch):
            result = _computed(job, engine, batch, name, writer if tapped else None, progress)
        if kind == "decode" and not batch.sampled_tokens:
            batch = batch.with_responses(result.responses)
            if first:
                with writing(job.folder / "tokens.parquet"):
                    batch.save(job.folder / "tokens.parquet")
        parted: list[Cell] = []
        if variant == "production" and kind == "decode":
            result, parted = _common_prefixes(batch, result)
        _add_logprobs(writer, batch, result.logprobs)
        if not first:
            writer.close()
        barrier(engine.ranks)
        if first:
            writer.finish(engine.unexposed(kind), engine.graphs, parted)
            add_checksums(job.folder, (*TRACE_FILES, f"{name}/pass.json"))
    return batch


def _computed(
    job: Job,
    engine: Engine,
    batch: TokenBatch,
    name: str,
    tap: PassWriter | None,
    progress: SamplesDone,
) -> Sampled:
    """The log-probs of a pass, and the responses of a decode pass."""
    extra: dict[str, Any] = {}
    if name in job.interventions:
        extra["intervention"] = job.interventions[name]
    if name.partition(".")[0] != "decode":
        return Sampled([], engine.score(batch, tap, progress, **extra))
    sampling = Sampling(job.max_new_tokens, job.seed, forced=bool(extra))
    return engine.sample(batch, sampling, tap, progress, **extra)


def _common_prefixes(batch: TokenBatch, sampled: Sampled) -> tuple[Sampled, list[Cell]]:
    """The common prefixes with the batch's responses, and each first difference."""
    common: list[list[int]] = []
    parted: list[Cell] = []
    for i, (s, ids) in enumerate(zip(batch.samples, sampled.responses, strict=True)):
        pairs = zip(s.response_ids, ids, strict=False)
        equal = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(s.ids)))
        common.append(ids[:equal])
        if equal < len(s.response_ids):
            parted.append((i, len(s.prompt_ids) - 1 + equal))
    logprobs = {i: logprob[: len(common[i])] for i, logprob in sampled.logprobs.items()}
    return Sampled(common, logprobs), parted


def _all_called(engine: Engine, batch: TokenBatch) -> AbstractContextManager[None]:
    """Raises EngineFailed before the pass is recorded, if kernels were installed and do not run."""
    return nullcontext() if engine.kernels is None else engine.kernels.called(engine, batch)


def _stage(job: Job, name: str, done: int, total: int) -> dict[str, Any]:
    """The progress event of a pass, in samples, or in passes for an intervention."""
    if name not in job.interventions:
        return {"stage": name, "done": done, "total": total}
    kind, what = name.partition(".")[0], job.interventions[name].kind
    number = list(job.interventions).index(name) + (done == total)
    return {"stage": f"{kind}, {what}", "done": number, "total": len(job.interventions)}


def _open_part(job: Job, engine: Engine, name: str, plan: CapturePlan) -> PassWriter:
    """This rank's part of a pass; rank 0 creates the folder before the other ranks write to it."""
    observed = not name.partition(".")[2]
    intervention = job.interventions.get(name)
    valued = observed or (intervention is not None and intervention.observed)
    keep = plan.keep if valued else KEEP_LOGPROBS
    checks = row_checks(engine) if observed and not job.modules else NO_CHECKS
    rank = engine.ranks.rank
    if rank:
        barrier(engine.ranks)
    writer = PassWriter(job.folder / name, keep, valued, checks, engine.shape.vocab, part=rank)
    if not rank:
        barrier(engine.ranks)
    return writer


def _add_logprobs(writer: PassWriter, batch: TokenBatch, logprobs: Logprobs) -> None:
    for i, logprob in sorted(logprobs.items()):
        first = len(batch.samples[i].prompt_ids) - 1
        position = np.arange(first, first + len(logprob))
        rows = torch.from_numpy(np.asarray(logprob, dtype=np.float32)).reshape(-1, 1)
        writer("logprob", rows, np.full(len(logprob), i), position)


def _end_with_parent() -> None:
    """Has the system kill the worker when its parent ends, which frees its memory (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _met_changed_api(error: BaseException, is_untested: bool) -> bool:
    """Whether the error comes from an API that a package lacks or has changed. For a tested version
    that needs our own code to have raised it; for an untested one any code may have."""
    if is_untested and isinstance(error, AttributeError | ImportError | TypeError | KeyError):
        return True
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "<frozen" not in f.filename]
    ours = str(Path(__file__).parent)
    kinds = (AttributeError, ImportError, TypeError)
    return isinstance(error, kinds) and bool(frames) and frames[-1].filename.startswith(ours)


def _out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, which torch's CPU allocator and vLLM report as RuntimeError."""
    signs = ("DefaultCPUAllocator", "out of memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def main() -> None:
    """The entry point of the process, whose only argument is the job's path."""
    _end_with_parent()
    path = Path(sys.argv[1])
    job = Job.model_validate_json(path.read_text(encoding="utf-8"))
    events = Events(job.folder)
    spec, rank = job.engine, os.environ.get("RANK")
    if rank is not None:
        with rank_log(job.folder, int(rank)).open("w") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
    try:
        check_device(spec.device)
        if spec.ranks > 1 and rank is None:
            launch(path, spec, events)
        else:
            name = "the engine" if rank is None else f"rank {rank}"
            heartbeat.start(job.folder / HEARTBEATS, name, spec.info.waits)
            run(job, events)
    except (Exception, SystemExit) as raised:
        # The process ends here, so every error is reported to the parent.
        error = raised if isinstance(raised, RlkError) else _failure(raised, job, rank)
        events.send_error(error, None if rank is None else int(rank))
        sys.exit(error.exit_code)
    _end()


def _end() -> None:
    """Ends the process after its job. Unless child processes still run, it skips the interpreter's
    teardown, which takes seconds after vLLM and frees nothing else."""
    if not multiprocessing.active_children():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _failure(raised: BaseException, job: Job, rank: str | None) -> RlkError:
    traceback.print_exception(raised)
    sys.stderr.flush()
    process = "the worker" if rank is None else f"rank {rank} of {os.environ['WORLD_SIZE']}"
    log = job.folder / "worker.log" if rank is None else rank_log(job.folder, int(rank))
    first_line = (str(raised).splitlines() or [""])[0]
    installed = versions(job.engine.info.tested)
    if _met_changed_api(raised, bool(untested(installed))):
        here = [f"{n} {v}, tested {tested_range(n)}" for n, v in installed.items() if v]
        what = f"met an API that differs from the tested one ({'; '.join(here)})"
        fix = "install a tested version"
    elif _out_of_memory(raised):
        what = "ran out of memory"
        fix = "use fewer or shorter prompts, a smaller batch, more ranks, or another device"
    else:
        what, fix = f"raised {type(raised).__name__}", ""
    return failed(f"{process} of {job.engine} {what}: {first_line}", log, fix)


if __name__ == "__main__":
    main()
