"""`rlk-align report`: what a run found, for people; needs neither an engine nor torch."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlk_align.cli import options
from rlk_align.errors import BadOption, TraceNotWritten
from rlk_align.files import whole_file
from rlk_align.report.source import Source, load_source
from rlk_align.text import line

report = typer.Typer(no_args_is_help=True, help="Write what a run found, for people.")
"""One command for each format."""


@report.command()
def html(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Compared runs, or @last.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="PATH", help="The page to write.")
    ] = Path("report.html"),
    contract: options.ContractName = None,
) -> None:
    """One page that can be mailed: it needs no network and no JavaScript.

    Several runs are compared on one page.
    """
    from rlk_align.report.html.page import run_page

    sources = [load_source(run, contract) for run in runs]
    page = run_page(sources[0])
    write_report(sources, {out: page})


def write_report(sources: list[Source], texts: dict[Path, str]) -> None:
    """Writes each file whole or not at all, and names it. Raises BadOption for a path of the runs
    themselves, TraceNotWritten where nothing can be written."""
    for path in texts:
        for source in sources:
            source.run.check_output(path)
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise BadOption(f"{path}: no file can be written there", "name another with -o")
    for path, text in texts.items():
        try:
            with whole_file(path) as partial:
                partial.write_text(text, encoding="utf-8")
        except OSError as error:
            raise TraceNotWritten(f"{path} could not be written: {error}") from error
    console = Console(highlight=False, soft_wrap=True)
    for path in texts:
        console.print(line(f"{path}"))
