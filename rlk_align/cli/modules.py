"""`rlk-align compare --modules`: compares any model, module by module."""

import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

from rlk_align.api.modules import prepare
from rlk_align.api.pair import Pair
from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_document
from rlk_align.progress import show_progress
from rlk_align.report.document_terminal import show_document
from rlk_align.report.formats import DOCUMENT_FORMATS
from rlk_align.report.modules import modules_document
from rlk_align.report.modules_json import modules_json
from rlk_align.report.verdict_json import record_text


def compare_modules(
    pair: Pair, runs: Sequence[str], others: Collection[str], output: list[str] | None
) -> NoReturn:
    """Compares two engines module by module, prints what was found, and exits. `others`: further
    flags that were given."""
    outputs, command = parse_outputs(output, ("json", *DOCUMENT_FORMATS)), options.command_line()
    prepared = prepare(pair, runs, others, options.warn, command)
    check_outputs(outputs, prepared.run)
    with show_progress("compare") as progress:
        verdict = prepared.start(progress)
    document = modules_document(verdict, str(prepared.run.folder), command)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    write_document(outputs, document, lambda: record_text(modules_json(verdict)))
    sys.exit(verdict.exit_code)
