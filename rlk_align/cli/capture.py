"""`rlk-align capture`: one engine, kept for a comparison later or elsewhere."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rlk_align.cli import options
from rlk_align.config import EngineSpec, resolve_model
from rlk_align.errors import BadOption
from rlk_align.run import Run, RunRecord


def capture(
    engine: Annotated[str, typer.Option(help="Engine, NAME[:key=value,...].")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The run's folder.")],
    tokens: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Score this run's ids.  [default: sample]"),
    ] = None,
    model: options.Model = None,
    prompts: options.Prompts = None,
    max_new_tokens: options.MaxNewTokens = 32,
    seed: options.Seed = 0,
    fresh: options.Fresh = False,
    layers: options.Layers = None,
    sites: options.Sites = None,
    trace_budget: options.TraceBudget = "8GB",
) -> None:
    """Capture one engine: sample and re-score, or score another run's tokens."""
    spec = EngineSpec.parse(engine)
    if spec.name == "replay":
        raise BadOption("a replay is a capture already")
    plan = options.trace_plan(trace_budget, layers, sites)
    source = Run.open(tokens).capture_folder("rollout") if tokens else None
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

    from rlk_align import capture as capturing
    from rlk_align.cli.progress import progress
    from rlk_align.engines.plan import check_selection
    from rlk_align.families import read_shape
    from rlk_align.sites import model_sites

    check_selection(plan.sites, model_sites(read_shape(resolve_model(request.model_path))))
    run = Run(out)
    with progress("capture") as report, run.locked():
        ids = source / "tokens.parquet" if source else None
        trace = capturing.capture(request, "capture", run, ids, fresh, report)
        run.save(
            RunRecord(command=options.command_line(), captures=run.relative(capture=trace.folder))
        )
    batch = trace.tokens
    Console(highlight=False, soft_wrap=True).print(
        Text(
            f"{spec}: {len(batch.samples)} sequences, {batch.sampled_tokens} sampled tokens, "
            f"captured in {out}"
        )
    )
