"""`rlk-align compare --tokens DUMP`: scores the tokens of a training run again by engines."""

import sys
from typing import NoReturn

from rlk_align.api.rescoring import Rescoring, prepare
from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_document
from rlk_align.progress import show_progress
from rlk_align.report.document_terminal import show_document
from rlk_align.report.formats import DOCUMENT_FORMATS
from rlk_align.report.rescored import rescored_document
from rlk_align.report.rescored_json import rescored_json


def rescore(rescoring: Rescoring, output: list[str] | None) -> NoReturn:
    """Scores a dump again, prints the parts of its mismatch, and exits."""
    outputs = parse_outputs(output, ("json", *DOCUMENT_FORMATS))
    with show_progress("compare") as progress:
        prepared = prepare(rescoring, options.warn, progress, options.command_line())
        for run in (prepared.run, prepared.dump):
            check_outputs(outputs, run)
        rescored = prepared.start(progress)
    dump, scores = str(prepared.dump.folder), str(prepared.run.folder)
    document = rescored_document(rescored, dump, scores)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    write_document(outputs, document, lambda: rescored_json(rescored, dump, scores))
    sys.exit(rescored.exit_code)
