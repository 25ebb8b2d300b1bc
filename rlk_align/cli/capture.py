"""`rlk-align capture`: one engine, kept for a comparison later or elsewhere."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlk_align.cli import options
from rlk_align.errors import BadOption
from rlk_align.progress import show_progress
from rlk_align.text import line
from rlk_align.trace.records import load_record
from rlk_align.trace.run import Run, RunRecord
from rlk_align.trace.schema import TraceRecord


def capture(
    engine: Annotated[str, typer.Option(help="Engine, NAME[:key=value,...].")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The run's folder.")],
    tokens: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Score this run's ids.", show_default="sample"),
    ] = None,
    model: options.Model = None,
    kernels: options.Kernels = None,
    prompts: options.Prompts = None,
    max_new_tokens: options.MaxNewTokens = 32,
    seed: options.Seed = 0,
    fresh: options.Fresh = False,
    layers: options.Layers = None,
    sites: options.Sites = None,
    trace_budget: options.TraceBudget = "8GB",
) -> None:
    """Capture one engine: sample and re-score, or score another run's tokens."""
    spec = options.engine_spec(engine, kernels)
    if spec.name == "replay":
        raise BadOption("a replay is a capture already")
    if tokens and prompts:
        raise BadOption("--tokens scores that run's own prompts", "leave --prompts out")
    plan = options.trace_plan(trace_budget, layers, sites)
    run = options.choose_run(out, "capture")
    source = _source(tokens, run) if tokens else None
    if source and model is None:
        model = load_record(TraceRecord, source / "trace.json").model
    request = options.capture_request(
        spec,
        model,
        # The other run's prompts, so that both sides' tokenizers are asked the same.
        prompts or (source / "prompts.jsonl" if source else None),
        max_new_tokens,
        seed,
        plan,
        ("prefill",) if source else ("decode", "prefill"),
        False,
    )

    from rlk_align.capture import capture as capturing
    from rlk_align.capture.check import check_request

    _, warnings = check_request(request, sampling=tokens is None)
    options.warn(warnings)
    with show_progress("capture") as progress, run.locked():
        run.invalidate()
        ids = source / "tokens.parquet" if source else None
        trace = capturing.capture(request, "capture", run, ids, fresh, progress)
        captures = run.relative({"capture": trace.folder})
        run.save(RunRecord(command=options.command_line(), captures=captures))
        run.finish()
    batch = trace.tokens
    Console(highlight=False, soft_wrap=True).print(
        line(
            f"{spec}: {len(batch.samples)} sequences, {batch.sampled_tokens} sampled tokens, "
            f"captured in {out}"
        )
    )


def _source(tokens: str, run: Run) -> Path:
    """The trace whose tokens are scored. Raises BadOption where it lies in the run to be made."""
    source = Run.open(tokens)
    if source.folder.resolve() == run.folder.resolve():
        raise BadOption(f"--tokens and --out name one run, {run.folder}", "name another folder")
    return source.capture_folder("rollout")
