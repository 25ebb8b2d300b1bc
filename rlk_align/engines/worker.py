"""The process of one engine: `python -m rlk_align.engines.worker JOB.json`.

It loads the model, writes what the engine is, runs each pass that the trace does not hold
yet, and ends. Whatever it prints goes to worker.log; what the parent must know goes through
events.jsonl.
"""

import ctypes
import importlib.metadata
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rlk_align.config import EngineSpec
from rlk_align.digest import digest_parameter
from rlk_align.engines import load_engine
from rlk_align.engines.base import Engine, PassResult, Sampling
from rlk_align.engines.job import Events, Job
from rlk_align.engines.plan import keep_logprobs, keep_values
from rlk_align.errors import RlkError
from rlk_align.families import read_shape
from rlk_align.prompts import Prompt, Sample, TokenBatch, check_lengths, load_prompts
from rlk_align.sites import model_sites
from rlk_align.trace.schema import WEIGHTS_SCHEMA, TraceRecord, save_record, writing
from rlk_align.trace.writer import KeepValues, PassWriter


def run(job: Job, events: Events) -> None:
    """Carries out a job; raises RlkError for what the user can mend."""
    spec = EngineSpec.parse(job.engine)
    shape = read_shape(job.model)
    prompts = load_prompts(job.prompts)
    events.send(stage="tokenising")
    prompt_ids = tokenise(job.model, prompts)
    batch = _initial_batch(job, prompts, prompt_ids)
    production = all(p.endswith(".production") for p in job.passes)
    engine = load_engine(spec.name)(spec, job.model, shape, production)
    new_tokens = 0 if batch.sampled_tokens else job.max_new_tokens
    check_lengths(batch, shape.context - engine.spare_positions, shape.vocab, new_tokens)
    events.send(stage=f"loading {spec.name}")
    engine.open()
    try:
        if not production:
            _write_identity(job, engine, prompt_ids)
        for name in job.passes:
            if not (job.folder / name / "pass.json").is_file():
                batch = _run_pass(job, engine, batch, name, events)
    finally:
        engine.close()


def tokenise(model: Path, prompts: list[Prompt]) -> dict[str, list[int]]:
    """Each prompt's ids by the checkpoint's own tokenizer, special tokens included as it does
    by default; prompts that came as ids stay as they are."""
    if all(p.text is None for p in prompts):
        return {p.id: list(p.ids or ()) for p in prompts}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return {p.id: list(p.ids) if p.ids else tokenizer(p.text)["input_ids"] for p in prompts}


def _initial_batch(job: Job, prompts: list[Prompt], prompt_ids: dict[str, list[int]]) -> TokenBatch:
    own = job.folder / "tokens.parquet"
    if job.tokens is not None:
        batch = TokenBatch.load(job.tokens)
        if job.tokens != own:
            with writing(own):
                batch.save(own)
        return batch
    if own.is_file():
        return TokenBatch.load(own)
    return TokenBatch(tuple(Sample(p.id, tuple(prompt_ids[p.id])) for p in prompts))


def _write_identity(job: Job, engine: Engine, prompt_ids: dict[str, list[int]]) -> None:
    """weights.parquet and trace.json: what was loaded, as the live model has it."""
    table: dict[str, list[Any]] = {name: [] for name in WEIGHTS_SCHEMA.names}
    for name, weight in engine.weights():
        table["name"].append(name)
        table["shape"].append(list(weight.shape))
        table["dtype"].append(str(weight.dtype).removeprefix("torch."))
        table["digest"].append(digest_parameter(weight))
    with writing(job.folder / "weights.parquet"):
        pq.write_table(
            pa.table(table, schema=WEIGHTS_SCHEMA),
            job.folder / "weights.parquet",
            write_page_checksum=True,
        )
    record = TraceRecord(
        engine=engine.spec.name,
        version=engine.version(),
        options=dict(engine.spec.options),
        model=str(job.model),
        shape=engine.shape,
        dtype=engine.dtype(),
        environment=_environment(),
        attributes=engine.attributes(),
        prompt_ids=prompt_ids,
    )
    save_record(record, job.folder / "trace.json")


def _environment() -> dict[str, str]:
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "threads": str(torch.get_num_threads()),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _run_pass(job: Job, engine: Engine, batch: TokenBatch, name: str, events: Events) -> TokenBatch:
    """Runs one pass; returns the batch with its responses, which the first decode decides."""
    kind, _, variant = name.partition(".")
    total = len(batch.samples)

    def progress(done: int) -> None:
        events.send(stage=name, done=done, total=total)

    progress(0)
    keep: KeepValues = keep_logprobs
    if not variant:
        keep = keep_values(job, model_sites(engine.shape), batch, engine.dtype())
    with PassWriter(job.folder / name, keep, statistics=not variant) as writer:
        tap = writer.add if variant in ("", "repeat") else None
        if kind == "decode":
            sampling = Sampling(job.max_new_tokens, job.seed)
            result = engine.sample(batch, sampling, tap, progress)
        else:
            result = engine.score(batch, tap, progress)
        _add_logprobs(writer, batch, result)
        if kind == "decode" and not batch.sampled_tokens:
            batch = batch.with_responses(result.responses)
            with writing(job.folder / "tokens.parquet"):
                batch.save(job.folder / "tokens.parquet")
        writer.finish(engine.unexposed())
    return batch


def _add_logprobs(writer: PassWriter, batch: TokenBatch, result: PassResult) -> None:
    for i, (s, logprob) in enumerate(zip(batch.samples, result.logprobs, strict=True)):
        first = len(s.prompt_ids) - 1
        position = np.arange(first, first + len(logprob))
        rows = torch.from_numpy(np.asarray(logprob, dtype=np.float32)).reshape(-1, 1)
        writer.add("logprob", rows, np.full(len(logprob), i), position)


def _end_with_parent() -> None:
    """A worker whose parent is gone would hold its memory for nobody (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    """The process: the job's path is its only argument."""
    _end_with_parent()
    job = Job.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    events = Events(job.folder)
    try:
        run(job, events)
    except RlkError as error:
        events.send(error=type(error).__name__, message=error.message, fix=error.fix)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
