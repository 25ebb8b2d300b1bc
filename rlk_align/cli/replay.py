"""`rlk-align replay`: draws the tokens of a recorded request again, alone."""

import json
import sys
from typing import Annotated, NoReturn

import typer

from rlk_align.api.replaying import Replaying, prepare
from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.flags import takes
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_document
from rlk_align.progress import show_progress
from rlk_align.report.document_terminal import show_document
from rlk_align.report.formats import DOCUMENT_FORMATS
from rlk_align.report.replayed import replayed_document, replayed_record


@takes(
    Replaying,
    name=Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id.")],
    tokens=Annotated[
        str,
        typer.Option(
            metavar="RUN|DUMP", help="What recorded it: a run's folder, @last, or a neutral file."
        ),
    ],
    engine=Annotated[
        str, typer.Option(metavar="SPEC", help="Engine that scores it, NAME[:key=value,...].")
    ],
    step=Annotated[
        int | None, typer.Option(metavar="N", help="The training step, if several have that id.")
    ],
)
def replay(replaying: Replaying, *, output: options.ExplainedOutput = None) -> NoReturn:
    """Draw the tokens of a recorded request again from its seed, alone.

    The kernels' sampler must have drawn them. The engine scores the recorded
    tokens; from its logits each token is drawn again. The first that differs
    is shown with the gap of its logits and the reason: another logit, another
    kept set, or another draw. Exit code 0 where all tokens are drawn again, 1
    where one differs, 4 where logits are missing.
    """
    outputs = parse_outputs(output, ("json", *DOCUMENT_FORMATS))
    with show_progress("replay") as progress:
        prepared = prepare(replaying, options.warn, progress, options.command_line())
        check_outputs(outputs, prepared.run)
        replayed = prepared.start(progress)
    document = replayed_document(replayed, str(prepared.run.folder))
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    record = replayed_record(replayed, str(prepared.run.folder))
    write_document(outputs, document, lambda: json.dumps(record, indent=2) + "\n")
    sys.exit(replayed.exit_code)
