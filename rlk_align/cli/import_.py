"""`rlk-align import`: turns log-probs that a framework wrote into a run; needs no engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rlk_align.cli import options
from rlk_align.progress import show_progress
from rlk_align.text import line

if TYPE_CHECKING:
    from rlk_align.logs.dumps.manifest import Manifest


def import_(
    format: Annotated[
        str,
        typer.Argument(metavar="FORMAT", help="auto, nemo-rl, prime-rl, slime, miles or jsonl."),
    ],
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, or folders of them.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="The run's folder.")],
) -> None:
    """Turn the log-probs that a framework wrote during training into a run."""
    from rlk_align.logs.readers.importing import import_dump

    with show_progress("import") as progress:
        manifest = import_dump(format, paths, out, options.command_line(), progress)
    _show(manifest, out)


def _show(manifest: "Manifest", out: Path) -> None:
    console = Console(highlight=False, soft_wrap=True)
    count = f"{manifest.sequences:,} sequences, {manifest.tokens:,} tokens"
    console.print(line(f"{manifest.format}: {count}, imported into {out}"))
    steps = manifest.steps
    if steps:
        console.print(line(f"steps    {steps[0]}..{steps[-1]}, {len(steps)} of them"))
    console.print(line(f"scored   {manifest.scored:,}, both sides on {manifest.compared:,}"))
    for side, missing in (("rollout", manifest.rollout_missing), ("train", manifest.train_missing)):
        if missing:
            console.print(line(f"missing  {missing:,} scored tokens have no {side} log-prob"))
    for text in manifest.skipped:
        console.print(line(f"skipped  {text}", style="yellow"))
    for text in manifest.notes:
        console.print(line(f"note     {text}", style="dim"))
