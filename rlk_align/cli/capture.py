"""`rlk-align capture`: captures one engine for a comparison later or elsewhere."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from rlk_align.api.single import Single, prepare
from rlk_align.cli import options
from rlk_align.cli.flags import takes
from rlk_align.progress import show_progress
from rlk_align.text import line


@takes(
    Single,
    engine=Annotated[str, typer.Option(metavar="SPEC", help="Engine, NAME[:key=value,...].")],
    out=Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="The run's folder.")],
    tokens=Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Score the ids of this run.", show_default="sample"),
    ],
)
def capture(single: Single) -> None:
    """Capture one engine: sample and re-score, or score another run's tokens."""
    prepared = prepare(single, options.warn, options.command_line())
    with show_progress("capture") as progress:
        batch = prepared.start(progress).tokens
    Console(highlight=False, soft_wrap=True).print(
        line(
            f"{prepared.request.engine}: {len(batch.samples)} sequences, "
            f"{batch.sampled_tokens} sampled tokens, captured in {single.out}"
        )
    )
