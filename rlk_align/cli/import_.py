"""`rlk-align import`: turns what a framework or a tool wrote into a run or a recording; needs no
engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from rlk_align.cli import options
from rlk_align.errors import BadOption
from rlk_align.progress import show_progress
from rlk_align.record.imports.formats import FORMATS, detect
from rlk_align.text import line

if TYPE_CHECKING:
    from rlk_align.logs.dumps.manifest import Manifest
    from rlk_align.record.imports.importing import ImportedSide

_RECORDINGS = "Recordings"


def import_(
    format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="auto; or, of log-probs: nemo-rl, prime-rl, slime, miles or jsonl; of recordings: "
            "sglang-dumper, msprobe or rl-kernel.",
        ),
    ],
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, or folders of them.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", metavar="DIR", help="The run's folder, or that of one side's recordings."
        ),
    ],
    side: Annotated[
        Literal["rollout", "train"] | None,
        typer.Option(
            metavar="SIDE",
            help="Which side the files are of: rollout or train.",
            rich_help_panel=_RECORDINGS,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="M", help="Checkpoint folder or hub id.", rich_help_panel=_RECORDINGS),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Whose sequences to read: another recording, or a run of log-probs, which are "
            "imported too.",
            show_default="those in the files",
            rich_help_panel=_RECORDINGS,
        ),
    ] = None,
    step: Annotated[
        int,
        typer.Option(
            metavar="N", help="The step that the files are of.", min=0, rich_help_panel=_RECORDINGS
        ),
    ] = 0,
) -> None:
    """Turn the log-probs that a framework wrote into a run, or tensors into a recording."""
    if format == "auto":
        format = detect(paths) or format
    if format in FORMATS:
        from rlk_align.api.imports import import_recording

        with show_progress("import"):
            imported = import_recording(format, paths, out, side, model, tokens, step)
        _show_recording(imported, format)
        return
    if side is not None or model is not None or tokens is not None or step:
        raise BadOption(
            f"--side, --model, --tokens and --step do not apply to {format}",
            f"they are for {', '.join(FORMATS)}",
        )
    from rlk_align.logs.readers.importing import import_dump

    with show_progress("import") as progress:
        manifest = import_dump(format, paths, out, options.command_line(), progress)
    _show(manifest, out)


def _show_recording(imported: "ImportedSide", format: str) -> None:
    console = Console(highlight=False, soft_wrap=True)
    count = f"{imported.sequences:,} sequences, {imported.tokens:,} tokens"
    console.print(line(f"{format}: {count}, imported into {imported.step}"))
    every = len(imported.sites) + len(imported.missing)
    console.print(line(f"sites    {len(imported.sites):,} of {every:,}"))
    if imported.missing:
        operators = dict.fromkeys(site.rpartition(".")[2] for site in imported.missing)
        console.print(line(f"missing  {', '.join(operators)}", style="yellow"))
    for text in imported.notes:
        console.print(line(f"note     {text}", style="dim"))


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
