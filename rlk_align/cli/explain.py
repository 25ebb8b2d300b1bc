"""`rlk-align explain`: names the kind of mismatch of an imported run, without an engine."""

import sys
from typing import Annotated, NoReturn

import typer

from rlk_align.cli import options
from rlk_align.cli.finish import print_report
from rlk_align.cli.outputs import check_outputs, parse_outputs, takes_stdout, write_document
from rlk_align.logs.diagnose.contract import RUN_CONTRACT, load_run_contract
from rlk_align.report.formats import DOCUMENT_FORMATS


def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="An imported run's folder, or @last.")],
    contract: options.RunContractName = RUN_CONTRACT,
    output: options.ExplainedOutput = None,
) -> NoReturn:
    """Name the kind of mismatch that a run has, from its log-probs alone.

    Twenty-two kinds are distinguished, from a mask that is off by one to weights that
    were never synced; the first that applies is the verdict. The exit code is the
    gate: 0 for ordinary numerics, 1 for a mismatch, 4 if nothing can be
    concluded.
    """
    from rlk_align.logs.diagnose.explain import explain as explain_run
    from rlk_align.logs.dumps.imported_run import ImportedRun
    from rlk_align.report.document_terminal import show_document
    from rlk_align.report.explained import explained_document
    from rlk_align.report.explained_json import explained_json

    outputs = parse_outputs(output, ("json", *DOCUMENT_FORMATS))
    limits = load_run_contract(contract)
    imported = ImportedRun.open(run)
    check_outputs(outputs, imported)
    explained = explain_run(imported.sequences(), limits)
    folder = str(imported.folder)
    document = explained_document(explained, folder)
    print_report(lambda console: show_document(document, console), takes_stdout(outputs))
    write_document(outputs, document, lambda: explained_json(explained, folder))
    sys.exit(explained.exit_code)
